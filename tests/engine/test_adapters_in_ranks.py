"""LoRA adapters of a model in several ranks: each has its part of their matrices, or those of its
layers.

The ranks are threads here (`helpers/rank_threads.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.adapters import ATTENTION, MLP, logprobs_of, merged, write_adapter
from helpers.family_models import prompt, reference, saved
from helpers.rank_threads import llm_in_threads
from tokenmill import LoRARequest, SamplingParams
from tokenmill.errors import AdapterError
from tokenmill.kernels import native

pytestmark = pytest.mark.skipif(not native.is_available(), reason="needs the native kernels")

TARGETS = {
    "qwen2": (*ATTENTION, *MLP),
    "deepseek-v3": ("q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
}


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("name", TARGETS)
def test_adapters_of_two_ranks(name: str, size: str, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", reference(name), targets=TARGETS[name])
    broken = write_adapter(tmp_path / "broken", reference("gemma3"), targets=("q_proj",))
    models = [reference(name), merged(reference(name), adapter)]
    settings = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enable_lora": True,
        "max_model_len": 128,
        "num_kv_blocks": 64,
        "max_loras": 1,
        size: 2,
    }
    with llm_in_threads(saved(name), **settings) as (llm, _):
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
        loaded = llm.llm_engine._adapters.get("a")
        assert loaded.info.num_modules == len(TARGETS[name]) * len(reference(name).model.layers)
    for index, output in enumerate(outputs):
        (sequence,) = output.outputs
        assert sequence.finish_reason == "length", sequence.error
        rows = logprobs_of(models[index // 2], [*output.prompt_token_ids, *sequence.token_ids])
        rows = rows[len(output.prompt_token_ids) - 1 :]
        for row, token_id, step in zip(rows, sequence.token_ids, sequence.logprobs, strict=False):
            assert token_id == int(row.argmax())
            assert abs(step[token_id].logprob - float(row[token_id])) < 2e-3
