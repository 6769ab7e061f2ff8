"""Checkpoints that other tools have quantised, divided among two ranks: exactly the parts of the
whole weights, and the whole model's logits.

The model's sizes are such that a cut goes through the middle of a group of values that share a
scale, and of a block of a grid.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.families import FAMILIES
from helpers.family_models import prompt, random_model
from helpers.models import PagedRun, model_config
from helpers.quantised import LAYOUTS, Layout, write_quantised
from helpers.ranks import together
from helpers.tiny import write_wide_llama
from tokenmill.attention.cpu import CpuBackend
from tokenmill.attention.reference import ReferenceBackend
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.errors import CheckpointError
from tokenmill.kernels import native
from tokenmill.layers.packed import NativeKernels
from tokenmill.layers.plain import PlainKernels
from tokenmill.models.loader import load_model
from tokenmill.parallel.group import SOLO
from tokenmill.quantization.dequantize import dequantize

pytestmark = pytest.mark.skipif(not native.is_available(), reason="needs the native kernels")
SIZE = 2
INTERMEDIATE = 320
"""Five groups, and two blocks and a half of a grid."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wide_llama(tmp_path_factory.mktemp("plain"), intermediate_size=INTERMEDIATE)


def load(path: Path, kind: str, group: Any) -> PagedRun:
    checkpoint = open_checkpoint(path)
    dtype = "float32" if kind == "torch" else "bfloat16"
    kernels = PlainKernels(group=group) if kind == "torch" else NativeKernels(group=group)
    config = model_config(dict(checkpoint.config), dtype)
    backend = ReferenceBackend() if kind == "torch" else CpuBackend()
    return PagedRun(
        load_model(config, checkpoint, kernels=kernels), dtype, backend=backend, block_size=32
    )


def logits(run: PagedRun) -> torch.Tensor:
    with torch.inference_mode():
        return run.model.compute_logits(run.prefill("a", prompt(40, 8)))


def part_of(whole: dict[str, torch.Tensor], name: str, rank: int, size: int) -> torch.Tensor:
    """What a rank has of a layer, by its name; both have the only head of keys and values."""
    block, _, layer = name.rpartition(".")
    if layer in ("o_proj", "down_proj"):
        return whole[name].chunk(size, dim=1)[rank]
    divided, shared = {"qkv_proj": ("q", "kv"), "gate_up_proj": (("gate", "up"), "")}[layer]
    parts = [whole[f"{block}.{each}_proj"].chunk(size)[rank] for each in divided]
    return torch.cat([*parts, *(whole[f"{block}.{each}_proj"] for each in shared)])


@pytest.mark.parametrize("kind", ["torch", "native"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_ranks_have_parts_of_the_same_values(
    layout: Layout, kind: str, plain: Path, tmp_path: Path
) -> None:
    path = write_quantised(tmp_path / "model", plain, layout)
    checkpoint = open_checkpoint(path)
    whole = {
        name.removesuffix(".weight"): dequantize(checkpoint.read(name), torch.float32)
        for name, block_type in checkpoint.tensor_formats.items()
        if block_type == layout.block_type
    }
    assert len(whole) == 2 * 7

    def work(group: Any) -> torch.Tensor:
        run = load(path, kind, group)
        assert isinstance(run.model, torch.nn.Module)
        layers = dict(run.model.named_modules())
        found = [name for name in layers if name.endswith("_proj")]
        assert len(found) == 2 * 4
        for name in found:
            layer: Any = layers[name]
            expected = part_of(whole, name, group.rank, group.size)
            assert torch.equal(layer.method.gather(torch.arange(layer.out_features)), expected)
        return logits(run)

    expected = work(SOLO)
    first, second = together(SIZE, work)
    assert torch.equal(first, second)
    if kind == "torch":
        torch.testing.assert_close(first, expected, rtol=1e-4, atol=2e-4)
    else:  # partial sums are not rounded to bfloat16
        assert (first - expected).abs().mean() < 0.03 * expected.std()


@pytest.mark.parametrize("family", ["phi3", "mixtral", "qwen3-moe"])
@pytest.mark.parametrize("name", ["gptq with act-order", "awq", "w8a8"])
def test_joined_matrices_and_experts_are_divided(family: str, name: str, tmp_path: Path) -> None:
    (known,) = (each for each in FAMILIES if each.name == family)
    sizes = {"intermediate_size": 192}
    if "moe_intermediate_size" in known.config:
        sizes["moe_intermediate_size"] = 128
    random_model(replace(known, config=known.config | sizes)).save_pretrained(tmp_path / "plain")
    (layout,) = (each for each in LAYOUTS if each.name == name)
    path = write_quantised(tmp_path / "model", tmp_path / "plain", layout)
    expected = logits(load(path, "torch", SOLO))
    for found in together(SIZE, lambda group: logits(load(path, "torch", group))):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[-1]], ids=lambda layout: layout.name)
def test_a_part_that_would_cut_a_block_is_refused(layout: Layout, tmp_path: Path) -> None:
    """Of 96 columns each rank would have a block and a half; rows may be cut anywhere."""
    plain = write_wide_llama(tmp_path / "plain", intermediate_size=96)
    path = write_quantised(tmp_path / "model", plain, layout)
    words = rf"down_proj.weight of 96 columns in {layout.block_type} .*32 values.*parallel_size"
    with pytest.raises(CheckpointError, match=words):
        together(SIZE, lambda group: load(path, "native", group))
