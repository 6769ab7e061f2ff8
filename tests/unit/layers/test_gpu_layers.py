"""Layers on the GPU's kernels (interpreted where there is no GPU) compute what torch's do."""

from __future__ import annotations

import os

import pytest
import torch

from tokenmill.checkpoint.checkpoint import RawTensor
from tokenmill.errors import ConfigError
from tokenmill.kernels.float8_rows import Float8Rows
from tokenmill.layers.embedding import VocabEmbedding
from tokenmill.layers.gpu import (
    Fp8LinearMethod,
    GpuKernels,
    GpuLinearMethod,
    Int4LinearMethod,
    WeightFormat,
)
from tokenmill.layers.kernels import LayerKernels, require_torch_path
from tokenmill.layers.linear import Linear
from tokenmill.layers.mlp import GatedMLP
from tokenmill.layers.norm import LayerNorm, ResidualAdd, RMSNorm
from tokenmill.layers.plain import PlainKernels
from tokenmill.layers.weights import HasWeights
from tokenmill.quantization.dequantize import dequantize

DEVICE = torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")
FORMATS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def raw(values: torch.Tensor) -> RawTensor:
    return RawTensor(
        tuple(values.shape), FORMATS[values.dtype], values.contiguous().view(torch.uint8).view(-1)
    )


def fill(layer: HasWeights, prefix: str, weights: dict[str, torch.Tensor]) -> None:
    """Load the layer's weights; ones that are missing are drawn and remembered."""
    for slot in layer.weight_slots(prefix):
        if slot.name not in weights:
            weights[slot.name] = (torch.randn(slot.shape) / 8).to(torch.bfloat16)
        slot.load(raw(weights[slot.name]))


def kernels(
    weight_format: WeightFormat = "plain", *, exact: bool = True, most_own_rows: int = 0
) -> GpuKernels:
    return GpuKernels(DEVICE, exact=exact, weight_format=weight_format, most_own_rows=most_own_rows)


def activations(num_rows: int, size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(num_rows, size).to(dtype).to(DEVICE)


def projection(chosen: LayerKernels, bias: bool, weights: dict[str, torch.Tensor]) -> Linear:
    with chosen.device:
        layer = Linear(
            48,
            {"q_proj": 32, "k_proj": 16},
            bias=bias,
            dtype=torch.bfloat16,
            kernels=chosen,
        )
    fill(layer, "attn.qkv_proj", weights)
    return layer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("exact", "most_own_rows"), [(True, 0), (False, 0), (False, 8)], ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 20])
def test_a_merged_projection(num_rows: int, exact: bool, most_own_rows: int, bias: bool) -> None:
    weights: dict[str, torch.Tensor] = {}
    ours = projection(kernels(exact=exact, most_own_rows=most_own_rows), bias, weights)
    plain = projection(PlainKernels(DEVICE), bias, weights)
    assert len(weights) == (4 if bias else 2)
    x = activations(num_rows, 48)
    torch.testing.assert_close(ours(x), plain(x), rtol=2**-7, atol=2**-9)
    assert ours.empty_input(num_rows).shape == x.shape
    assert ours.empty_input(num_rows).device.type == DEVICE.type


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    """Whoever asks for exactness gets it for every number of rows."""
    torch.manual_seed(0)
    layer = projection(kernels(exact=True), True, {})
    x = activations(40, 48)
    together = layer(x)
    for rows in (slice(0, 1), slice(7, 10), slice(20, 40)):
        assert torch.equal(layer(x[rows]), together[rows])


@pytest.mark.parametrize(("exact", "most_own_rows"), [(True, 0), (False, 0)], ids=str)
def test_a_bias_on_float32_results(exact: bool, most_own_rows: int) -> None:
    """As of a router: the product of bfloat16 is not rounded before it."""
    method = kernels(exact=exact, most_own_rows=most_own_rows).linear_method(6, 48, torch.bfloat16)
    method.slot("weight", slice(0, 6)).load(raw((torch.randn(6, 48) / 8).bfloat16()))
    x, bias = activations(5, 48), torch.randn(6, device=DEVICE)
    wanted = x.double() @ method.gather(torch.arange(6, device=DEVICE)).double().t() + bias
    found = method.project(x, bias, torch.float32)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("exact", [True, False])
def test_an_embedding_and_its_logits(exact: bool) -> None:
    weights: dict[str, torch.Tensor] = {}
    embeddings = []
    for chosen in (kernels(exact=exact), PlainKernels(DEVICE)):
        with chosen.device:
            embedding = VocabEmbedding(70, 32, dtype=torch.bfloat16, kernels=chosen)
        fill(embedding, "model.embed_tokens", weights)
        embeddings.append(embedding)
    ours, plain = embeddings
    for dtype in (torch.int32, torch.int64):
        ids = torch.tensor([3, 69, 0, 3], dtype=dtype, device=DEVICE)
        assert torch.equal(ours(ids), plain(ids))
    x = activations(5, 32)
    logits = ours.compute_logits(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, plain.compute_logits(x), rtol=1e-5, atol=1e-5)


def test_a_norm_starts_and_continues_the_stream() -> None:
    chosen = kernels()
    weights: dict[str, torch.Tensor] = {}
    norms = []
    for each in (chosen, PlainKernels(DEVICE)):
        with each.device:
            norm = RMSNorm(48, 1e-5, dtype=torch.bfloat16, kernels=each)
        fill(norm, "norm", weights)
        norms.append(norm)
    ours, plain = norms
    x = activations(6, 48)
    out, residual = ours(x)
    wanted, wanted_residual = plain(x)
    torch.testing.assert_close(out, wanted, rtol=2**-7, atol=1e-6)
    assert torch.equal(residual, wanted_residual)
    out, residual = ours(x, residual)
    wanted, wanted_residual = plain(x, wanted_residual)
    torch.testing.assert_close(out, wanted, rtol=2**-7, atol=1e-6)
    assert torch.equal(residual, wanted_residual)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gated_block(dtype: torch.dtype, exact: bool) -> None:
    weights: dict[str, torch.Tensor] = {}
    blocks = []
    for chosen in (kernels(exact=exact, most_own_rows=32), PlainKernels(DEVICE)):
        with chosen.device:
            block = GatedMLP(32, 72, bias=False, dtype=dtype, kernels=chosen)
        fill(block.gate_up_proj, "mlp.gate_up_proj", weights)
        fill(block.down_proj, "mlp.down_proj", weights)
        blocks.append(block)
    ours, plain = blocks
    x = activations(9, 32, dtype)
    assert ours(x).dtype == dtype
    torch.testing.assert_close(ours(x), plain(x), rtol=2**-6, atol=2**-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gelu(dtype: torch.dtype) -> None:
    x = activations(5, 90, dtype) * 3
    found, wanted = kernels().gelu(x), PlainKernels(DEVICE).gelu(x)
    assert found.dtype == dtype
    rounding = 2**-8 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(found, wanted, rtol=rounding, atol=1e-6)


def test_room_for_activations() -> None:
    room = kernels().empty(3, 5, torch.float16)
    assert room.shape == (3, 5)
    assert room.dtype == torch.float16
    assert room.device.type == DEVICE.type


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    difference = (found.float() - wanted.float()).square().sum()
    return float((difference / wanted.float().square().sum()).sqrt())


FP8_ERROR = 0.12 if DEVICE.type == "cpu" else 0.06
"""Triton's interpreter converts a value just below a power of two to half of it."""
QUANTIZED: list[tuple[WeightFormat, float]] = [("fp8", FP8_ERROR), ("int4", 0.15)]
"""(format, most relative error of a product): 3 bits of a mantissa twice, or 16 levels."""


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("weight_format", "most"), QUANTIZED)
def test_a_quantised_projection(
    weight_format: WeightFormat, most: float, exact: bool, bias: bool
) -> None:
    weights: dict[str, torch.Tensor] = {}
    ours = projection(kernels(weight_format, exact=exact), bias, weights)
    plain = projection(PlainKernels(DEVICE), bias, weights)
    for num_rows in (1, 20):
        x = activations(num_rows, 48)
        assert 0 < relative_error(ours(x), plain(x)) < most
    assert ours(activations(0, 48)).shape == (0, 48)
    rows = torch.tensor([3, 47, 3], device=DEVICE)
    gathered = ours.method.gather(rows)
    assert gathered.dtype == torch.bfloat16
    assert relative_error(gathered, plain.method.gather(rows)) < most


@pytest.mark.parametrize(("weight_format", "most"), QUANTIZED)
def test_a_quantised_block_behind_a_norm(weight_format: WeightFormat, most: float) -> None:
    """Norm and activation write what the products read."""
    weights: dict[str, torch.Tensor] = {}
    results = []
    x = activations(9, 48)
    for chosen in (kernels(weight_format), PlainKernels(DEVICE)):
        with chosen.device:
            block = GatedMLP(48, 80, bias=False, dtype=torch.bfloat16, kernels=chosen)
            norm = RMSNorm(
                48,
                1e-5,
                dtype=torch.bfloat16,
                kernels=chosen,
                empty_out=block.gate_up_proj.empty_input,
            )
        fill(norm, "norm", weights)
        fill(block.gate_up_proj, "mlp.gate_up_proj", weights)
        fill(block.down_proj, "mlp.down_proj", weights)
        normed, residual = norm(x)
        in_float8 = weight_format == "fp8" and isinstance(chosen, GpuKernels)
        assert isinstance(normed, Float8Rows) == in_float8
        assert torch.equal(residual, x.float())
        results.append(block(normed))
    assert 0 < relative_error(*results) < 2 * most


@pytest.mark.parametrize(("weight_format", "most"), [("plain", 2**-6), *QUANTIZED])
def test_a_block_without_a_gate_behind_a_layer_norm(
    weight_format: WeightFormat, most: float
) -> None:
    """As in GPT-2: the stream is normalised with a mean and a bias, or read as it is."""
    weights: dict[str, torch.Tensor] = {}
    results = []
    x = activations(9, 48)
    for chosen in (kernels(weight_format), PlainKernels(DEVICE)):
        shared = {"dtype": torch.bfloat16, "kernels": chosen}
        with chosen.device:
            up = Linear(48, 80, bias=True, **shared)
            down = Linear(80, 48, bias=True, **shared)
            norm = LayerNorm(48, 1e-5, empty_out=up.empty_input, **shared)
        fill(up, "up", weights)
        fill(down, "down", weights)
        fill(norm, "norm", weights)
        normed, residual = norm(x)
        assert torch.equal(residual, x.float())
        expanded = up(normed)
        activated = down.empty_input(len(expanded))
        chosen.activation(expanded, "gelu_tanh", activated)
        read, residual = ResidualAdd(chosen, up.empty_input)(down(activated), residual)
        in_float8 = weight_format == "fp8" and isinstance(chosen, GpuKernels)
        for rows in (normed, activated, read):
            assert isinstance(rows, Float8Rows) == in_float8
        results.append((up(read), residual))
    for found, wanted in zip(*results, strict=True):
        assert relative_error(found, wanted) < 2 * most


@pytest.mark.parametrize("weight_format", ["fp8", "int4"])
def test_the_vocabulary_stays_plain(weight_format: WeightFormat) -> None:
    chosen = kernels(weight_format)
    embedding = VocabEmbedding(70, 32, dtype=torch.bfloat16, kernels=chosen)
    assert isinstance(embedding.method, GpuLinearMethod)
    method = chosen.linear_method(32, 64, torch.bfloat16)
    assert isinstance(method, {"fp8": Fp8LinearMethod, "int4": Int4LinearMethod}[weight_format])


def test_four_bit_codes_of_a_checkpoint_are_kept() -> None:
    blocks = torch.randint(0, 256, (20 * 4, 18), dtype=torch.uint8)
    # Powers of two, which bfloat16 holds.
    scales = 2.0 ** torch.randint(-6, -3, (len(blocks), 1))
    blocks[:, :2] = scales.half().view(torch.uint8)
    stored = RawTensor((20, 128), "Q4_0", blocks.view(-1))
    method = kernels("int4").linear_method(24, 128, torch.bfloat16)
    method.slot("rest", slice(20, 24)).load(raw(torch.zeros(4, 128)))
    method.slot("weight", slice(0, 20)).load(stored)
    gathered = method.gather(torch.arange(24, device=DEVICE)).cpu()
    assert torch.equal(gathered[:20], dequantize(stored, torch.bfloat16))
    assert not gathered[20:].any()


@pytest.mark.parametrize("weight_format", ["fp8", "int4"])
def test_a_row_of_a_quantised_product_has_the_same_bits_in_any_batch(
    weight_format: WeightFormat,
) -> None:
    layer = projection(kernels(weight_format), False, {})
    x = activations(40, 48)
    together = layer(x)
    for rows in (slice(0, 1), slice(7, 10), slice(20, 40)):
        assert torch.equal(layer(x[rows]), together[rows])


def test_a_layer_without_a_kernel_is_refused() -> None:
    require_torch_path(PlainKernels(), "A layer")
    with pytest.raises(ConfigError, match=r"A layer has no kernel for a GPU.*device='cpu'"):
        require_torch_path(GpuKernels(DEVICE, exact=False), "A layer")
