"""Random steps over a paged cache, and attention over them in plain float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tokenmill.kernels.paged_attention import (
    AttentionPlan,
    PagedAttentionShape,
    kv_cache_shape,
    paged_attention,
    write_kv,
)

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8}


@dataclass
class Sequences:
    """Whole sequences, of which steps compute parts."""

    query: list[torch.Tensor]
    """[length, num_heads, head_size] each"""
    key: list[torch.Tensor]
    value: list[torch.Tensor]
    """[length, num_kv_heads, head_size] each; not looked at where values are parts of keys"""


def random_sequences(
    shape: PagedAttentionShape, lengths: list[int], dtype: torch.dtype, seed: int = 0
) -> Sequences:
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int, heads: int) -> torch.Tensor:
        return torch.randn(length, heads, shape.head_size, generator=generator).to(dtype)

    return Sequences(
        query=[2 * draw(n, shape.num_heads) for n in lengths],
        key=[draw(n, shape.num_kv_heads) for n in lengths],
        value=[draw(n, shape.num_kv_heads) for n in lengths],
    )


class Cache:
    """A cache with shuffled blocks, in which everything unwritten is NaN."""

    def __init__(self, shape: PagedAttentionShape, lengths: list[int], seed: int = 0) -> None:
        self.shape = shape
        needed = [-(-n // shape.block_size) for n in lengths]
        self.num_blocks = sum(needed) + 3
        size = kv_cache_shape(
            self.num_blocks,
            shape.block_size,
            shape.num_kv_heads,
            shape.head_size,
            shape.kv_dtype,
            shape.value_offset,
        )
        dtype = TORCH_DTYPES[shape.kv_dtype]
        # Bytes of ones are a NaN in every float type, that of the int8 scales included.
        self.data = torch.full(size, -1, dtype=torch.int8).repeat_interleave(dtype.itemsize, -1)
        self.data = self.data.view(dtype)
        generator = torch.Generator().manual_seed(seed)
        free = torch.randperm(self.num_blocks, generator=generator).int()
        self.block_table = torch.full((len(lengths), max([*needed, 1])), -7, dtype=torch.int32)
        for i, blocks in enumerate(free[: sum(needed)].split(needed)):
            self.block_table[i, : len(blocks)] = blocks

    def slots(self, sequence: int, start: int, end: int) -> torch.Tensor:
        positions = torch.arange(start, end)
        blocks = self.block_table[sequence, positions // self.shape.block_size].long()
        return blocks * self.shape.block_size + positions % self.shape.block_size


@dataclass(frozen=True)
class Chunk:
    """Positions [start, end) of a sequence, computed in a step."""

    sequence: int
    start: int
    end: int


def write(cache: Cache, sequences: Sequences, chunks: list[Chunk]) -> None:
    key = torch.cat([sequences.key[c.sequence][c.start : c.end] for c in chunks])
    value = torch.cat([sequences.value[c.sequence][c.start : c.end] for c in chunks]).flatten(1)
    slots = torch.cat([cache.slots(c.sequence, c.start, c.end) for c in chunks])
    own_value = value if cache.shape.value_offset is None else None
    write_kv(cache.shape, key.flatten(1), own_value, cache.data, slots)


def attend(
    cache: Cache, sequences: Sequences, chunks: list[Chunk], sinks: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """One step whose keys are written.

    The result of each chunk, [length, num_heads, value_size].
    """
    lengths = [c.end - c.start for c in chunks]
    query = torch.cat([sequences.query[c.sequence][c.start : c.end] for c in chunks]).flatten(1)
    plan = AttentionPlan()
    plan.build(
        cache.shape,
        torch.tensor([0, *lengths]).cumsum(0).int(),
        torch.tensor([c.end for c in chunks], dtype=torch.int32),
        cache.block_table[[c.sequence for c in chunks]],
        cache.num_blocks,
    )
    shape = cache.shape
    out = query.new_full((len(query), shape.num_heads * shape.value_size), float("nan"))
    paged_attention(shape, plan, query, cache.data, out, sinks)
    return list(out.view(-1, shape.num_heads, shape.value_size).split(lengths))


def reference(
    shape: PagedAttentionShape,
    sequences: Sequences,
    chunk: Chunk,
    seq_len: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in float64, from the values that the cache keeps."""
    seq_len = chunk.end if seq_len is None else seq_len
    group = shape.num_heads // shape.num_kv_heads
    q = sequences.query[chunk.sequence][chunk.start : chunk.end]
    q = (q if shape.kv_dtype == "float32" else q.bfloat16()).double()
    k, v = (
        _kept(part[chunk.sequence][:seq_len], shape.kv_dtype).repeat_interleave(group, 1)
        for part in (sequences.key, sequences.value)
    )
    if shape.value_offset is not None:
        v = k[..., shape.value_offset :]
    scores = torch.einsum("qhd,khd->hqk", q, k) * shape.scale
    if shape.logits_soft_cap is not None:
        scores = shape.logits_soft_cap * torch.tanh(scores / shape.logits_soft_cap)
    positions = torch.arange(chunk.start, chunk.end)[:, None]
    keys = torch.arange(seq_len)
    hidden = torch.zeros(len(q), seq_len, dtype=torch.bool)
    if shape.causal:
        hidden |= keys > positions
    if shape.sliding_window is not None:
        hidden |= keys <= positions - shape.sliding_window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        at_last = sinks.double()[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, at_last], dim=-1)
    weights = scores.softmax(-1)[..., :seq_len]
    return torch.einsum("hqk,khd->qhd", weights, v)


def _kept(x: torch.Tensor, kv_dtype: str) -> torch.Tensor:
    if kv_dtype != "int8":
        return x.to(TORCH_DTYPES[kv_dtype]).double()
    scale = x.double().abs().amax(-1, keepdim=True) / 127
    return (x.double() / scale).round().clamp(-127, 127) * scale


def make_shape(**changes: object) -> PagedAttentionShape:
    base = PagedAttentionShape(
        kv_dtype="bfloat16", num_heads=6, num_kv_heads=2, head_size=64, block_size=32, scale=0.125
    )
    return replace(base, **changes)  # type: ignore[arg-type]
