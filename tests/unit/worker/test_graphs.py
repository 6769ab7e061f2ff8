"""Recorded steps: the same bits as the direct pass, and nothing lost in silence."""

from __future__ import annotations

import pytest
import torch

from helpers.tiny import write_wide_llama
from tokenmill import LLM, SamplingParams
from tokenmill.kernels import arena, native
from tokenmill.worker.batch import BatchShape, BatchTensors
from tokenmill.worker.graphs.cpu import NotRecordableError, RecordedForward, _OnlyViews, record
from tokenmill.worker.graphs.forward import CheckedForward, DirectForward, GraphStats

PROMPTS = [[(i * 37 + 11 * j) % 390 + 3 for j in range(5 + 40 * i)] for i in range(4)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def wide_llama(tmp_path_factory):
    return write_wide_llama(tmp_path_factory.mktemp("wide"))


def outputs_of(path, **settings):
    with LLM(str(path), num_kv_blocks=64, max_num_seqs=8, **settings) as llm:
        outputs = [output.outputs for output in llm.generate(PROMPTS, PARAMS)]
        worker = llm.llm_engine._client.core._executor._worker
        return outputs, worker.runner.graph_stats


def test_replayed_steps_equal_direct_ones(wide_llama):
    direct, direct_stats = outputs_of(wide_llama, enforce_eager=True)
    replayed, stats = outputs_of(wide_llama)
    chunked, _ = outputs_of(wide_llama, max_num_batched_tokens=16)
    assert replayed == direct == chunked
    assert direct_stats.num_replayed == 0 < direct_stats.num_direct
    if native.is_available():
        assert stats.num_direct == 0 < stats.num_replayed


def test_the_check_mode_runs_both(wide_llama):
    checked, stats = outputs_of(wide_llama, check_graphs=True)
    assert checked == outputs_of(wide_llama)[0]
    assert all(output.error is None for sequences in checked for output in sequences)
    assert stats.num_replayed + stats.num_direct > 0


class Returns:
    """A forward pass with a fixed result."""

    def __init__(self, *values):
        self.stats = GraphStats()
        self._result = torch.tensor(values)

    def padded(self, shape):
        return shape

    def run(self, tensors, attn_metadata):
        return self._result


def blank_step(shape):
    ids = torch.zeros(shape.num_tokens, dtype=torch.int64)
    starts = torch.tensor([0, shape.num_tokens])
    return BatchTensors(shape, ids, ids, starts, ids, (), ()), {}


def test_the_check_mode_tells_rows_that_differ():
    tensors, _ = blank_step(BatchShape(2, 1, 2, 2))
    same = CheckedForward(Returns([1.0], [2.0]), Returns([1.0], [2.0]))
    assert torch.equal(same.run(tensors, {}), torch.tensor([[1.0], [2.0]]))
    differing = CheckedForward(Returns([1.0], [2.0]), Returns([1.0], [2.5]))
    with pytest.raises(AssertionError, match=r"rows \[1\]"):
        differing.run(tensors, {})


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x + 1,
        lambda x: x.copy_(x),
        lambda x: x.clone(),
        lambda x: torch.empty(3),
        lambda x: x.sum(),
        lambda x: x.item(),
        lambda x: x[torch.tensor([0])],
        lambda x: x.t().reshape(-1),
        lambda x: x.to(torch.bfloat16),
    ],
)
def test_operations_that_a_replay_would_lose_are_refused(operation):
    x = torch.ones(2, 3)
    with _OnlyViews(), pytest.raises(NotRecordableError, match="torch's"):
        operation(x)


def test_views_and_questions_are_not():
    x = torch.ones(2, 6)
    with _OnlyViews():
        parts = x.split([2, 4], dim=-1)
        assert parts[1].shape == (2, 4)
        assert x[:, 1:].view(2, 5).transpose(0, 1).unsqueeze(0).size(1) == 5
        assert len(x) == 2


class Adds:
    """A model that computes with torch."""

    def embed_input_ids(self, input_ids):
        return torch.zeros(len(input_ids), 4)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        x = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        return x + 1


def test_a_model_that_cannot_be_recorded_runs_directly():
    tensors, _ = blank_step(BatchShape(8, 1, 8, 1))
    with pytest.raises(
        NotRecordableError, match="torch's add" if native.is_available() else "not here"
    ):
        RecordedForward(Adds(), tensors, {})
    assert isinstance(record(Adds(), BatchShape(8, 1, 8, 1), blank_step), DirectForward)


def test_an_arena_hands_out_what_nobody_holds():
    memory = arena.Arena()
    with arena.allocate_from(memory):
        first = arena.empty(4, 8, dtype=torch.float32)
        second = arena.empty(4, 8, dtype=torch.float32)
        assert first.data_ptr() != second.data_ptr()
        assert first.data_ptr() % 64 == second.data_ptr() % 64 == 0
        view, address = first[:2], first.data_ptr()
        del first
        third = arena.empty(4, 8, dtype=torch.float32)
        assert third.data_ptr() not in (address, second.data_ptr())
        del view
        again = arena.empty(3, 5, dtype=torch.bfloat16)
        assert again.data_ptr() == address
    assert memory.num_bytes == 3 * 4 * 8 * 4
    outside = arena.empty(2, dtype=torch.float32)
    assert memory.num_bytes == 3 * 4 * 8 * 4
    assert outside.shape == (2,)
