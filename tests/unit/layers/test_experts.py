"""Layers of experts on native kernels: what form they read, how they are loaded."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from helpers.models import TensorCheckpoint, model_config
from tokenmill.checkpoint.checkpoint import RawTensor
from tokenmill.kernels.experts import ClampedGate
from tokenmill.kernels.gemm import QuantizedRows
from tokenmill.layers.experts import ExpertShape, NativeExperts
from tokenmill.layers.moe import SparseMoE
from tokenmill.layers.packed import NativeKernels
from tokenmill.layers.plain import PlainKernels
from tokenmill.layers.weights import plain_raw
from tokenmill.models.loader import load_model, tensor_shapes

HIDDEN, SIZE, EXPERTS = 64, 96, 6
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 50,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "moe_intermediate_size": SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


def block(kernels: NativeKernels | PlainKernels, dtype: torch.dtype) -> SparseMoE:
    """With the same random weights each time."""
    made = SparseMoE(
        HIDDEN,
        SIZE,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        renormalize=True,
        dtype=dtype,
        kernels=kernels,
    )
    generator = torch.Generator().manual_seed(0)
    for module in (made.gate, made.experts):
        for slot in module.weight_slots("x"):
            values = torch.randn(slot.shape, generator=generator) / 8
            slot.load(plain_raw(values.bfloat16()))
    return made


def test_routers_of_models_in_four_bits_have_eight() -> None:
    made = block(NativeKernels("int4"), torch.bfloat16)
    (router,) = made.gate.method.weights
    assert router.block_type == "Q8_0"
    assert isinstance(made.experts.method, NativeExperts)
    for method in (*made.experts.method.gate_up, *made.experts.method.down):
        assert [weight.block_type for weight in method.weights] == ["Q4_1"]


def test_the_stream_is_quantised_once_where_all_readers_can_take_that() -> None:
    assert isinstance(block(NativeKernels("int4"), torch.bfloat16).empty_input(3), QuantizedRows)
    plain = block(NativeKernels(), torch.bfloat16).empty_input(3)
    assert isinstance(plain, torch.Tensor)
    assert (plain.shape, plain.dtype) == ((3, HIDDEN), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_block_is_near_torchs(dtype: torch.dtype) -> None:
    x = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    found, expected = (block(kernels, dtype)(x) for kernels in (NativeKernels(), PlainKernels()))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert (found - expected).norm() <= tolerance * expected.norm()


def test_biases_and_clamped_gates_are_near_torchs() -> None:
    shape = ExpertShape(EXPERTS, HIDDEN, SIZE, torch.float32, ClampedGate(1.7, 0.5), has_bias=True)
    results = []
    for kernels in (NativeKernels(), PlainKernels()):
        generator = torch.Generator().manual_seed(0)
        method = kernels.experts_method(shape)
        for part in (*method.gate_up, *method.down):
            rows = 2 * SIZE if part in method.gate_up else HIDDEN
            slot = part.slot("w", slice(0, rows))
            slot.load(plain_raw(torch.randn(slot.shape, generator=generator) / 8))
        for bias in (method.gate_up_bias, method.down_bias):
            assert bias is not None
            bias.copy_(torch.randn(bias.shape, generator=generator))
        x = torch.randn(20, HIDDEN, generator=generator)
        weights = torch.rand(20, 2, generator=generator)
        chosen = torch.randint(EXPERTS, (20, 2), generator=generator, dtype=torch.int32)
        results.append(method.mix(x, weights, chosen, base=x))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


class Watched(TensorCheckpoint):
    """Counts the tensors that are alive after they were read."""

    alive = 0
    most_alive = 0

    def read(self, name: str) -> RawTensor:
        raw = super().read(name)
        data = raw.data.clone()
        self.alive += 1
        self.most_alive = max(self.most_alive, self.alive)
        weakref.finalize(data, self._gone)
        return RawTensor(raw.shape, raw.format, data)

    def _gone(self) -> None:
        self.alive -= 1


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_an_expert_is_packed_as_soon_as_its_tensors_are_read(quantization: Any) -> None:
    shapes = tensor_shapes(CONFIG)
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    checkpoint = Watched(CONFIG, tensors)
    load_model(model_config(CONFIG, "bfloat16"), checkpoint, kernels=NativeKernels(quantization))
    assert len([name for name in tensors if ".experts." in name]) == 2 * EXPERTS * 3
    assert checkpoint.most_alive <= 4  # queries, keys and values, and the one that is next
    assert checkpoint.alive <= 1
