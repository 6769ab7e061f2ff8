"""State-space layers against float64, and their bits in every batch, chunk and repetition."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers import isas
from helpers.states import BLOCK_SIZE, Sequences, exact_results, random_weights
from tokenmill import _native
from tokenmill.kernels import native
from tokenmill.kernels.fused import empty_quantized
from tokenmill.kernels.gemm import quantize_rows
from tokenmill.kernels.state_space import NOTHING, StateSpaceShape
from tokenmill.layers.packed import NativeKernels
from tokenmill.layers.plain import PlainKernels

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
    "one group": replace(SHAPE, num_groups=1),
    "odd sizes": replace(SHAPE, num_heads=3, num_groups=1, head_size=5, state_size=21),
    "short convolution": replace(SHAPE, kernel_size=2),
    "limits": replace(SHAPE, dt_limits=(0.3, 0.9)),
}
LENGTHS = [1, 30, 17, 8, 41]


class Layer:
    """One layer of random weights, on some kernels."""

    def __init__(self, kernels: Any, shape: StateSpaceShape, dtype: torch.dtype) -> None:
        self.kernels = kernels
        self.shape = shape
        self.dtype = dtype
        self.weights = random_weights(shape, torch.Generator().manual_seed(1))

    def sequences(self, lengths: list[int] = LENGTHS) -> Sequences:
        return Sequences.random(self.shape, lengths, self.dtype)

    def compute(self, sequences: Sequences, counts: list[int]) -> list[torch.Tensor]:
        """A step without counting it as done: results of each sequence."""
        projected = sequences.inputs(counts)
        out = torch.full((len(projected), self.shape.num_inner), torch.nan, dtype=self.dtype)
        builder = self.kernels.state_builder(BLOCK_SIZE, len(sequences.cache.values))
        states = self.kernels.state_space(self.shape, self.weights, sequences.cache)
        states.run(builder.build(sequences.common(counts)), projected, out)
        return list(out.split(counts))

    def run(self, sequences: Sequences, chunks: list[list[int]]) -> list[torch.Tensor]:
        """Results of whole sequences, computed in these steps."""
        results: list[list[torch.Tensor]] = [[] for _ in sequences.projected]
        for counts in chunks:
            for place, part in enumerate(self.compute(sequences, counts)):
                results[place].append(part)
            sequences.advance(counts)
        return [torch.cat(parts) for parts in results]


def random_chunks(lengths: list[int], seed: int) -> list[list[int]]:
    """Steps that compute these lengths; some leave a sequence out."""
    shuffler, left, chunks = random.Random(seed), list(lengths), []
    while any(left):
        counts = [min(n, shuffler.choice([0, 1, 1, 3, 8, 20])) for n in left]
        if sum(counts):
            chunks.append(counts)
            left = [n - count for n, count in zip(left, counts, strict=True)]
    return chunks


OWN = ("portable", "neon", "avx2", "avx512")
"""Instruction sets with kernels of their own here."""
LEVELS = ["torch", *(isa for isa in native.isas() if isa in OWN)]


@pytest.fixture(params=LEVELS)
def kernels(request: pytest.FixtureRequest) -> Iterator[Any]:
    """torch's, and the native ones of each instruction set."""
    if request.param == "torch":
        yield PlainKernels()
        return
    with isas.active(request.param):
        yield NativeKernels()


@pytest.fixture(params=SHAPES)
def layer(request: pytest.FixtureRequest, kernels: Any) -> Layer:
    return Layer(kernels, SHAPES[request.param], torch.float32)


def test_results_are_those_of_the_definition(layer: Layer) -> None:
    sequences = layer.sequences()
    found = layer.run(sequences, [LENGTHS])
    for result, projected in zip(found, sequences.projected, strict=True):
        expected = exact_results(layer.shape, layer.weights, projected)
        torch.testing.assert_close(result.double(), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("seed", range(4))
def test_the_same_bits_in_any_chunks(layer: Layer, seed: int) -> None:
    whole = layer.run(layer.sequences(), [LENGTHS])
    found = layer.run(layer.sequences(), random_chunks(LENGTHS, seed))
    assert all(map(torch.equal, found, whole))


def test_a_step_may_be_run_again(layer: Layer) -> None:
    whole = layer.run(layer.sequences(), [LENGTHS])
    sequences = layer.sequences()
    done = [0] * len(LENGTHS)
    for counts in random_chunks(LENGTHS, 7):
        first = layer.compute(sequences, counts)
        again = layer.compute(sequences, counts)
        one_by_one = [
            layer.compute(sequences, [n if i == place else 0 for i, n in enumerate(counts)])[place]
            for place in range(len(counts))
        ]
        for place, parts in enumerate(zip(first, again, one_by_one, strict=True)):
            expected = whole[place][done[place] : done[place] + counts[place]]
            assert all(torch.equal(part, expected) for part in parts)
        sequences.advance(counts)
        done = [a + b for a, b in zip(done, counts, strict=True)]


def test_a_sequence_goes_on_from_another_ones_whole_blocks(kernels: Any) -> None:
    layer = Layer(kernels, SHAPE, torch.float32)
    sequences = layer.sequences([40, 40])
    sequences.projected[1][:24] = sequences.projected[0][:24]
    expected = layer.run(layer_with(sequences, layer), [[40, 40]])[1]
    layer.run(sequences, [[40, 0]])
    sequences.block_table[1, :3] = sequences.block_table[0, :3]
    before = sequences.cache.values[sequences.block_table[0, 2]].clone()
    sequences.num_computed = [40, 24]
    found = layer.run(sequences, [[0, 5], [0, 11]])[1]
    assert torch.equal(found, expected[24:])
    after = sequences.cache.values[sequences.block_table[0, 2]]
    assert torch.equal(after.nan_to_num(), before.nan_to_num()), "a whole block was written"


def layer_with(sequences: Sequences, layer: Layer) -> Sequences:
    """The same inputs with nothing computed."""
    fresh = layer.sequences([len(rows) for rows in sequences.projected])
    fresh.projected = sequences.projected
    return fresh


def test_the_null_block_keeps_nothing(kernels: Any) -> None:
    layer = Layer(kernels, SHAPE, torch.float32)
    sequences = layer.sequences([40])
    whole = layer.run(layer_with(sequences, layer), [[40]])
    sequences.block_table[0, :3] = 0  # a chunk has blocks at its end only
    found = layer.run(sequences, [[35], [5]])
    assert torch.equal(found[0], whole[0])
    assert (sequences.cache.num_seen[0] == NOTHING).all()
    assert sequences.cache.values[0].isnan().all()


def test_blocks_that_are_used_again(kernels: Any) -> None:
    """What another sequence left in a block is not taken for this one's state."""
    layer = Layer(kernels, SHAPE, torch.float32)
    sequences = layer.sequences([20])
    whole = layer.run(layer_with(sequences, layer), [[20]])
    for count in range(8, 20):  # states behind as many tokens, in the same block
        sequences.cache.num_seen[sequences.block_table[0, (count - 1) // BLOCK_SIZE], 1] = count
    found = layer.run(sequences, [[1]] * 20)
    assert torch.equal(found[0], whole[0])


def test_a_state_that_is_not_there_is_no_silent_zero(kernels: Any) -> None:
    layer = Layer(kernels, SHAPE, torch.float32)
    sequences = layer.sequences([20])
    sequences.num_computed = [5]
    with pytest.raises((AssertionError, RuntimeError), match="behind"):
        layer.compute(sequences, [1])


def test_results_are_those_of_torch(kernels: Any) -> None:
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        for shape in SHAPES.values():
            chunks = random_chunks(LENGTHS, 3)
            both = [Layer(each, shape, dtype) for each in (PlainKernels(), kernels)]
            expected, found = (layer.run(layer.sequences(), chunks) for layer in both)
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def test_the_same_bits_with_any_number_of_threads(kernels: Any) -> None:
    layer = Layer(kernels, replace(SHAPE, num_heads=8, state_size=33), torch.bfloat16)
    whole = layer.run(layer.sequences(), [LENGTHS])
    if isinstance(kernels, PlainKernels):
        return
    for num_threads in (1, 2, 5):
        _native.set_num_threads(num_threads)
        found = layer.run(layer.sequences(), random_chunks(LENGTHS, num_threads))
        assert all(map(torch.equal, found, whole))


def test_results_can_be_quantised_on_the_way_out(kernels: Any) -> None:
    if isinstance(kernels, PlainKernels):
        return
    layer = Layer(kernels, SHAPE, torch.float32)
    sequences, codes = layer.sequences(), empty_quantized(sum(LENGTHS), SHAPE.num_inner)
    plain = torch.cat(layer.compute(sequences, LENGTHS))
    builder = kernels.state_builder(BLOCK_SIZE, len(sequences.cache.values))
    states = kernels.state_space(SHAPE, layer.weights, sequences.cache)
    states.run(builder.build(sequences.common(LENGTHS)), sequences.inputs(LENGTHS), codes)
    assert torch.equal(codes.codes, quantize_rows(plain).codes)
    assert torch.equal(codes.scales, quantize_rows(plain).scales)


def test_tables_that_contradict_each_other_are_refused(kernels: Any) -> None:
    if isinstance(kernels, PlainKernels):
        return
    sequences = Layer(kernels, SHAPE, torch.float32).sequences([20])
    common = sequences.common([20])
    for changes, words in (
        ({"seq_lens": torch.tensor([19]).int()}, "at least the query lengths"),
        ({"seq_lens": torch.tensor([60]).int()}, "too few columns"),
        ({"block_table": sequences.block_table + 9}, "a block that is not there"),
        ({"query_start_loc": torch.tensor([1, 20]).int()}, "begin with 0"),
    ):
        with pytest.raises(ValueError, match=words):
            kernels.state_builder(BLOCK_SIZE, 4).build(replace(common, **changes))
