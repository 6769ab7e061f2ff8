"""Packed products against float64, and against themselves: one row has one result."""

from collections.abc import Iterator

import pytest
import torch

from helpers import isas
from helpers.blocks import random_blocks, whole_blocks
from tokenmill import _native
from tokenmill.kernels import arena, gemm, native

ISAS = native.isas()
"""Instruction sets of this machine."""
BLOCK_TYPES = list(gemm.BLOCK_TYPES)
SHAPES = [(1, 1, 32), (3, 7, 64), (16, 32, 96), (17, 33, 32), (31, 100, 160), (70, 65, 256)]
"""(M, N, K)."""


@pytest.fixture(autouse=True)
def _same_settings_afterwards() -> Iterator[None]:
    with isas.active(native.active_isa()):
        yield


def generator(*seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(seed) & 0xFFFFFFFF)


def random_bf16(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed, *shape)).bfloat16()


def random_float32(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed, *shape))


def dequantized(x: gemm.QuantizedRows) -> torch.Tensor:
    """What quantised rows stand for, exact in float64."""
    groups = x.codes.double().unflatten(-1, (-1, gemm.GROUP_SIZE))
    return (groups * x.scales.double().unsqueeze(-1)).flatten(-2)


def bits(x: torch.Tensor) -> list[int]:
    return x.contiguous().view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32).tolist()


def assert_near(
    actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """Within the rounding of K float32 additions, relative to the size of the terms."""
    expected = gemm.gemm_reference(x, weight, bias)
    size = gemm.gemm_reference(x.abs(), weight.abs(), None if bias is None else bias.abs())
    assert bool(((actual.double() - expected).abs() <= 2e-6 * size + 1e-30).all())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("m", "n", "k"), [*SHAPES, (5, 48, 1), (9, 31, 33), (2, 5, 47), (40, 16, 577)]
)
def test_bf16_product(isa, m, n, k) -> None:
    _native.set_active_isa(isa)
    x, weight, bias = (
        random_bf16(m, k),
        random_bf16(n, k, seed=1),
        torch.randn(n, generator=generator(n)),
    )
    packed = gemm.PackedBf16.pack(weight)
    assert_near(gemm.gemm_bf16(x, packed, out_dtype=torch.float32), x, weight)
    with_bias = gemm.gemm_bf16(x, packed, bias, out_dtype=torch.float32)
    assert_near(with_bias, x, weight, bias)
    assert torch.equal(gemm.gemm_bf16(x, packed, bias), with_bias.bfloat16())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("m", "n", "k"), [*SHAPES, (5, 48, 1), (9, 31, 33), (24, 40, 47), (40, 16, 577)]
)
def test_float32_product(isa, m, n, k) -> None:
    _native.set_active_isa(isa)
    x, weight, bias = random_float32(m, k), random_float32(n, k, seed=1), random_float32(n)
    packed = gemm.PackedFloat32.pack(weight)
    assert_near(gemm.gemm_float32(x, packed), x, weight)
    with_bias = gemm.gemm_float32(x, packed, bias)
    assert_near(with_bias, x, weight, bias)
    rounded = gemm.gemm_float32(x, packed, bias, out=torch.empty(m, n, dtype=torch.bfloat16))
    assert torch.equal(rounded, with_bias.bfloat16())


@pytest.mark.parametrize("isa", ISAS)
def test_float32_products_add_along_k_in_order(isa) -> None:
    """The bits of one fused multiply-add after another, which float64 gives for few digits."""
    _native.set_active_isa(isa)
    x, weight = random_bf16(3, 70).float(), random_bf16(5, 70, seed=1).float()
    expected = torch.zeros(3, 5)
    for value in range(70):
        product = x[:, value : value + 1].double() * weight[:, value].double()  # exact
        expected = (product + expected.double()).float()
    packed = gemm.PackedFloat32.pack(weight)
    assert bits(gemm.gemm_float32(x, packed)) == bits(expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("block_type", BLOCK_TYPES)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_block_product(isa, block_type, m, n, k) -> None:
    _native.set_active_isa(isa)
    k = whole_blocks(block_type, k)
    packed = gemm.PackedBlocks.pack(block_type, random_blocks(block_type, n, k)[0], n, k)
    weight = packed.unpack_rows(torch.arange(n))
    x, bias = gemm.quantize_rows(random_bf16(m, k)), torch.randn(n, generator=generator(n))
    assert_near(gemm.gemm_blocks(x, packed, out_dtype=torch.float32), dequantized(x), weight)
    with_bias = gemm.gemm_blocks(x, packed, bias, out_dtype=torch.float32)
    assert_near(with_bias, dequantized(x), weight, bias)
    assert torch.equal(gemm.gemm_blocks(x, packed, bias), with_bias.bfloat16())


@pytest.mark.parametrize("m", range(1, 21))
def test_block_products_agree_between_instruction_sets(m) -> None:
    for block_type in BLOCK_TYPES:
        k = whole_blocks(block_type, 192)
        raw, _ = random_blocks(block_type, 70, k)
        packed = gemm.PackedBlocks.pack(block_type, raw, 70, k)
        results = []
        for isa in ISAS:
            _native.set_active_isa(isa)
            x = gemm.quantize_rows(random_bf16(m, k))
            results.append(bits(gemm.gemm_blocks(x, packed, out_dtype=torch.float32)))
        assert all(result == results[0] for result in results)


@pytest.mark.parametrize("isa", ISAS)
def test_block_products_round_each_group_once(isa) -> None:
    """Sums a little above the middle between two floats, by less than float64 can tell: what is
    rounded to float64 before goes to the even one.
    """
    _native.set_active_isa(isa)
    wanted = range(259, 508, 2)  # of odd numbers, times 127 * 1026: 26 bits, the last ones 10
    raw = torch.zeros(len(wanted), 2, 34, dtype=torch.uint8)
    codes = raw[:, :, 2:].view(torch.int8)
    raw[:, 0, :2] = torch.tensor([2.0**-24], dtype=torch.float16).view(torch.uint8)
    codes[:, 0, 0] = 1
    raw[:, 1, :2] = torch.tensor([1026 / 1024], dtype=torch.float16).view(torch.uint8)
    for column, total in enumerate(wanted):
        for i in range(4):
            codes[column, 1, i] = (total + i) // 4
    packed = gemm.PackedBlocks.pack("Q8_0", raw.flatten(), len(wanted), 64)
    x = torch.zeros(3, 64)
    x[:, 0] = 127 * 2.0**-26
    x[:, 32:36] = 127
    middle = torch.tensor([127 * total * 1026 / 1024 for total in wanted], dtype=torch.float64)
    expected = torch.nextafter(middle, middle + 1).float()
    assert bool((expected.double() > middle).all())
    actual = gemm.gemm_blocks(gemm.quantize_rows(x), packed, out_dtype=torch.float32)
    assert torch.equal(actual, expected.expand(3, -1))


SPANS = [(0, 1), (7, 8), (100, 101), (3, 19), (20, 53), (0, 33), (64, 101)]
SPANS += [(40, 40 + length) for length in range(2, 14)]
"""Rows of 101: alone, and as many as any tile of rows has."""


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("k", [800, 4700])  # the second is more than one part of a panel
def test_bf16_rows_are_the_same_alone_and_in_a_batch(isa, k) -> None:
    _native.set_active_isa(isa)
    x = random_bf16(101, k)
    packed = gemm.PackedBf16.pack(random_bf16(77, k, seed=1))
    whole = gemm.gemm_bf16(x, packed, out_dtype=torch.float32)
    for begin, end in SPANS:
        part = gemm.gemm_bf16(x[begin:end], packed, out_dtype=torch.float32)
        assert torch.equal(part, whole[begin:end])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("k", [800, 4700])
def test_float32_rows_are_the_same_alone_and_in_a_batch(isa, k) -> None:
    _native.set_active_isa(isa)
    x = random_float32(101, k)
    packed = gemm.PackedFloat32.pack(random_float32(77, k, seed=1))
    whole = gemm.gemm_float32(x, packed)
    for begin, end in SPANS:
        assert torch.equal(gemm.gemm_float32(x[begin:end], packed), whole[begin:end])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("block_type", ["Q4_0", "Q4_1", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"])
def test_block_rows_are_the_same_alone_and_in_a_batch(isa, block_type) -> None:
    _native.set_active_isa(isa)
    x = random_bf16(101, 800)
    packed = gemm.PackedBlocks.pack(block_type, random_blocks(block_type, 77, 800)[0], 77, 800)
    whole = gemm.gemm_blocks(gemm.quantize_rows(x), packed, out_dtype=torch.float32)
    for begin, end in SPANS:
        rows = gemm.quantize_rows(x[begin:end])
        part = gemm.gemm_blocks(rows, packed, out_dtype=torch.float32)
        assert bits(part) == bits(whole[begin:end])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("m", [1, 33, 700])
def test_threads_do_not_change_a_bit(isa, m) -> None:
    _native.set_active_isa(isa)
    k, n = 1536, 96  # 700 rows of 1536 values are more than one block of rows
    x = random_bf16(m, k)
    bf16 = gemm.PackedBf16.pack(random_bf16(n, k, seed=1))
    float32 = gemm.PackedFloat32.pack(random_float32(n, k, seed=1))
    blocks = gemm.PackedBlocks.pack("Q4_1", random_blocks("Q4_1", n, k)[0], n, k)
    results = []
    for num_threads in [1, 2, 3]:
        _native.set_num_threads(num_threads)
        quantized = gemm.quantize_rows(x)
        results.append(
            (
                bits(gemm.gemm_bf16(x, bf16, out_dtype=torch.float32)),
                bits(gemm.gemm_float32(x.float(), float32)),
                bits(gemm.gemm_blocks(quantized, blocks, out_dtype=torch.float32)),
            )
        )
    assert results[1] == results[0]
    assert results[2] == results[0]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("m", "k"), [(1, 32), (5, 96), (33, 576)])
def test_quantised_rows_are_the_reference(isa, dtype, m, k) -> None:
    _native.set_active_isa(isa)
    x = torch.randn(m, k, generator=generator(m, k)) * 10.0 ** torch.arange(-3, m - 3).unsqueeze(1)
    x[0, :32] = 0
    x = x.to(dtype)
    quantized = gemm.quantize_rows(x)
    codes, scales = gemm.quantize_rows_reference(x)
    assert torch.equal(quantized.codes, codes)
    assert torch.equal(quantized.scales, scales)
    sums = codes.int().unflatten(-1, (-1, gemm.GROUP_SIZE)).sum(-1, dtype=torch.int32)
    assert torch.equal(quantized.sums, sums)
    assert torch.equal(quantized.scaled_sums, sums.float() * scales)


@pytest.mark.parametrize("isa", ISAS)
def test_a_bad_row_spoils_no_other(isa) -> None:
    _native.set_active_isa(isa)
    x = random_bf16(20, 64)
    bf16 = gemm.PackedBf16.pack(random_bf16(40, 64, seed=1))
    float32 = gemm.PackedFloat32.pack(random_float32(40, 64, seed=1))
    blocks = gemm.PackedBlocks.pack("Q4_1", random_blocks("Q4_1", 40, 64)[0], 40, 64)

    def products() -> list[torch.Tensor]:
        return [
            gemm.gemm_bf16(x, bf16),
            gemm.gemm_float32(x.float(), float32),
            gemm.gemm_blocks(gemm.quantize_rows(x), blocks),
        ]

    good = products()
    x[7, 3] = torch.nan
    x[11, 40] = torch.inf
    others = [row for row in range(20) if row not in (7, 11)]
    for before, after in zip(good, products(), strict=True):
        assert torch.equal(before[others], after[others])
        assert bool(after[7].isnan().all())
        assert not bool(after[11].isfinite().any())


@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 65), (100, 288)])
def test_bf16_is_packed_without_loss(n, k) -> None:
    weight, order = random_bf16(n, k), torch.randperm(n, generator=generator(n))
    assert torch.equal(gemm.PackedBf16.pack(weight, order).unpack_rows(order), weight[order][order])


@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 65), (100, 288)])
def test_float32_is_packed_without_loss(n, k) -> None:
    weight, order = random_float32(n, k), torch.randperm(n, generator=generator(n))
    packed = gemm.PackedFloat32.pack(weight, order)
    assert torch.equal(packed.unpack_rows(order), weight[order][order])


def test_rows_are_read_by_ids_of_either_width() -> None:
    packed = [
        gemm.PackedBf16.pack(random_bf16(40, 64)),
        gemm.PackedFloat32.pack(random_float32(40, 64)),
        gemm.PackedBlocks.pack("Q8_0", random_blocks("Q8_0", 40, 64)[0], 40, 64),
    ]
    ids = torch.tensor([39, 0, 7, 7])
    for each in packed:
        assert torch.equal(each.unpack_rows(ids.int()), each.unpack_rows(ids))
        for wrong in (torch.tensor([40], dtype=torch.int32), torch.tensor([-1])):
            with pytest.raises(ValueError, match=r"ids must be within \[0, 40\)"):
                each.unpack_rows(wrong)
        with pytest.raises(ValueError, match="ids must be int32 or int64"):
            each.unpack_rows(ids.short())


def test_recorded_rows_follow_the_ids_of_a_replay() -> None:
    packed = gemm.PackedBf16.pack(random_bf16(40, 64))
    ids, memory = torch.tensor([1, 2, 3], dtype=torch.int32), arena.Arena()
    program = _native.Program(3)
    with arena.allocate_from(memory):
        program.begin()
        rows = packed.unpack_rows(ids)
        program.end()
    ids[:2] = torch.tensor([30, 31])
    program.replay(2)
    assert torch.equal(rows[:2], packed.unpack_rows(torch.tensor([30, 31])))
    ids[0] = 40
    with pytest.raises(ValueError, match="ids must be within"):
        program.replay(1)


@pytest.mark.parametrize("isa", ISAS)
def test_empty_shapes(isa) -> None:
    _native.set_active_isa(isa)
    packed = gemm.PackedBf16.pack(random_bf16(40, 64))
    assert gemm.gemm_bf16(random_bf16(0, 64), packed).shape == (0, 40)
    blocks = gemm.PackedBlocks.pack("Q8_0", random_blocks("Q8_0", 40, 64)[0], 40, 64)
    assert gemm.gemm_blocks(gemm.quantize_rows(random_bf16(0, 64)), blocks).shape == (0, 40)
    none = gemm.PackedBf16.pack(random_bf16(0, 64))
    assert gemm.gemm_bf16(random_bf16(3, 64), none).shape == (3, 0)
    without_k = gemm.PackedBf16.pack(random_bf16(40, 0))
    assert not gemm.gemm_bf16(random_bf16(3, 0), without_k).any()
    floats = gemm.PackedFloat32.pack(random_float32(40, 0))
    assert not gemm.gemm_float32(random_float32(3, 0), floats).any()
    assert gemm.gemm_float32(random_float32(0, 0), floats).shape == (0, 40)


@pytest.mark.parametrize("isa", ISAS)
def test_rows_of_a_wider_buffer(isa) -> None:
    """Inputs and outputs may be columns of a larger tensor; the other columns stay untouched."""
    _native.set_active_isa(isa)
    wide = random_bf16(19, 200)
    packed = gemm.PackedBf16.pack(random_bf16(40, 64, seed=1))
    out = torch.full((19, 100), 7.0)
    gemm.gemm_bf16(wide[:, 70:134], packed, out=out[:, 30:70])
    expected = gemm.gemm_bf16(wide[:, 70:134].contiguous(), packed, out_dtype=torch.float32)
    assert torch.equal(out[:, 30:70], expected)
    assert bool((out[:, :30] == 7).all())
    assert bool((out[:, 70:] == 7).all())
    floats = gemm.PackedFloat32.pack(random_float32(40, 64, seed=1))
    gemm.gemm_float32(wide.float()[:, 70:134], floats, out=out[:, 30:70])
    assert torch.equal(out[:, 30:70], gemm.gemm_float32(wide[:, 70:134].float(), floats))
    assert bool((out[:, :30] == 7).all())
    assert bool((out[:, 70:] == 7).all())
    strided = gemm.quantize_rows(wide[:, 70:134])
    assert torch.equal(strided.codes, gemm.quantize_rows(wide[:, 70:134].contiguous()).codes)


def test_wrong_arguments_are_refused() -> None:
    packed = gemm.PackedBf16.pack(random_bf16(40, 64))
    with pytest.raises(ValueError, match="x must be a matrix of 64 columns"):
        gemm.gemm_bf16(random_bf16(3, 32), packed)
    with pytest.raises(ValueError, match="x must be bfloat16"):
        gemm.gemm_bf16(torch.zeros(3, 64), packed)
    floats = gemm.PackedFloat32.pack(random_float32(40, 64))
    with pytest.raises(ValueError, match="x must be float32"):
        gemm.gemm_float32(random_bf16(3, 64), floats)
    with pytest.raises(ValueError, match="weight must be a float32 matrix"):
        gemm.PackedFloat32.pack(random_bf16(40, 64))
    with pytest.raises(ValueError, match="packed must be 16384 bytes, not 8192"):
        gemm.gemm_float32(random_float32(3, 64), gemm.PackedFloat32(packed.buffer, 40, 64))
    with pytest.raises(ValueError, match="out must be of 3 rows"):
        gemm.gemm_bf16(random_bf16(3, 64), packed, out=torch.empty(4, 40))
    with pytest.raises(ValueError, match="bias must be 40 values"):
        gemm.gemm_bf16(random_bf16(3, 64), packed, torch.zeros(39))
    with pytest.raises(ValueError, match="k must be a multiple of 32"):
        gemm.quantize_rows(random_bf16(3, 33))
    with pytest.raises(ValueError, match="raw must be 80 bytes, not 79"):
        gemm.PackedBlocks.pack("Q4_1", torch.zeros(79, dtype=torch.uint8), 2, 64)
    with pytest.raises(ValueError, match="must be one of Q4_0, Q4_1"):
        gemm.PackedBlocks.pack("Q1_K", torch.zeros(80, dtype=torch.uint8), 2, 64)
    with pytest.raises(ValueError, match="row_index must be within"):
        gemm.PackedBf16.pack(random_bf16(2, 32), torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="ids must be within"):
        packed.unpack_rows(torch.tensor([40]))
