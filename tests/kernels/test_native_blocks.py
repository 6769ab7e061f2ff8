"""What packing keeps of each block type, and quantising of plain weights."""

from __future__ import annotations

import gguf
import pytest
import torch

from helpers.blocks import HALVES, random_blocks
from tokenmill.checkpoint.checkpoint import RawTensor
from tokenmill.config.memory import Weights
from tokenmill.kernels import gemm
from tokenmill.layers.packed import NativeKernels


def generator(*seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(seed) & 0xFFFFFFFF)


def random_float32(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed, *shape))


WITHOUT_LOSS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"]
"""Block types whose groups of 32 have a scale in half precision, or a power of two."""


@pytest.mark.parametrize("block_type", WITHOUT_LOSS)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (33, 64), (100, 288)])
def test_blocks_are_packed_without_loss(block_type, n, k) -> None:
    raw, weight = random_blocks(block_type, n, k)
    order = torch.randperm(n, generator=generator(n))
    packed = gemm.PackedBlocks.pack(block_type, raw, n, k)
    permuted = gemm.PackedBlocks.pack(block_type, raw, n, k, order)
    assert torch.equal(packed.unpack_rows(torch.arange(n)), weight)
    assert torch.equal(permuted.unpack_rows(torch.arange(n)), weight[order])


@pytest.mark.parametrize("block_type", ["Q4_K", "Q5_K", "IQ4_XS"])
@pytest.mark.parametrize(("n", "k"), [(1, 256), (33, 512), (100, 768)])
def test_products_of_scales_are_rounded_once_to_half_precision(block_type, n, k) -> None:
    raw, weight = random_blocks(block_type, n, k)
    packed = gemm.PackedBlocks.pack(block_type, raw, n, k).unpack_rows(torch.arange(n))
    # Scale and minimum lose half a unit in the last of 11 bits each.
    raw_blocks = raw.view(n * k // 256, -1)
    codes = {"Q4_K": 15, "Q5_K": 31, "IQ4_XS": 127}[block_type]
    halves = [
        raw_blocks[:, at : at + 2].view(torch.float16).float()
        for at in HALVES.get(block_type, (0,))
    ]
    reach = 63 * codes * halves[0].abs() + (63 * halves[1].abs() if len(halves) > 1 else 0)
    error = (packed - weight).abs().view(-1, 256)
    assert bool((error <= 2.0**-11 * reach + 2.0**-24 * codes).all())
    assert bool((error > 0).any())


@pytest.mark.parametrize("block_type", ["Q2_K", "Q3_K", "Q6_K"])
@pytest.mark.parametrize(("n", "k"), [(1, 256), (33, 512), (100, 768)])
def test_halves_of_a_group_share_a_step(block_type, n, k) -> None:
    """Values are off by half a step of the group's 8-bit codes."""
    raw, weight = random_blocks(block_type, n, k)
    order = torch.randperm(n, generator=generator(n))
    packed = gemm.PackedBlocks.pack(block_type, raw, n, k, order)
    unpacked = packed.unpack_rows(torch.arange(n)).view(-1, 32)
    expected = weight[order].view(-1, 32)
    largest = expected.abs().amax(-1, keepdim=True)
    coarsest = {"Q2_K": 127, "Q3_K": 124, "Q6_K": 96}[block_type]  # codes of the largest value
    slack = 1.0 / 2048 + 0.5 / coarsest
    assert bool(((unpacked - expected).abs() <= slack * largest + 1e-6).all())
    if block_type == "Q6_K":
        halves = (unpacked - expected).abs().view(-1, 2, 16).amax(-1) / largest
        assert bool((halves.amin(-1) <= 1.0 / 2048).all())  # the half with the larger values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("n", "k"), [(1, 32), (33, 64), (100, 288)])
def test_weights_are_quantised_to_eight_bits(dtype, n, k) -> None:
    weight = random_float32(n, k).to(dtype)
    order = torch.randperm(n, generator=generator(n))
    found = gemm.PackedBlocks.quantize("Q8_0", weight, order).unpack_rows(torch.arange(n))
    groups = weight.float()[order].view(n, -1, 32)
    scale = (groups.abs().amax(-1, keepdim=True) / torch.tensor(127.0)).half().float()
    codes = (groups * (1.0 / scale)).round().clamp(-127, 127)
    assert torch.equal(found, (codes * scale).view(n, k))


def test_four_bits_lose_less_than_their_range_rounded() -> None:
    weight = random_float32(100, 512)
    found = gemm.PackedBlocks.quantize("Q4_1", weight).unpack_rows(torch.arange(100))
    stored = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q4_1)
    rounded = torch.from_numpy(gguf.dequantize(stored, gguf.GGMLQuantizationType.Q4_1))
    error, plain_error = (found - weight).square().mean(), (rounded - weight).square().mean()
    assert error < 0.95 * plain_error
    flat = torch.full((3, 64), 0.75)
    assert torch.equal(gemm.PackedBlocks.quantize("Q4_1", flat).unpack_rows(torch.arange(3)), flat)


def _unusual(n: int, k: int) -> torch.Tensor:
    """Random values among which are those that a rule must be exact about."""
    weight = random_float32(n, k) * 10.0 ** torch.randint(-6, 5, (n, k), generator=generator(1))
    unusual = torch.tensor([0.0, -0.0, torch.nan, -torch.nan, torch.inf, -torch.inf, 3e38, 1e-41])
    places = torch.randint(0, n * k, (200,), generator=generator(2))
    weight.view(-1)[places] = unusual[torch.arange(200) % len(unusual)]
    weight[:, 32:64] = 0.0
    weight[:, 64:96] = -1.5
    return weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("block_type", ["Q8_0", "Q4_1"])
def test_whole_panels_are_quantised_as_single_rows_are(block_type, dtype) -> None:
    """32 rows at once are the vector code, fewer the plain one."""
    weight = _unusual(64, 256).to(dtype)
    whole = gemm.PackedBlocks.quantize(block_type, weight)
    every = torch.arange(32)
    for start in range(0, 64, 16):
        part = gemm.PackedBlocks.quantize(block_type, weight[start : start + 16])
        expected = part.unpack_rows(every[:16])
        found = whole.unpack_rows(every[:16] + start)
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("k", [32, 96, 2048])
def test_whole_panels_of_bfloat16_hold_every_bit(k) -> None:
    weight = torch.randint(-(1 << 15), 1 << 15, (70, k), generator=generator(3)).to(torch.int16)
    order = torch.randperm(70, generator=generator(4))
    packed = gemm.PackedBf16.pack(weight.view(torch.bfloat16), order)
    found = packed.unpack_rows(torch.arange(70)).view(torch.int32) >> 16
    assert torch.equal(found.to(torch.int16), weight[order])


@pytest.mark.parametrize("block_type", gemm.BLOCK_TYPES)
def test_the_ledger_counts_what_packing_takes(block_type) -> None:
    n, k = 64, 512
    packed = gemm.PackedBlocks.pack(block_type, random_blocks(block_type, n, k)[0], n, k)
    weights = Weights({"w": (n, k)}, {"w": block_type}, "bfloat16", keeps_blocks=True)
    assert weights.num_bytes == packed.buffer.nbytes


@pytest.mark.parametrize("block_type", ["Q4_K", "Q6_K", "MXFP4"])
def test_a_layer_keeps_blocks_of_each_layout(block_type) -> None:
    n, k = 40, 256
    raw, weight = random_blocks(block_type, n, k)
    method = NativeKernels().linear_method(n, k, torch.bfloat16)
    method.slot("w", slice(0, n)).load(RawTensor((n, k), block_type, raw))
    x = random_float32(5, k).bfloat16()
    assert isinstance(method.empty_input(5), gemm.QuantizedRows)
    found = method.project(x, None, torch.float32)
    expected = x.float() @ weight.t()
    assert float((found - expected).norm() / expected.norm()) < 0.02
    assert torch.equal(method.gather(torch.tensor([3])), method.gather(torch.arange(n))[3:4])


def test_rows_that_are_no_whole_blocks_become_bfloat16() -> None:
    """A file cannot have them in K-quants; another type of its row may."""
    raw = RawTensor((3, 33), "F16", torch.zeros(3 * 33 * 2, dtype=torch.uint8))
    method = NativeKernels().linear_method(3, 33, torch.bfloat16)
    method.slot("w", slice(0, 3)).load(raw)
    assert isinstance(method.empty_input(2), torch.Tensor)
