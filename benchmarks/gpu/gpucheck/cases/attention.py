"""Paged attention: decoding, prompts, pieces of prompts, and all in one batch."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from gpucheck.cases.case import BF16, MANY_ROUNDED, Case, Place

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests by the tokens that they compute and have."""

    name: str
    query_lens: Sequence[int]
    seq_lens: Sequence[int]

    @property
    def num_pairs(self) -> float:
        """Queries with the keys that they see."""
        return sum(
            q * (s - q) + q * (q + 1) / 2
            for q, s in zip(self.query_lens, self.seq_lens, strict=True)
        )


def _decode(num_requests: int, seq_len: int) -> Batch:
    """Lengths around one, so that the last blocks are filled differently."""
    lens = [max(1, seq_len - 37 * i % (seq_len // 2 + 1)) for i in range(num_requests)]
    return Batch(f"decode {num_requests} x {seq_len}", [1] * num_requests, lens)


BATCHES = [
    _decode(1, 512),
    _decode(1, 32_768),
    _decode(8, 4_096),
    _decode(64, 1_024),
    _decode(256, 1_024),
    Batch("prompt 4096", [4_096], [4_096]),
    Batch("piece 2048 at 16384", [2_048], [16_384]),
    Batch(
        "mixed",
        [1] * 63 + [1_024, 5, 300],
        [1_000 + 13 * i for i in range(63)] + [1_024, 77, 3_000],
    ),
]
SMALL_BATCHES = [_decode(2, 300), Batch("mixed", [1, 9, 3], [11, 9, 14])]
TEXTS = Batch("texts", [3 + 23 * i for i in range(22)], [3 + 23 * i for i in range(22)])
SMALL_TEXTS = Batch("texts", [9, 1], [9, 1])
BERT = (16, 16, 64)
HEADS = [(32, 8, 128), (32, 8, 64)]
"""Llama 3 of 8 billion and of 1 billion parameters."""


def cases(place: Place) -> Iterator[Case]:
    heads = [(4, 2, 16)] if place.small else HEADS
    for sizes in place.pick(heads, heads):
        batches = place.pick(BATCHES, SMALL_BATCHES)
        for batch in batches if sizes != HEADS[1] else [batches[0], batches[-1]]:
            for exact in (False, True):
                yield _attention(place, batch, sizes, exact=exact)
    for batch in place.pick([_decode(64, 1_024), BATCHES[-1]], SMALL_BATCHES[:1]):
        yield _attention(place, batch, heads[0], exact=False, cache_type=FP8)
    batch = SMALL_TEXTS if place.small else TEXTS
    for exact in (False, True):
        yield _attention(
            place, batch, (4, 4, 16) if place.small else BERT, exact=exact, causal=False
        )


def _attention(
    place: Place,
    batch: Batch,
    heads: tuple[int, int, int],
    *,
    exact: bool,
    cache_type: torch.dtype = BF16,
    causal: bool = True,
) -> Case:
    from tokenmill.kernels.gpu.attention import paged_attention
    from tokenmill.kernels.gpu.attention_launch import workspace_size
    from tokenmill.kernels.gpu.attention_reference import paged_attention_reference

    num_heads, num_kv_heads, head_size = heads
    num_tokens, longest = sum(batch.query_lens), max(batch.seq_lens)
    cache, table = _cache(place, batch.seq_lens, num_kv_heads, head_size, cache_type)
    starts = torch.tensor([0, *batch.query_lens], device=place.device).cumsum(0).int()
    lens = torch.tensor(batch.seq_lens, dtype=torch.int32, device=place.device)
    query = place.randn(num_tokens, num_heads * head_size)
    out = place.poisoned(num_tokens, num_heads * head_size)
    size = workspace_size(len(lens), num_heads, num_kv_heads, head_size, longest)
    workspace = place.poisoned(size, dtype=torch.float32)
    scales = (0.05, 0.04) if cache_type == FP8 else (1.0, 1.0)
    scale = head_size**-0.5

    def launch(_: int) -> None:
        paged_attention(
            query,
            cache,
            table,
            lens,
            starts,
            out,
            workspace=workspace,
            max_query_len=max(batch.query_lens),
            max_seq_len=longest,
            scale=scale,
            k_scale=scales[0],
            v_scale=scales[1],
            exact=exact,
            causal=causal,
        )

    def results() -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
        expected = torch.empty_like(out, dtype=torch.float32)
        paged_attention_reference(
            query, cache.float() if cache_type == FP8 else cache, table, lens, starts, expected,
            scale=scale,
            k_scale=scales[0], v_scale=scales[1], causal=causal,
        )  # fmt: skip
        yield out, expected, MANY_ROUNDED

    kind = ", exact" * exact + ", float8 cache" * (cache_type == FP8)
    kind += ", in both directions" * (not causal)
    num_pairs = (
        batch.num_pairs if causal else sum(map(operator.mul, batch.query_lens, batch.seq_lens))
    )
    per_key = 2 * num_kv_heads * head_size * cache_type.itemsize
    return Case(
        "paged_attention",
        f"{batch.name}, {num_heads}:{num_kv_heads} x {head_size}{kind}",
        launch,
        results,
        num_bytes=sum(batch.seq_lens) * per_key + 4 * query.nbytes,
        num_flops=4 * num_pairs * num_heads * head_size,
    )


def _cache(
    place: Place,
    seq_lens: Sequence[int],
    num_kv_heads: int,
    head_size: int,
    cache_type: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks in random order, NaN in block 0 and in blocks that nobody has."""
    block_size = 4 if place.small else 64
    counts = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(counts) + 2
    shape = (num_blocks, 2, block_size, num_kv_heads, head_size)
    values = place.randn(*shape, dtype=BF16, scale=20.0 if cache_type == FP8 else 1.0)
    cache = values.to(cache_type)
    cache[0] = torch.full(shape[1:], torch.nan, device=place.device).to(cache_type)
    blocks = (torch.randperm(num_blocks - 2, device=place.device) + 1).int()
    cache[-1] = cache[0]
    table = place.integers(num_blocks, len(seq_lens), max(counts) + 3)
    first = 0
    for row, count in zip(table, counts, strict=True):
        row[:count] = blocks[first : first + count]
        first += count
    return cache, table
