"""B105: a GGUF file says what the model it was made of says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.gguf import tiny_llama, tiny_vocabulary, write_llama_gguf
from tokenmill import LLM, SamplingParams
from tokenmill.errors import CheckpointError

PROMPTS = [[(i * 31 + 7 * j) % 300 + 3 for j in range(4 + 9 * i)] for i in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1)


def test_f16_weights_give_the_models_tokens(tmp_path: Path) -> None:
    model = tiny_llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half().float())
    path = write_llama_gguf(tmp_path / "model.gguf", model, "F16", tiny_vocabulary())
    with LLM(str(path), dtype="float32", num_kv_blocks=32, num_threads=1) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    for output in outputs:
        ids = output.prompt_token_ids + output.outputs[0].token_ids
        first = len(output.prompt_token_ids) - 1
        with torch.inference_mode():
            logits = model(torch.tensor([ids[:-1]])).logits[0, first:]
        assert output.outputs[0].token_ids == logits.argmax(-1).tolist()
        logprobs = logits.log_softmax(-1)
        for row, token_id, position in zip(
            logprobs, output.outputs[0].token_ids, output.outputs[0].logprobs or [], strict=True
        ):
            assert abs(position[token_id].logprob - float(row[token_id])) < 1e-3


@pytest.mark.parametrize("tensor_type", ["Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "BF16"])
def test_every_type_that_is_packed_runs(tmp_path: Path, tensor_type: str) -> None:
    model = tiny_llama(head_dim=64, num_attention_heads=2, num_key_value_heads=1)
    path = write_llama_gguf(tmp_path / "model.gguf", model, tensor_type, tiny_vocabulary())
    found = []
    for settings in ({}, {"max_num_batched_tokens": 16}):
        with LLM(str(path), num_kv_blocks=32, max_num_seqs=8, **settings) as llm:
            found.append([output.outputs for output in llm.generate(PROMPTS, GREEDY)])
    assert found[0] == found[1]
    assert all(len(outputs[0].token_ids) == 20 for outputs in found[0])


def test_a_tensor_that_nobody_knows_is_listed(tmp_path: Path) -> None:
    path = write_llama_gguf(
        tmp_path / "model.gguf",
        tiny_llama(),
        "F32",
        tiny_vocabulary(),
        extra_tensors={"blk.0.mystery.weight": np.zeros((4, 32), np.float32)},
    )
    with pytest.raises(CheckpointError, match=r"blk\.0\.mystery\.weight"):
        LLM(str(path), num_kv_blocks=32)
