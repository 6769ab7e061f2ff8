"""Which steps of a GPU are replayed, and in which size."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.worker.batch import BatchShape, BatchTensors
from tokenmill.worker.graphs.cuda import CudaGraphForward, GraphSizes, _Graph
from tokenmill.worker.graphs.forward import DirectForward

SIZES = GraphSizes.default(max_num_seqs=300, max_num_batched_tokens=400, max_model_len=1000)


def test_sizes_are_dense_where_steps_are_short():
    assert SIZES.decode[:6] == (1, 2, 4, 8, 16, 24)
    assert SIZES.decode[-4:] == (256, 272, 288, 300)
    assert SIZES.mixed == (16, 32, 64, 128, 256)
    assert GraphSizes.default(3, 8, 100).decode == (1, 2, 3)
    assert GraphSizes.default(3, 8, 100).mixed == ()


@given(num_reqs=st.integers(1, 300), chunk=st.integers(1, 400))
def test_a_step_takes_the_smallest_size_that_holds_it(num_reqs, chunk):
    """One request has `chunk` tokens, the others decode."""
    shape = BatchShape(num_reqs - 1 + chunk, num_reqs, chunk, 700)
    padded = SIZES.padded(shape)
    sizes = SIZES.decode if chunk == 1 else SIZES.mixed
    fitting = [size for size in sizes if size >= shape.num_tokens]
    if not fitting:
        assert padded == shape
        return
    assert padded.num_tokens == fitting[0]
    assert padded in SIZES.all_shapes()
    assert padded.num_reqs >= num_reqs
    assert padded.max_query_len >= chunk
    assert padded.max_seq_len >= shape.max_seq_len


def test_the_largest_are_captured_first():
    sizes = [shape.num_tokens for shape in SIZES.all_shapes()]
    num_mixed = len(SIZES.mixed)
    assert sizes[:num_mixed] == sorted(SIZES.mixed, reverse=True)
    assert sizes[num_mixed:] == sorted(SIZES.decode, reverse=True)


@dataclass
class Replayed:
    """Stands for a captured graph."""

    num_replays: int = 0

    def replay(self):
        self.num_replays += 1


@dataclass
class Model:
    seen: list[int] = field(default_factory=list)

    def forward(self, input_ids, positions, inputs_embeds=None):
        self.seen.append(len(input_ids))
        return torch.zeros(len(input_ids), 2)


def tensors_of(shape):
    ids = torch.zeros(shape.num_tokens, dtype=torch.int32)
    return BatchTensors(shape, ids, ids.long(), ids, ids, (), ())


def test_a_captured_size_is_replayed_and_others_run_directly():
    model, graph = Model(), Replayed()
    sizes = GraphSizes(decode=(1, 4), mixed=(), max_num_seqs=8, max_model_len=64)
    forward = CudaGraphForward(DirectForward(model), sizes)
    hidden = torch.ones(4, 2)
    forward.graphs[sizes.decode_shape(4)] = _Graph(graph, hidden)

    padded = forward.padded(BatchShape(3, 3, 1, 9))
    assert forward.run(tensors_of(padded), {}) is hidden
    assert (graph.num_replays, model.seen) == (1, [])
    assert forward.stats.num_padded_tokens == 1

    direct = forward.padded(BatchShape(6, 6, 1, 9))
    assert forward.run(tensors_of(direct), {}).shape == (6, 2)
    assert model.seen == [6]
    assert (forward.stats.num_replayed, forward.stats.num_direct) == (1, 1)
