"""LoRA adapters of a model whose layers are divided: each rank has its part of their matrices."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.adapters import ATTENTION, MLP, logprobs_of, merged, write_adapter
from helpers.family_models import prompt, reference, saved
from tokenmill import LLM, LoRARequest, SamplingParams
from tokenmill.errors import AdapterError

TARGETS = {
    "qwen2": (*ATTENTION, *MLP),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_adapters_of_two_ranks(name: str, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", reference(name), targets=TARGETS[name])
    broken = write_adapter(tmp_path / "broken", reference("gemma3"), targets=("q_proj",))
    models = [reference(name), merged(reference(name), adapter)]
    sizes = {"max_model_len": 128, "num_kv_blocks": 64, "max_loras": 1}
    with LLM(
        str(saved(name)),
        dtype="float32",
        device="cpu",
        tensor_parallel_size=2,
        skip_tokenizer_init=True,
        enable_lora=True,
        **sizes,
    ) as llm:
        with pytest.raises(AdapterError, match="does not fit the model"):
            llm.generate(
                {"prompt_token_ids": [1, 2]}, lora_request=LoRARequest("broken", str(broken))
            )
        outputs = llm.generate(
            [{"prompt_token_ids": prompt(20, 1)}, {"prompt_token_ids": prompt(9, 2)}] * 2,
            SamplingParams(temperature=0, max_tokens=5, logprobs=0, ignore_eos=True),
            lora_request=[None, None, *[LoRARequest("a", str(adapter))] * 2],
            use_tqdm=False,
        )
    for index, output in enumerate(outputs):
        (sequence,) = output.outputs
        assert sequence.finish_reason == "length", sequence.error
        rows = logprobs_of(models[index // 2], [*output.prompt_token_ids, *sequence.token_ids])
        rows = rows[len(output.prompt_token_ids) - 1 :]
        for row, token_id, step in zip(rows, sequence.token_ids, sequence.logprobs, strict=False):
            assert token_id == int(row.argmax())
            assert abs(step[token_id].logprob - float(row[token_id])) < 2e-3
