"""Native attention with sinks, and with values that are parts of keys, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from helpers import isas
from helpers.emulation import affordable
from helpers.paged import Cache, Chunk, attend, make_shape, random_sequences, reference, write
from tokenmill import _native
from tokenmill.kernels.paged_attention import PagedAttentionShape, unsupported_reasons, write_kv

KV_DTYPES = ["bfloat16", "float32", "int8"]
TOLERANCE = {"bfloat16": 2e-2, "int8": 2e-2, "float32": 2e-5}
MIXED = [
    Chunk(0, 0, 1),
    Chunk(1, 300 - affordable(300), 300),
    Chunk(2, 699, 700),
    Chunk(3, 140 - affordable(100), 140),
    Chunk(4, 1, 33),
]
MIXED_LENGTHS = [c.end for c in MIXED]


@pytest.fixture(params=isas.OF_ATTENTION, autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with isas.active(request.param):
        yield request.param


def check(
    shape: PagedAttentionShape,
    lengths: list[int],
    chunks: list[Chunk],
    dtype: torch.dtype = torch.bfloat16,
    sinks: torch.Tensor | None = None,
    seed: int = 0,
) -> None:
    """Compare one step with float64."""
    sequences = random_sequences(shape, lengths, dtype, seed)
    cache = Cache(shape, lengths, seed)
    write(cache, sequences, [Chunk(c.sequence, 0, c.end) for c in chunks])
    for chunk, result in zip(chunks, attend(cache, sequences, chunks, sinks), strict=True):
        expected = reference(shape, sequences, chunk, sinks=sinks)
        torch.testing.assert_close(
            result.double(), expected, atol=TOLERANCE[shape.kv_dtype], rtol=1e-2
        )


def random_step(seed: int) -> tuple[dict[str, object], list[int], list[Chunk]]:
    """Changes of a shape, lengths, and what is computed of them."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    num_kv_heads = draw(1, 3)
    changes: dict[str, object] = {
        "kv_dtype": KV_DTYPES[seed % 3],
        "num_heads": num_kv_heads * [1, 3, 8, 16][draw(0, 3)],
        "num_kv_heads": num_kv_heads,
        "block_size": 32 * draw(1, 9),
        "sliding_window": [None, draw(1, 600)][draw(0, 1)],
    }
    ends = [draw(1, affordable(most)) for most in (1500, 700, 40)]
    return (
        changes,
        ends,
        [Chunk(i, end - draw(1, min(end, affordable(200))), end) for i, end in enumerate(ends)],
    )


@pytest.mark.parametrize("changes", [{}, {"logits_soft_cap": 5.0}, {"sliding_window": 33}], ids=str)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_sinks(kv_dtype: str, changes: dict[str, object]) -> None:
    """Some far below all scores, some far above."""
    shape = make_shape(kv_dtype=kv_dtype, **changes)
    sinks = torch.tensor([-300.0, -2.0, 0.0, 1.5, 8.0, 120.0])
    check(shape, MIXED_LENGTHS, MIXED, torch.float32, sinks)


@pytest.mark.parametrize("seed", range(6))
def test_sinks_in_random_steps(seed: int) -> None:
    changes, ends, chunks = random_step(seed)
    shape = make_shape(**changes)
    check(shape, ends, chunks, sinks=3 * torch.randn(shape.num_heads), seed=seed)


def test_a_sink_that_is_nothing_changes_nothing() -> None:
    shape = make_shape(kv_dtype="float32")
    sequences = random_sequences(shape, [400], torch.float32)
    cache, step = Cache(shape, [400]), [Chunk(0, 100, 400)]
    write(cache, sequences, [Chunk(0, 0, 400)])
    (without,) = attend(cache, sequences, step)
    (with_nothing,) = attend(cache, sequences, step, torch.full((6,), -1e4))
    assert torch.equal(without, with_nothing)
    (all_taken,) = attend(cache, sequences, step, torch.full((6,), 1e4))
    assert (all_taken == 0).all()


@pytest.mark.parametrize("offset", [0, 16, 64])
@pytest.mark.parametrize("head_size", [80, 192, 576])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_values_that_are_parts_of_keys(kv_dtype: str, head_size: int, offset: int) -> None:
    shape = make_shape(
        kv_dtype=kv_dtype,
        num_heads=5,
        num_kv_heads=1,
        head_size=head_size,
        value_offset=offset,
        scale=head_size**-0.5,
    )
    check(shape, [1, 77, 300], [Chunk(0, 0, 1), Chunk(1, 40, 77), Chunk(2, 299, 300)])


@pytest.mark.parametrize("seed", range(6))
def test_parts_of_keys_in_random_steps(seed: int) -> None:
    changes, ends, chunks = random_step(seed)
    shape = make_shape(**changes, head_size=96, value_offset=32, scale=0.1)
    check(shape, ends, chunks, sinks=torch.randn(shape.num_heads) if seed % 2 else None, seed=seed)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_the_largest_products_of_codes_fit(kv_dtype: str) -> None:
    """Keys and queries whose codes are all at the limit, with one sign: sums of 576 products."""
    shape = make_shape(
        kv_dtype=kv_dtype, num_heads=1, num_kv_heads=1, head_size=576, value_offset=64, scale=1e-3
    )
    sequences = random_sequences(shape, [40], torch.float32)
    sequences.key[0].fill_(1.0)
    sequences.key[0][7].fill_(2.0)
    sequences.query[0].fill_(3.0)
    cache = Cache(shape, [40])
    write(cache, sequences, [Chunk(0, 0, 40)])
    (result,) = attend(cache, sequences, [Chunk(0, 39, 40)])
    expected = reference(shape, sequences, Chunk(0, 39, 40))
    torch.testing.assert_close(result.double(), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_row_has_the_same_bits_however_it_is_computed(kv_dtype: str) -> None:
    shape = make_shape(kv_dtype=kv_dtype, num_kv_heads=1, head_size=96, value_offset=32)
    sinks = torch.randn(6)
    lengths = [affordable(1300), 31]
    sequences = random_sequences(shape, lengths, torch.bfloat16)
    whole = [Chunk(i, 0, n) for i, n in enumerate(lengths)]
    cache = Cache(shape, lengths)
    write(cache, sequences, whole)
    _native.set_num_threads(1)
    expected = attend(cache, sequences, whole, sinks)
    for threads, size in ((1, 7), (2, 64), (5, 333)):
        _native.set_num_threads(threads)
        for chunk in whole:
            start = max(0, chunk.end - 2 * size)
            # On a cache in which nothing follows the part that is computed.
            fresh = Cache(shape, lengths, seed=size)
            write(fresh, sequences, [Chunk(chunk.sequence, 0, max(start, 1))])
            for begin in range(start, chunk.end, size):
                part = Chunk(chunk.sequence, begin, min(begin + size, chunk.end))
                write(fresh, sequences, [part])
                (alone,) = attend(fresh, sequences, [part], sinks)
                assert torch.equal(alone, expected[part.sequence][part.start : part.end])


def test_half_the_memory() -> None:
    apart, shared = make_shape(), make_shape(value_offset=16)
    assert 2 * shared.handle.block_bytes == apart.handle.block_bytes
    assert Cache(shared, [100]).data.numel() * 2 == Cache(apart, [100]).data.numel()


def test_what_cannot_be_is_refused() -> None:
    (reason,) = unsupported_reasons("bfloat16", 6, 2, 64, 32, value_offset=24)
    assert reason == "value offset 24 is not a multiple of 16"
    for offset in (8, 64):
        with pytest.raises(ValueError, match="value_offset"):
            make_shape(value_offset=offset)
    shape = make_shape(value_offset=16)
    cache, x, slots = Cache(shape, [1]), torch.randn(1, 128), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="value must be given where"):
        write_kv(shape, x, x, cache.data, slots)
    sequences = random_sequences(shape, [1], torch.bfloat16)
    with pytest.raises(ValueError, match="sinks"):
        attend(cache, sequences, [Chunk(0, 0, 1)], torch.zeros(5))
