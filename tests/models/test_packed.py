"""Every family from weights that are packed beforehand: the bits of quantising while loading."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.families import FAMILIES
from helpers.family_models import prompt, random_model, saved
from tokenmill import LLM, SamplingParams
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.errors import ConfigError
from tokenmill.kernels import native
from tokenmill.models.loader import tensor_shapes
from tokenmill.quantization.pack_checkpoint import pack_checkpoint
from tokenmill.quantization.packed_blocks import Quantization

TRANSPOSED = ("gpt2",)
LATENT = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
"""Sizes of DeepSeek's whose maps of latents are quantised, in either direction."""
PROMPTS = [prompt(37, 1), prompt(5, 2)]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)


def pack(model: Path, out: Path, format_: Quantization) -> Path:
    source = open_checkpoint(model)
    pack_checkpoint(source, out, format_, source="model", order=tensor_shapes(source.config))
    return out


def results(path: Path, **settings: Any) -> list[Any]:
    defaults: dict[str, Any] = {"num_kv_blocks": 16, "max_model_len": 64, "device": "cpu"}
    with LLM(str(path), skip_tokenizer_init=True, **(defaults | settings)) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in PROMPTS], PARAMS, use_tqdm=False
        )
    return [
        (
            output.outputs[0].token_ids,
            [{i: p.logprob for i, p in step.items()} for step in output.outputs[0].logprobs],
        )
        for output in outputs
    ]


def assert_same_bits(model: Path, packed: Path, format_: Quantization) -> None:
    if not native.is_available():
        return  # nothing can be packed
    quantised = results(model, quantization=format_)
    assert results(pack(model, packed, format_)) == quantised
    assert results(model) != quantised


@pytest.mark.parametrize("format_", ["int8", "int4"])
@pytest.mark.parametrize("name", [each.name for each in FAMILIES if each.name not in TRANSPOSED])
def test_packed_weights_give_the_bits_of_those_quantised_while_loading(
    name: str, format_: Quantization, tmp_path: Path
) -> None:
    assert_same_bits(saved(name), tmp_path, format_)


@pytest.mark.parametrize("format_", ["int8", "int4"])
@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3"])
def test_maps_of_latents_are_quantised_once(
    name: str, format_: Quantization, tmp_path: Path
) -> None:
    (family,) = (each for each in FAMILIES if each.name == name)
    model = random_model(replace(family, config={**family.config, **LATENT}))
    model.save_pretrained(tmp_path / "plain")
    assert_same_bits(tmp_path / "plain", tmp_path / "packed", format_)


@pytest.mark.parametrize("name", TRANSPOSED)
def test_matrices_that_lie_transposed_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"transposed.*while they are loaded"):
        pack(saved(name), tmp_path, "int8")
