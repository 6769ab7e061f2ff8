"""Families whose layers are divided among two ranks: transformers' logits, and the same bits on
each rank and however a prompt is cut.

The ranks are threads here; `tests/engine/test_ranks.py` has processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.families import FAMILIES, Family
from helpers.family_models import prompt, random_model, reference_logits, saved
from helpers.gguf import tiny_llama, write_llama_gguf
from helpers.models import PagedRun, model_config
from helpers.ranks import together
from helpers.tiny import write_wide_llama
from tokenmill.attention.cpu import CpuBackend
from tokenmill.attention.reference import ReferenceBackend
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.config.ranks import DIVIDED, UNDIVIDED
from tokenmill.kernels import native
from tokenmill.layers.packed import NativeKernels
from tokenmill.layers.plain import PlainKernels
from tokenmill.models.loader import load_model, tensor_shapes
from tokenmill.models.registry import MODELS
from tokenmill.parallel.group import SOLO
from tokenmill.quantization.pack_checkpoint import pack_checkpoint

pytestmark = pytest.mark.skipif(not native.is_available(), reason="needs the native kernels")
SIZE = 2


def kernels_of(kind: str, group: Any) -> Any:
    return PlainKernels(group=group) if kind == "torch" else NativeKernels(group=group)


@pytest.mark.parametrize("kind", ["torch", "native"])
@pytest.mark.parametrize(
    "family",
    [family for family in FAMILIES if family.architecture in DIVIDED],
    ids=lambda family: family.name,
)
def test_two_ranks_compute_what_transformers_does(family: Family, kind: str) -> None:
    ids, path = prompt(40, 7), saved(family.name)

    def work(group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        checkpoint = open_checkpoint(path)
        model = load_model(
            model_config(checkpoint.config), checkpoint, kernels=kernels_of(kind, group)
        )
        backend = ReferenceBackend() if kind == "torch" else CpuBackend()
        run = PagedRun(model, "float32", backend=backend, block_size=32)
        with torch.inference_mode():
            return (
                model.compute_logits(run.prefill("whole", ids)),
                model.compute_logits(run.prefill("cut", ids, chunk=13)),
            )

    first, second = together(SIZE, work)
    assert not isinstance(first, RuntimeError)
    assert not isinstance(second, RuntimeError)
    torch.testing.assert_close(first[0], reference_logits(family.name, ids), rtol=1e-4, atol=2e-4)
    assert torch.equal(first[0], second[0]), "each rank samples for itself"
    assert torch.equal(first[0], first[1]), "a prompt in pieces has the same bits"


@pytest.mark.parametrize("size", [2, 4])
def test_biases_count_once_and_heads_are_shared(size: int, tmp_path: Path) -> None:
    """Of four ranks, two and two have the same head of keys and values."""
    more = {"attention_bias": True, "mlp_bias": True, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    family = Family("", "", "LlamaForCausalLM", "LlamaConfig", more | heads)
    reference, ids = random_model(family), prompt(20, 9)
    reference.save_pretrained(tmp_path)

    def work(group: Any) -> torch.Tensor:
        checkpoint = open_checkpoint(tmp_path)
        config = model_config(checkpoint.config)
        model = load_model(config, checkpoint, kernels=NativeKernels(group=group))
        run = PagedRun(model, "float32", backend=CpuBackend(), block_size=32)
        with torch.inference_mode():
            return model.compute_logits(run.prefill("a", ids))

    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    for found in together(size, work):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("size", [2, 4])
def test_norms_over_all_heads_are_those_of_one_rank(size: int, tmp_path: Path) -> None:
    """Of four ranks, two and two have the same head of keys, which counts once."""
    heads = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    random_model(Family("", "", "Olmo2ForCausalLM", "Olmo2Config", heads)).save_pretrained(tmp_path)
    ids = prompt(20, 9)

    def work(group: Any) -> torch.Tensor:
        checkpoint = open_checkpoint(tmp_path)
        config = model_config(checkpoint.config)
        model = load_model(config, checkpoint, kernels=NativeKernels(group=group))
        run = PagedRun(model, "float32", backend=CpuBackend(), block_size=32)
        with torch.inference_mode():
            return model.compute_logits(run.prefill("a", ids))

    expected = work(SOLO)
    for found in together(size, work):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_are_those_of_one_rank(quantization: Any, tmp_path: Path) -> None:
    """Groups of 32 values are quantised alike, wherever a matrix is divided. What differs is the
    rounding of partial sums, by 0.03.
    """
    path, ids = write_wide_llama(tmp_path / "plain", initializer_range=0.15), prompt(40, 8)
    source, packed = open_checkpoint(path), tmp_path / "packed"
    order = tensor_shapes(source.config)
    pack_checkpoint(source, packed, quantization, source="wide", order=order)

    def compute(group: Any, directory: Path) -> torch.Tensor:
        kernels, checkpoint = NativeKernels(quantization, group), open_checkpoint(directory)
        config = model_config(dict(checkpoint.config), "bfloat16")
        run = PagedRun(
            load_model(config, checkpoint, kernels=kernels),
            "bfloat16",
            backend=CpuBackend(),
            block_size=32,
        )
        with torch.inference_mode():
            return run.model.compute_logits(run.prefill("a", ids))

    expected = compute(SOLO, path)
    first, second = together(SIZE, lambda group: compute(group, path))
    assert torch.equal(first, second)
    assert (first - expected).abs().mean() < 0.06
    for found in together(SIZE, lambda group: compute(group, packed)):
        assert torch.equal(found, first), "panels of a packed file are divided"


@pytest.mark.parametrize("tensor_type", ["Q8_0", "Q4_0", "Q5_1"])
def test_blocks_of_a_gguf_file_are_divided(tensor_type: str, tmp_path: Path) -> None:
    """Llama's queries and keys are interleaved there, head by head."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4}
    model = tiny_llama(**sizes, num_key_value_heads=2)
    path = write_llama_gguf(tmp_path / "tiny.gguf", model, tensor_type)

    def compute(group: Any) -> torch.Tensor:
        checkpoint = open_checkpoint(path)
        config = model_config(dict(checkpoint.config))
        kernels = NativeKernels(group=group)
        run = PagedRun(load_model(config, checkpoint, kernels=kernels), "float32")
        with torch.inference_mode():
            return run.model.compute_logits(run.prefill("a", list(range(3, 30))))

    expected = compute(SOLO)
    for found in together(SIZE, compute):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_rank_holds_its_part_only() -> None:
    path = saved("llama")

    def work(group: Any) -> int:
        checkpoint = open_checkpoint(path)
        model = load_model(
            model_config(checkpoint.config), checkpoint, kernels=PlainKernels(group=group)
        )
        return sum(parameter.numel() for parameter in model.parameters())  # type: ignore[attr-defined]

    checkpoint = open_checkpoint(path)
    whole = load_model(model_config(checkpoint.config), checkpoint, kernels=PlainKernels())
    num_values = sum(parameter.numel() for parameter in whole.parameters())  # type: ignore[attr-defined]
    for found in together(SIZE, work):
        assert isinstance(found, int)
        # More than a half: norms are whole, both have the one head of keys and values.
        assert 0.5 < found / num_values < 0.62


def test_every_family_is_said_to_be_divided_or_not() -> None:
    decoders = {name for name in MODELS if name.endswith(("ForCausalLM", "LMHeadModel"))}
    assert decoders == DIVIDED | set(UNDIVIDED)
