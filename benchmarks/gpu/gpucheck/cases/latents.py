"""What only models with latents have: their attention, their cache, matrices by head, and groups of
experts, at the sizes of DeepSeek V2-Lite and V3.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpucheck.cases.attention import FP8, Batch
from gpucheck.cases.case import (
    BF16,
    CODES,
    MANY_ROUNDED,
    ROUNDED,
    SAME,
    SUMMED,
    Case,
    Place,
    Result,
)

BATCHES = [
    Batch("decode 1 x 4096", [1], [4_096]),
    Batch("decode 64 x 1024", [1] * 64, [1_024 - 7 * i for i in range(64)]),
    Batch("prompt 2048", [2_048], [2_048]),
    Batch("mixed", [1] * 31 + [700, 5], [900 + 13 * i for i in range(31)] + [1_024, 77]),
]
SMALL_BATCHES = [Batch("mixed", [1, 9, 3], [300, 9, 14])]
SIZES = [(16, 64, 512), (128, 64, 512)]
"""Heads, rotated part, latent."""


def cases(place: Place) -> Iterator[Case]:
    sizes = place.pick(SIZES, [(6, 8, 24)])
    for each in sizes:
        for batch in place.pick(BATCHES, SMALL_BATCHES):
            yield _attention(place, batch, each, BF16)
        for num_tokens in place.pick([1, 64, 4_096], [5]):
            yield _write(place, num_tokens, each, FP8 if each == sizes[-1] else BF16)
            yield from _products(place, num_tokens, each)
    yield _attention(place, place.pick(BATCHES, SMALL_BATCHES)[-1], sizes[0], FP8)
    yield _route(place, place.pick([4_096], [9])[0])


def _attention(
    place: Place, batch: Batch, sizes: tuple[int, int, int], cache_type: torch.dtype
) -> Case:
    from tokenmill.kernels.gpu.attention_config import choose_latent_config
    from tokenmill.kernels.gpu.latent_attention import (
        latent_attention,
        latent_attention_reference,
        latent_workspace_size,
    )

    num_heads, rotated, latent = sizes
    num_tokens, longest, num_reqs = sum(batch.query_lens), max(batch.seq_lens), len(batch.seq_lens)
    cache, table = _cache(place, batch.seq_lens, rotated + latent, cache_type)
    starts = torch.tensor([0, *batch.query_lens], device=place.device).cumsum(0).int()
    lens = torch.tensor(batch.seq_lens, dtype=torch.int32, device=place.device)
    query = place.randn(num_tokens, num_heads * (rotated + latent))
    out = place.poisoned(num_tokens, num_heads * latent)
    config = choose_latent_config(BF16)
    size = latent_workspace_size(num_reqs, num_heads, latent, longest, config=config)
    workspace = place.poisoned(size, dtype=torch.float32)
    k_scale = 0.05 if cache_type == FP8 else 1.0
    options = {"rotated": rotated, "scale": (rotated + latent) ** -0.5, "k_scale": k_scale}
    bounds = {"max_query_len": max(batch.query_lens), "max_seq_len": longest}

    def launch(_: int) -> None:
        tables = table, lens, starts
        latent_attention(query, cache, *tables, out, workspace=workspace, **bounds, **options)

    def results() -> Iterator[Result]:
        expected = torch.empty_like(out, dtype=torch.float32)
        values = cache.float() if cache_type == FP8 else cache
        how = {**options, "dtype": torch.float32}
        latent_attention_reference(query, values, table, lens, starts, expected, **how)
        yield out, expected, MANY_ROUNDED

    kind = ", float8 cache" * (cache_type == FP8)
    return Case(
        "latent_attention",
        f"{batch.name}, {num_heads} x {rotated}+{latent}{kind}",
        launch,
        results,
        num_bytes=sum(batch.seq_lens) * (rotated + latent) * cache_type.itemsize
        + query.nbytes
        + out.nbytes,
        num_flops=2 * batch.num_pairs * num_heads * (rotated + 2 * latent),
    )


def _cache(
    place: Place, seq_lens: list[int], key_size: int, cache_type: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks in random order, NaN in block 0."""
    block_size = 4 if place.small else 64
    counts = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(counts) + 1
    scale = 20.0 if cache_type == FP8 else 1.0
    cache = place.randn(num_blocks, 1, block_size, 1, key_size, scale=scale).to(cache_type)
    cache[0] = torch.full(cache.shape[1:], torch.nan, device=place.device).to(cache_type)
    blocks = (torch.randperm(num_blocks - 1, device=place.device) + 1).int().split(counts)
    table = torch.zeros(len(counts), max(counts) + 3, dtype=torch.int32, device=place.device)
    for row, own in zip(table, blocks, strict=True):
        row[: len(own)] = own
    return cache, table


def _write(
    place: Place, num_tokens: int, sizes: tuple[int, int, int], cache_type: torch.dtype
) -> Case:
    from tokenmill.kernels.gpu.latent_kv import (
        rotate_and_write_latents,
        rotate_and_write_latents_reference,
    )

    num_heads, rotated, latent = sizes
    key_size, block_size = rotated + latent, 16
    query, key = place.randn(num_tokens, num_heads * key_size), place.randn(num_tokens, key_size)
    angles = place.randn(128, rotated // 2, dtype=torch.float32)
    positions = place.integers(128, num_tokens, dtype=torch.int64)
    num_blocks = -(-num_tokens // block_size) + 1
    slots = torch.randperm(num_blocks * block_size, device=place.device)[:num_tokens]
    out = place.poisoned(num_tokens, num_heads * key_size)
    cache = place.poisoned(num_blocks, 1, block_size, 1, key_size, dtype=cache_type)
    args = query, key, positions, angles.cos(), angles.sin()

    def results() -> Iterator[Result]:
        expected, there = torch.empty_like(out), torch.zeros_like(cache)
        rotate_and_write_latents_reference(*args, there, slots, expected)
        yield out, expected, ROUNDED
        rows = cache.view(-1, key_size)[slots].float(), there.view(-1, key_size)[slots].float()
        yield *rows, CODES if cache_type == FP8 else ROUNDED

    return Case(
        "rotate_and_write_latents",
        f"{num_tokens} tokens, {num_heads} x {key_size}{', float8' * (cache_type == FP8)}",
        lambda _: rotate_and_write_latents(*args, cache, slots, out),
        results,
        num_bytes=2 * query.nbytes + key.nbytes + num_tokens * key_size * cache_type.itemsize,
    )


def _products(place: Place, num_tokens: int, sizes: tuple[int, int, int]) -> Iterator[Case]:
    """Queries to latents, and sums of latents to values."""
    from tokenmill.kernels.gpu.gemm_parts import matmul_parts, matmul_parts_reference

    num_heads, rotated, latent = sizes
    size = 2 * rotated
    for depth, columns in ((size, latent), (latent, size)):
        wide = place.randn(num_tokens, num_heads, rotated + depth)
        weight = place.randn(num_heads, columns, depth, scale=depth**-0.5)
        out = place.poisoned(num_tokens, num_heads, columns)

        def results(
            x: torch.Tensor = wide[..., rotated:],
            weight: torch.Tensor = weight,
            out: torch.Tensor = out,
        ) -> list[Result]:
            expected = torch.empty_like(out, dtype=torch.float64)
            matmul_parts_reference(x, weight, expected)
            return [(out, expected, ROUNDED)]

        yield Case(
            "matmul_parts",
            f"{num_tokens} tokens, {num_heads} x {columns} x {depth}",
            lambda _, x=wide[..., rotated:], w=weight, out=out: matmul_parts(x, w, out),
            results,
            num_bytes=num_tokens * num_heads * depth * 2 + weight.nbytes + out.nbytes,
            num_flops=2 * num_tokens * weight.numel(),
        )


def _route(place: Place, num_tokens: int) -> Case:
    """Eight of 256 experts in four of eight groups, as V3 chooses them."""
    from tokenmill.kernels.experts import Routing, route_reference
    from tokenmill.kernels.gpu.moe_routing import route

    groups = {"num_groups": 8, "num_best_groups": 4, "group_best": 2}
    routing = Routing(8, by_logistic=True, renormalize=True, factor=2.5, **groups)
    # In steps, so that scores are equal or differ by more than roundings do.
    logits = (place.randn(num_tokens, 256, dtype=torch.float32) * 8).round() / 8
    bias = place.integers(3, 256).float() / 4
    weights = place.poisoned(num_tokens, 8, dtype=torch.float32)
    chosen = place.poisoned(num_tokens, 8, dtype=torch.int32)

    def results() -> Iterator[Result]:
        expected_weights, expected = route_reference(logits, routing, bias)
        yield chosen, expected, SAME
        yield weights, expected_weights, SUMMED

    return Case(
        "route",
        f"{num_tokens} tokens, 8 of 256 experts in 4 of 8 groups",
        lambda _: route(logits, bias, weights, chosen, routing),
        results,
        num_bytes=logits.nbytes + weights.nbytes + chosen.nbytes,
    )
