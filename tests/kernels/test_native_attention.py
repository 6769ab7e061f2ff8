"""Native paged attention against float64, and its bits in every batch, chunk and thread count."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from helpers import isas
from helpers.emulation import affordable
from helpers.paged import (
    Cache,
    Chunk,
    attend,
    make_shape,
    random_sequences,
    reference,
    write,
)
from tokenmill import _native
from tokenmill.kernels import native
from tokenmill.kernels.paged_attention import (
    HEAD_SIZES,
    AttentionPlan,
    PagedAttentionShape,
    paged_attention,
    rotate_and_write_kv,
    unsupported_reasons,
    write_kv,
)
from tokenmill.kernels.rotary import apply_rotary

TOLERANCE = {"bfloat16": 2e-2, "int8": 2e-2, "float32": 2e-5}


@pytest.fixture(params=isas.OF_ATTENTION, autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with isas.active(request.param):
        yield request.param


def check(
    shape: PagedAttentionShape, lengths: list[int], chunks: list[Chunk], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Compare one step with float64; returns its results."""
    sequences = random_sequences(shape, lengths, dtype)
    cache = Cache(shape, lengths)
    write(cache, sequences, [Chunk(c.sequence, 0, c.end) for c in chunks])
    results = attend(cache, sequences, chunks)
    for chunk, result in zip(chunks, results, strict=True):
        expected = reference(shape, sequences, chunk)
        torch.testing.assert_close(
            result.double(), expected, atol=TOLERANCE[shape.kv_dtype], rtol=1e-2
        )
    return results


MIXED = [
    Chunk(0, 0, 1),
    Chunk(1, 300 - affordable(300), 300),
    Chunk(2, 699, 700),
    Chunk(3, 140 - affordable(100), 140),
    Chunk(4, 1, 33),
]
MIXED_LENGTHS = [c.end for c in MIXED]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 2), (8, 1)], ids=str)
def test_mixed_batch(kv_dtype: str, heads: tuple[int, int], dtype: torch.dtype) -> None:
    shape = make_shape(kv_dtype=kv_dtype, num_heads=heads[0], num_kv_heads=heads[1])
    check(shape, MIXED_LENGTHS, MIXED, dtype)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_head_sizes(head_size: int, kv_dtype: str) -> None:
    shape = make_shape(kv_dtype=kv_dtype, head_size=head_size, scale=head_size**-0.5, block_size=64)
    check(
        shape, [1, 77, 300], [Chunk(0, 0, 1), Chunk(1, 60, 77), Chunk(2, 299, 300)], torch.bfloat16
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 1},
        {"sliding_window": 33},
        {"sliding_window": 300},
        {"logits_soft_cap": 5.0},
        {"logits_soft_cap": 30.0, "sliding_window": 256},
        {"causal": False},
        {"scale": 0.01},
        {"scale": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32", "int8"])
def test_windows_caps_and_scales(kv_dtype: str, changes: dict[str, object]) -> None:
    check(make_shape(kv_dtype=kv_dtype, **changes), MIXED_LENGTHS, MIXED, torch.float32)


@pytest.mark.parametrize("seed", range(6))
def test_random_steps(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    kv_dtype = ["bfloat16", "float32", "int8"][seed % 3]
    num_kv_heads, group = draw(1, 3), [1, 3, 4, 8][draw(0, 3)]
    shape = make_shape(
        kv_dtype=kv_dtype,
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        block_size=32 * draw(1, 9),
        sliding_window=[None, draw(1, 600)][draw(0, 1)],
    )
    ends = [draw(1, affordable(most)) for most in (2000, 700, 40, 300)]
    chunks = [Chunk(i, end - draw(1, min(end, affordable(300))), end) for i, end in enumerate(ends)]
    check(shape, ends, chunks, torch.bfloat16)


def test_a_row_has_the_same_bits_however_it_is_computed() -> None:
    for kv_dtype in ("bfloat16", "float32", "int8"):
        for window in (None, 90):
            shape = make_shape(kv_dtype=kv_dtype, sliding_window=window)
            lengths = [affordable(600), affordable(1300), 31]
            sequences = random_sequences(shape, lengths, torch.bfloat16)
            _native.set_num_threads(1)
            cache = Cache(shape, lengths)
            whole = [Chunk(i, 0, n) for i, n in enumerate(lengths)]
            write(cache, sequences, whole)
            expected = attend(cache, sequences, whole)
            for threads, sizes in ((1, (7, 333)), (2, (1, 64)), (5, (45,))):
                _native.set_num_threads(threads)
                for size in sizes:
                    for chunk in whole:
                        start = max(0, chunk.end - 3 * size)
                        parts = [
                            Chunk(chunk.sequence, s, min(s + size, chunk.end))
                            for s in range(start, chunk.end, size)
                        ]
                        # Alone, a chunk a step, on a cache in which nothing follows the chunk.
                        fresh = Cache(shape, lengths, seed=size)
                        write(
                            fresh,
                            sequences,
                            [Chunk(chunk.sequence, 0, start)]
                            if start
                            else [Chunk(chunk.sequence, 0, 1)],
                        )
                        for part in parts:
                            write(fresh, sequences, [part])
                            (alone,) = attend(fresh, sequences, [part])
                            same = expected[part.sequence][part.start : part.end]
                            assert torch.equal(alone, same)
                batched = attend(cache, sequences, whole[::-1])[::-1]
                assert all(map(torch.equal, batched, expected))


def test_a_long_decode_is_shared_among_threads_with_the_same_bits() -> None:
    shape = make_shape()
    lengths = [4000]
    sequences = random_sequences(shape, lengths, torch.bfloat16)
    cache = Cache(shape, lengths)
    write(cache, sequences, [Chunk(0, 0, 4000)])
    last = [Chunk(0, 3999, 4000)]
    results = []
    for threads in (1, 2, 4):
        _native.set_num_threads(threads)
        results += attend(cache, sequences, last)
        plan = AttentionPlan()
        tables = torch.tensor([0, 1]).int(), torch.tensor([4000]).int(), cache.block_table
        plan.build(shape, *tables, cache.num_blocks)
        assert (plan.handle.num_merges > 0) == (threads > 1)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    torch.testing.assert_close(
        results[0].double(), reference(shape, sequences, last[0]), atol=2e-2, rtol=1e-2
    )


def test_int8_codes_are_multiplied_with_less_loss_than_bfloat16_has() -> None:
    shape = make_shape(kv_dtype="int8", scale=0.5)
    lengths = [300, 700]
    sequences = random_sequences(shape, lengths, torch.bfloat16)
    for part in (sequences.key, sequences.value):
        for i, x in enumerate(part):
            codes = (40 * x.float()).round().clamp(-127, 127)
            codes[..., :1] = 127  # the scale is 1/32, and nothing is lost in the cache
            part[i] = codes / 32
    chunks = [Chunk(0, 150, 300), Chunk(1, 699, 700)]
    cache = Cache(shape, lengths)
    write(cache, sequences, [Chunk(i, 0, n) for i, n in enumerate(lengths)])
    sequences.query = [q.float() for q in sequences.query]  # so that the output is not rounded
    for chunk, result in zip(chunks, attend(cache, sequences, chunks), strict=True):
        error = result.double() - reference(shape, sequences, chunk)
        assert error.abs().max() < (2e-2 if native.active_isa() == "amx" else 2e-3)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_a_nan_is_seen_by_whoever_attends_to_it(part: str, kv_dtype: str) -> None:
    shape = make_shape(kv_dtype=kv_dtype)
    lengths = [500, 500]
    sequences = random_sequences(shape, lengths, torch.bfloat16)
    position = 499 if part == "query" else 270
    getattr(sequences, part)[1][position, 0, 3] = torch.nan
    cache = Cache(shape, lengths)
    write(cache, sequences, [Chunk(i, 0, 500) for i in range(2)])
    sound, bad = attend(cache, sequences, [Chunk(0, 499, 500), Chunk(1, 499, 500)])
    assert sound.isfinite().all()
    group = 1 if part == "query" else shape.num_heads // shape.num_kv_heads
    columns = slice(3, 4) if part == "value" and kv_dtype != "int8" else slice(None)
    assert bad[0, :group, columns].isnan().all()
    assert bad[0, group:].isfinite().all()


def test_empty_requests_and_empty_steps() -> None:
    shape = make_shape()
    cache = Cache(shape, [5, 5])
    sequences = random_sequences(shape, [5, 5], torch.bfloat16)
    write(cache, sequences, [Chunk(0, 0, 5)])
    nothing, something = attend(cache, sequences, [Chunk(1, 0, 0), Chunk(0, 0, 5)])
    assert nothing.shape[0] == 0
    assert something.isfinite().all()
    plan = AttentionPlan()
    empty = torch.empty(0, shape.num_heads * shape.head_size)
    plan.build(shape, torch.zeros(1).int(), torch.empty(0).int(), torch.empty(0, 0).int(), 5)
    paged_attention(shape, plan, empty, cache.data, empty.clone())


@pytest.mark.parametrize("rotary_dim", [64, 20, 48])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rotation_is_that_of_the_reference(dtype: torch.dtype, rotary_dim: int) -> None:
    shape = make_shape(kv_dtype="float32")
    num_tokens, columns = 37, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size
    qkv = torch.randn(num_tokens, columns).to(dtype)
    angles = torch.rand(100, rotary_dim // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    positions = torch.randint(0, 100, (num_tokens,))
    cache = Cache(shape, [num_tokens])
    rotated = torch.empty(num_tokens, shape.num_heads * shape.head_size, dtype=dtype)
    slots = cache.slots(0, 0, num_tokens)
    keys = shape.num_kv_heads * shape.head_size
    query, key, value = qkv.split([rotated.shape[1], keys, keys], dim=-1)
    rotate_and_write_kv(shape, query, key, value, cache.data, slots, positions, cos, sin, rotated)

    query, key, value = qkv.split([384, 128, 128], dim=-1)
    expected = apply_rotary(query.view(num_tokens, -1, 64), cos[positions], sin[positions])
    assert torch.equal(rotated, expected.flatten(1))
    rotated_key = apply_rotary(key.float().view(num_tokens, -1, 64), cos[positions], sin[positions])
    plain = Cache(shape, [num_tokens])
    write_kv(shape, rotated_key.flatten(1), value, plain.data, slots)
    assert torch.equal(cache.data.view(torch.int32), plain.data.view(torch.int32))


def test_negative_slots_write_nothing() -> None:
    for kv_dtype in ("bfloat16", "float32", "int8"):
        shape = make_shape(kv_dtype=kv_dtype)
        cache = Cache(shape, [64])
        before = cache.data.view(torch.int8).clone()
        x = torch.randn(3, 128)
        write_kv(shape, x, x, cache.data, torch.tensor([-1, -5, -1]))
        assert torch.equal(cache.data.view(torch.int8), before)


def test_reasons() -> None:
    assert unsupported_reasons("bfloat16", 6, 2, 64, 32) == []
    reasons = unsupported_reasons("float16", 6, 4, 72, 16)
    assert len(reasons) == 4


def test_wrong_tables_are_refused() -> None:
    shape = make_shape()
    plan = AttentionPlan()
    one = torch.tensor([[0]], dtype=torch.int32)

    def build(starts: list[int], lens: list[int], table: torch.Tensor = one) -> None:
        plan.build(shape, torch.tensor(starts).int(), torch.tensor(lens).int(), table, 4)

    build([0, 1], [1])
    for starts, lens, table in [
        ([0, 2], [1], one), ([0, 1], [33], one), ([0, 1], [1], one + 4), ([0, 1], [1], one - 1),
        ([0, 1, 0], [1, 1], one.repeat(2, 1)), ([1, 2], [2], one), ([0], [1], one),
    ]:  # fmt: skip
        with pytest.raises(ValueError):
            build(starts, lens, table)
    x = torch.randn(1, 128)
    cache = Cache(shape, [1])
    behind = torch.tensor([cache.num_blocks * shape.block_size])
    with pytest.raises(ValueError, match="slot_mapping"):
        write_kv(shape, x, x, cache.data, behind)
