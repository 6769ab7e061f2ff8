"""Families in two stages: what goes from one to the other makes no difference to the bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.families import FAMILIES, Family
from helpers.family_models import prompt, saved
from helpers.models import PagedRun, model_config
from tokenmill.attention.cpu import CpuBackend
from tokenmill.attention.reference import ReferenceBackend
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.config.ranks import DIVIDED
from tokenmill.contracts.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec
from tokenmill.errors import CheckpointError
from tokenmill.kernels import native
from tokenmill.layers.kernels import layer_kernels
from tokenmill.layers.plain import PlainKernels
from tokenmill.models.loader import load_model, outline
from tokenmill.worker.ranks import spread_over_stages
from tokenmill.worker.stage import StageModel

KINDS = ["torch", *(["native"] if native.is_available() else [])]


def stage(family: Family, kernels: Any, layers: range, dtype: str) -> StageModel:
    checkpoint = open_checkpoint(saved(family.name))
    config = model_config(checkpoint.config, dtype)
    part = load_model(config, checkpoint, kernels=kernels, layers=layers)
    return StageModel(part, kernels, 128, is_first=layers.start == 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "family",
    [family for family in FAMILIES if family.architecture in DIVIDED],
    ids=lambda family: family.name,
)
def test_two_stages_have_the_bits_of_one(family: Family, kind: str) -> None:
    dtype = "bfloat16" if kind == "native" else "float32"
    kernels = layer_kernels(torch.bfloat16) if kind == "native" else PlainKernels()
    is_native = kind == "native" and family.has_native_attention
    backend = CpuBackend() if is_native else ReferenceBackend()
    checkpoint = open_checkpoint(saved(family.name))
    whole = load_model(model_config(checkpoint.config, dtype), checkpoint, kernels=kernels)
    num_layers = checkpoint.config["num_hidden_layers"]
    first = stage(family, kernels, range(1), dtype)
    last = stage(family, kernels, range(1, num_layers), dtype)
    runs = [
        PagedRun(model, dtype, backend=backend, block_size=32) for model in (whole, first, last)
    ]
    for ids in (prompt(30, 1), prompt(1, 2), prompt(7, 3)):  # one behind the other
        expected = runs[0].forward([("a", ids)])
        stream = runs[1].forward([("a", ids)])
        assert stream.dtype == torch.float32
        found = runs[2].forward([("a", ids)], inputs_embeds=stream)
        assert torch.equal(found, expected)
    with torch.inference_mode():
        assert torch.equal(last.compute_logits(found), whole.compute_logits(expected))


def test_a_stage_wants_its_own_tensors_and_knows_those_of_the_others() -> None:
    checkpoint = open_checkpoint(saved("llama"))
    config = model_config(dict(checkpoint.config) | {"num_hidden_layers": 1})
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.1\."):
        load_model(config, checkpoint, layers=range(1))


def test_an_outline_takes_no_memory() -> None:
    whole = outline(model_config(open_checkpoint(saved("gemma3")).config), PlainKernels())
    devices = {parameter.device.type for parameter in whole.parameters()}  # type: ignore[attr-defined]
    assert devices == {"meta"}
    assert len(whole.attention_layers()) == 3


def test_groups_are_spread_over_the_stages() -> None:
    """Five layers with a window to one without, as of Gemma 3, in two stages."""
    windowed, full = KVCacheSpec(1, 64, "float32", sliding_window=8), KVCacheSpec(1, 64, "float32")
    names = [f"layer {i}" for i in range(12)]
    in_window = [name for i, name in enumerate(names) if i % 6 != 5]
    groups = tuple(KVCacheGroup(tuple(in_window[i : i + 2]), windowed) for i in range(0, 10, 2))
    groups += (KVCacheGroup((names[5], names[11]), full),)
    spread = spread_over_stages(KVCacheConfig(9, 16, groups))
    assert spread.groups[-1] == groups[-1]
    found = [name for group in spread.groups[:-1] for name in group.layer_names]
    assert sorted(found) == sorted(in_window)
    first_stage = set(names[:6])
    for group in spread.groups:
        assert len(first_stage & set(group.layer_names)) == 1
