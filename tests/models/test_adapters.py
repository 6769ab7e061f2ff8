"""LoRA adapters beside the base model in one batch, against transformers with merged weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.adapters import ATTENTION, MLP, logprobs_of, merged, write_adapter
from helpers.families import FAMILIES
from helpers.family_models import prompt, reference, saved
from tokenmill import LLM, LoRARequest, RequestOutput, SamplingParams

TARGETS: dict[str, tuple[str, ...]] = {
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "mixtral": ATTENTION,
    "qwen3-moe": (*ATTENTION, *MLP),
    "gpt-oss": ATTENTION,
    "deepseek-v2": ("q_proj", "kv_a_proj_with_mqa", "o_proj", *MLP),
    "deepseek-v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", *MLP),
    "bamba": ("in_proj", "out_proj", *ATTENTION, *MLP),
    "mamba2": ("in_proj", "out_proj"),
}
"""Of families whose linear layers have other names, or that have others as well."""


def engine(name: str, **settings: Any) -> LLM:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 8,
        "num_kv_blocks": 64,
        "skip_tokenizer_init": True,
        "enable_lora": True,
        "max_loras": 2,
        "device": "cpu",
    }
    return LLM(str(saved(name)), **(defaults | settings))


def params(max_tokens: int = 5, **changes: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        logprobs=0,
        ignore_eos=True,
        detokenize=False,
        **changes,
    )


def check(output: RequestOutput, model: Any, tolerance: float = 2e-3) -> None:
    """Every token is the best one there, and has its log-probability."""
    (sequence,) = output.outputs
    assert sequence.finish_reason == "length", sequence
    ids = [*output.prompt_token_ids, *sequence.token_ids]
    wanted = logprobs_of(model, ids)
    start = len(output.prompt_token_ids) - 1
    assert sequence.logprobs is not None
    for place, (token_id, entry) in enumerate(
        zip(sequence.token_ids, sequence.logprobs, strict=True), start
    ):
        assert abs(entry[token_id].logprob - float(wanted[place, token_id])) < tolerance
        assert float(wanted[place].max()) - float(wanted[place, token_id]) < tolerance


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_every_family(name: str, tmp_path: Path) -> None:
    model, targets = reference(name), TARGETS.get(name, ATTENTION + MLP)
    first = write_adapter(tmp_path / "first", model, targets=targets, rank=8, seed=1)
    second = write_adapter(
        tmp_path / "second", model, targets=targets[:2], rank=3, seed=2, use_rslora=True
    )
    prompts = [prompt(length, seed) for seed, length in enumerate((9, 21, 14, 5))]
    adapters = [None, LoRARequest("a", str(first)), LoRARequest("b", str(second)), None]
    adapters[3] = adapters[1]
    models = {None: model, "a": merged(model, first), "b": merged(model, second)}
    with engine(name) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], params(), lora_request=adapters
        )
    for output, adapter in zip(outputs, adapters, strict=True):
        check(output, models[None if adapter is None else adapter.name])
    effect = logprobs_of(models["a"], prompts[0]) - logprobs_of(model, prompts[0])
    assert effect.abs().max() > 0.3
