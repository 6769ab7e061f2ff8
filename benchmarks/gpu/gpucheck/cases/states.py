"""State-space layers as large as those of Bamba 9B: prompts, decoding, and both in one batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpucheck.cases.case import ROUNDED, Case, Place, Result

BLOCK_SIZE = 16
BATCHES = [[1] * 64, [1, 512, 1, 700]]
"""Tokens of each request."""
REFERENCE_TOKENS = 40
"""Of a request that are compared: the reference computes them one after another."""


def cases(place: Place) -> Iterator[Case]:
    for counts in place.pick(BATCHES, [[1, 19]]):
        yield _case(place, counts)


def _case(place: Place, counts: list[int]) -> Case:
    """Requests at their beginning."""
    from tokenmill.kernels.gpu.state_space import state_space
    from tokenmill.kernels.state_space import (
        StateCache,
        StateSpaceShape,
        StateSpaceWeights,
        StateStep,
    )
    from tokenmill.kernels.state_space import state_space as in_torch

    sizes = (3, 8, 16, 1) if place.small else (128, 64, 128, 1)
    shape = StateSpaceShape(*sizes, 4, (0.0, float("inf")), 1e-5)

    def draw(*size: int) -> torch.Tensor:
        return place.randn(*size, dtype=torch.float32, scale=0.5)

    weights = StateSpaceWeights(
        conv_weight=draw(shape.kernel_size, shape.num_channels),
        conv_bias=draw(shape.num_channels),
        a=-draw(shape.num_heads).exp(),
        d=draw(shape.num_heads),
        dt_bias=draw(shape.num_heads),
        norm_weight=draw(shape.num_inner),
    )
    cache = StateCache.empty(len(counts) + 1, shape.spec, place.device)
    lens = torch.tensor(counts, dtype=torch.int32, device=place.device)
    starts = torch.tensor([0, *counts], device=place.device).cumsum(0).int()
    # Only the last state of each is kept, in a block of its own.
    table = torch.zeros(len(counts), max(counts) // BLOCK_SIZE + 2, dtype=torch.int32)
    for req, count in enumerate(counts):
        table[req, (count - 1) // BLOCK_SIZE] = req + 1
    table = table.to(place.device)
    projected = place.randn(sum(counts), sum(shape.parts))
    out = place.poisoned(sum(counts), shape.num_inner)
    tables = starts, lens, table

    def results() -> list[Result]:
        on_host = StateSpaceWeights(
            **{name: getattr(weights, name).cpu() for name in weights.__dataclass_fields__}
        )
        found, expected, first = [], [], 0
        for count in counts[:4]:
            rows = slice(first, first + min(count, REFERENCE_TOKENS))
            step = StateStep(slice(0, rows.stop - first), 0, 0, ())
            nothing = StateCache.empty(1, shape.spec)
            found.append(out[rows])
            expected.append(in_torch(shape, on_host, nothing, [step], projected[rows].cpu()))
            first += count
        return [(torch.cat(found), torch.cat(expected).to(place.device), ROUNDED)]

    return Case(
        "state_space",
        f"{len(counts)} requests, {sum(counts)} tokens, {shape.num_heads} heads",
        lambda _: state_space(shape, weights, cache, tables, BLOCK_SIZE, projected, out),
        results,
        num_bytes=projected.nbytes + out.nbytes + 8 * len(counts) * shape.spec.num_values,
    )
