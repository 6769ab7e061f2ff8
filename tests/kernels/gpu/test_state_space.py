"""State-space layers on the kernels of a GPU: against float64, and their bits in pieces."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.states import BLOCK_SIZE, Sequences, exact_results, random_weights
from tokenmill.kernels.gpu.state_space import state_space
from tokenmill.kernels.state_space import StateSpaceShape

SHAPE = StateSpaceShape(
    num_heads=4,
    head_size=8,
    state_size=16,
    num_groups=2,
    kernel_size=4,
    dt_limits=(0.0, float("inf")),
    norm_eps=1e-5,
)
SHAPES = {
    "two groups": SHAPE,
    "odd sizes": replace(SHAPE, num_heads=3, num_groups=1, head_size=5, state_size=21),
    "short convolution, limits": replace(SHAPE, kernel_size=2, dt_limits=(0.3, 0.9)),
}
LENGTHS = [1, 3, 11]


def compute(
    shape: StateSpaceShape, sequences: Sequences, counts: list[int], device: str
) -> list[torch.Tensor]:
    """A step without counting it as done: results of each sequence."""
    weights = random_weights(shape, torch.Generator().manual_seed(1))
    projected = sequences.inputs(counts)
    out = torch.full((len(projected), shape.num_inner), torch.nan, dtype=projected.dtype)
    common = sequences.common(counts)
    tables = common.query_start_loc, common.seq_lens, common.block_table
    cache = sequences.cache
    there = [
        type(each)(**{name: getattr(each, name).to(device) for name in each.__dataclass_fields__})
        for each in (weights, cache)
    ]
    found = out.to(device)
    state_space(
        shape,
        there[0],
        there[1],
        tuple(table.to(device) for table in tables),
        BLOCK_SIZE,
        projected.to(device),
        found,
    )
    cache.num_seen.copy_(there[1].num_seen)
    cache.values.copy_(there[1].values)
    return list(found.cpu().split(counts))


def run(
    shape: StateSpaceShape, chunks: list[list[int]], device: str, *, twice: bool = False
) -> tuple[list[torch.Tensor], Sequences]:
    """Results of whole sequences, computed in these steps."""
    sequences = Sequences.random(shape, LENGTHS, torch.float32)
    results: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    for counts in chunks:
        if twice:
            compute(shape, sequences, counts, device)
        for place, part in enumerate(compute(shape, sequences, counts, device)):
            results[place].append(part)
        sequences.advance(counts)
    return [torch.cat(parts) for parts in results], sequences


@pytest.mark.parametrize("name", SHAPES)
def test_results_are_those_of_the_definition(name: str, device: str) -> None:
    shape = SHAPES[name]
    found, sequences = run(shape, [LENGTHS], device)
    weights = random_weights(shape, torch.Generator().manual_seed(1))
    for result, projected in zip(found, sequences.projected, strict=True):
        expected = exact_results(shape, weights, projected)
        torch.testing.assert_close(result.double(), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("twice", [False, True])
def test_the_same_bits_in_pieces_and_again(twice: bool, device: str) -> None:
    whole, _ = run(SHAPE, [LENGTHS], device)
    pieces = [[0, 1, 8], [1, 0, 1], [0, 2, 2]]
    found, _ = run(SHAPE, pieces, device, twice=twice)
    assert all(map(torch.equal, found, whole))


def test_rows_in_bfloat16(device: str) -> None:
    sequences = Sequences.random(SHAPE, [5], torch.bfloat16)
    (found,) = compute(SHAPE, sequences, [5], device)
    weights = random_weights(SHAPE, torch.Generator().manual_seed(1))
    expected = exact_results(SHAPE, weights, sequences.projected[0])
    torch.testing.assert_close(found.double(), expected, atol=2e-2, rtol=1e-2)
