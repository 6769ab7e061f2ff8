"""Steps gathered on a device hold what the host gathers, whatever has happened to the rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.sampling import new_request
from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.worker.batch import BatchShape, gather_batch
from tokenmill.worker.inputs.device import DeviceInputs
from tokenmill.worker.inputs.host import HostInputs
from tokenmill.worker.inputs.staging import NUM_BUFFERS, Results, Staging
from tokenmill.worker.rows import RowTable

BLOCK_SIZE = 4
MAX_LEN = 48
MAX_SEQS = 4
MAX_TOKENS = 64
NUM_GROUPS = 2
CPU = torch.device("cpu")


@dataclass
class SampledIds:
    """What the inputs read of a `SamplerOutput`."""

    token_ids: np.ndarray


@dataclass
class Sampled:
    """Tokens as a device's sampler leaves them."""

    token_ids: torch.Tensor

    def to_host(self):
        return SampledIds(self.token_ids.numpy())


def make_rows():
    return RowTable(MAX_SEQS, MAX_LEN, BLOCK_SIZE, NUM_GROUPS)


def make_inputs():
    device = DeviceInputs(make_rows(), MAX_TOKENS, MAX_SEQS, Staging(CPU), CPU)
    return HostInputs(make_rows(), MAX_TOKENS), device


def enter(row, token_ids, first_block):
    request = new_request(row, token_ids=token_ids)
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    request.block_ids = tuple(
        [100 * group + first_block + b for b in range(num_blocks)] for group in range(NUM_GROUPS)
    )
    return request


def check_equal(host, device, plan, shape=None):
    """Both kinds of inputs give the plan's step, real places compared, padding as documented."""
    batch = gather_batch(plan, host.rows)
    want = host.fill(batch, batch.shape)
    padded = shape or batch.shape
    found = device.fill(gather_batch(plan, device.rows), padded)
    num_tokens, num_reqs = batch.shape.num_tokens, batch.num_reqs
    for name in ("input_ids", "positions"):
        values = getattr(found, name)
        assert torch.equal(values[:num_tokens], getattr(want, name))
        assert not values[num_tokens:].any()
    assert torch.equal(found.query_start_loc[: num_reqs + 1], want.query_start_loc)
    assert (found.query_start_loc[num_reqs:] == num_tokens).all()
    assert torch.equal(found.seq_lens[:num_reqs], want.seq_lens)
    assert not found.seq_lens[num_reqs:].any()
    for mine, theirs in zip(found.slot_mappings, want.slot_mappings, strict=True):
        assert torch.equal(mine[:num_tokens], theirs)
        assert (mine[num_tokens:] == -1).all()
    for mine, theirs in zip(found.block_tables, want.block_tables, strict=True):
        for row, length in enumerate(batch.seq_lens.tolist()):
            used = -(-length // BLOCK_SIZE)
            assert torch.equal(mine[row, :used], theirs[row, :used])
    return batch


def write(host, device, batch, ids):
    new = batch.new_tokens(batch.num_sampled)
    samples = Sampled(torch.tensor(ids, dtype=torch.int64))
    for inputs in (host, device):
        inputs.write_tokens(samples, new)
        num_tokens = np.where(
            batch.num_sampled > 0, new.num_computed + 1, inputs.rows.num_tokens[batch.rows]
        )
        inputs.rows.commit(batch.rows, new.num_computed, num_tokens)
    return new


def step_plan(rows, counts, sampled, **kwargs):
    return SchedulerOutput(
        0, [f"r{row}" for row in rows], rows, counts, [int(s) for s in sampled], sampled, **kwargs
    )


@settings(deadline=None, max_examples=15)
@given(st.data())
def test_any_sequence_of_steps(data):
    host, device = make_inputs()
    live: dict[int, int] = {}
    """Tokens computed, by row."""
    known: dict[int, int] = {}
    blocks: dict[int, int] = {}
    for step in range(6):
        finished = [row for row in sorted(live) if data.draw(st.integers(0, 5)) == 0]
        for row in finished:
            del live[row]
        new = []
        for row in range(MAX_SEQS):
            if row not in live and data.draw(st.booleans()):
                length = data.draw(st.integers(1, 20))
                new.append(enter(row, [1000 * step + 10 * row + t for t in range(length)], 7 * row))
                live[row], known[row], blocks[row] = 0, length, -(-length // BLOCK_SIZE)
        if not live:
            continue
        plan = step_plan([], [], [], finished_rows=finished, scheduled_new_reqs=new)
        for row in data.draw(st.permutations(sorted(live))):
            pending = known[row] - live[row]
            count = data.draw(st.integers(1, pending))
            is_sampled = count == pending
            plan.req_ids.append(f"r{row}")
            plan.rows.append(row)
            plan.num_scheduled_tokens.append(count)
            plan.num_logits.append(int(is_sampled))
            plan.is_sampled.append(is_sampled)
            needed = -(-(live[row] + count) // BLOCK_SIZE)
            if needed > blocks[row]:
                plan.scheduled_cached_reqs.rows.append(row)
                plan.scheduled_cached_reqs.new_block_ids.append(([50 + row], [150 + row]))
                blocks[row] += 1
            live[row] += count
            known[row] += is_sampled
        for inputs in (host, device):
            inputs.update(plan)
        shape = None
        if data.draw(st.booleans()):
            shape = BatchShape(MAX_TOKENS, MAX_SEQS, MAX_TOKENS, MAX_LEN)
        batch = check_equal(host, device, plan, shape)
        write(host, device, batch, [9000 + 10 * step + i for i in range(sum(plan.is_sampled))])


def test_a_blank_step_is_padding():
    _, device = make_inputs()
    tensors = device.blank(BatchShape(8, 3, 8, MAX_LEN))
    assert tensors.query_start_loc.tolist() == [0, 0, 0, 0]
    assert tensors.seq_lens.tolist() == [0, 0, 0]
    assert all((slots == -1).all() for slots in tensors.slot_mappings)


def test_drafts_are_mirrored():
    host, device = make_inputs()
    plan = step_plan([1], [3], [True], scheduled_new_reqs=[enter(1, [4, 5, 6], 3)])
    for inputs in (host, device):
        inputs.update(plan)
    write(host, device, check_equal(host, device, plan), [7])
    plan = step_plan([1], [3], [True], draft_token_ids={"r1": [21, 22]})
    plan.num_logits = [3]
    plan.scheduled_cached_reqs.rows.append(1)
    plan.scheduled_cached_reqs.new_block_ids.append(([9], [8]))
    for inputs in (host, device):
        inputs.update(plan)
    batch = check_equal(host, device, plan)
    assert device.fill(batch, batch.shape).input_ids.tolist() == [7, 21, 22]


@pytest.mark.parametrize("drafts", [[], [31, 32]])
def test_tokens_that_nobody_sampled_are_mirrored(drafts):
    """Those that a grammar forces stand behind the known ones, and drafts behind them."""
    host, device = make_inputs()
    plan = step_plan([1, 2], [3, 2], [True, True])
    plan.scheduled_new_reqs = [enter(1, [4, 5, 6], 3), enter(2, [8, 9], 9)]
    for inputs in (host, device):
        inputs.update(plan)
    write(host, device, check_equal(host, device, plan), [7, 10])
    plan = step_plan([2, 1], [1, 4 + len(drafts)], [True, True])
    plan.num_logits = [1, 1 + len(drafts)]
    plan.draft_token_ids = {"r1": drafts} if drafts else {}
    plan.scheduled_cached_reqs.rows.append(1)
    plan.scheduled_cached_reqs.new_block_ids.append(([9, 10], [8, 11]))
    plan.scheduled_cached_reqs.appended_rows.append(1)
    plan.scheduled_cached_reqs.appended_token_ids.append([21, 22, 23])
    for inputs in (host, device):
        inputs.update(plan)
    batch = check_equal(host, device, plan)
    assert device.fill(batch, batch.shape).input_ids.tolist() == [10, 7, 21, 22, 23, *drafts]
    assert batch.num_sampled.tolist() == [1, 1 + len(drafts)]


def test_only_some_samples_are_kept():
    _, device = make_inputs()
    plan = step_plan([0], [2], [True], scheduled_new_reqs=[enter(0, [4, 5], 3)])
    device.update(plan)
    batch = gather_batch(plan, device.rows)
    new = replace(batch.new_tokens(batch.num_sampled), entries=np.array([1]))
    device.write_tokens(Sampled(torch.tensor([30, 31, 32])), new)
    assert device.token_ids[0, :3].tolist() == [4, 5, 31]


def test_decoding_requests_write_their_tokens_behind_the_others():
    _, device = make_inputs()
    new = [enter(0, [4, 5], 1), enter(2, [6, 7, 8], 5)]
    device.update(step_plan([0, 2], [1, 2], [False, False], scheduled_new_reqs=new))
    for row, count in ((0, 1), (2, 2)):
        device.rows.num_computed_tokens[row] = count
    padded = BatchShape(4, 4, 1, MAX_LEN)
    for first_id in (70, 80):
        batch = gather_batch(step_plan([2, 0], [1, 1], [True, True]), device.rows)
        device.fill(batch, padded)
        new = batch.new_tokens(batch.num_sampled)
        device.write_tokens(Sampled(torch.tensor([first_id, first_id + 1])), new)
        device.rows.commit(batch.rows, new.num_computed, new.num_computed + 1)
    assert device.token_ids[2, :6].tolist() == [6, 7, 8, 70, 80, 0]
    assert device.token_ids[0, :5].tolist() == [4, 5, 71, 81, 0]
    assert not device.token_ids[[1, 3]].any()


def test_warming_up_leaves_everything_as_it_was():
    host, device = make_inputs()
    device.warm_up()
    assert not device.token_ids.any()
    plan = step_plan([1], [3], [True], scheduled_new_reqs=[enter(1, [4, 5, 6], 1)])
    for inputs in (host, device):
        inputs.update(plan)
    check_equal(host, device, plan)


def test_a_late_result_leaves_a_row_alone_that_another_request_has_entered():
    _, device = make_inputs()
    plan = step_plan(
        [0, 1], [2, 2], [True, True], scheduled_new_reqs=[enter(0, [4, 5], 1), enter(1, [6, 7], 2)]
    )
    device.update(plan)
    batch = gather_batch(plan, device.rows)
    new = batch.new_tokens(batch.num_sampled)
    other = step_plan([0], [3], [True], finished_rows=[0])
    other.scheduled_new_reqs.append(enter(0, [1, 2, 3], 3))
    device.update(other)
    device.settle_tokens(np.array([88, 99]), new)
    assert device.rows.token_ids[0, :4].tolist() == [1, 2, 3, 0]
    assert device.rows.token_ids[1, :3].tolist() == [6, 7, 99]


def test_staged_arrays_arrive_whatever_their_types_and_sizes():
    staging = Staging(CPU)
    arrays = [
        np.arange(3, dtype=np.int32),
        np.array([[1.5, 2.5]], np.float32),
        np.array([True, False]),
        np.array([2**64 - 1], np.uint64),
        np.zeros(0, np.int64),
        np.arange(100_000, dtype=np.float64),
    ]
    for _ in range(NUM_BUFFERS + 1):
        found = staging.stage(arrays)
        assert [tuple(t.shape) for t in found] == [a.shape for a in arrays]
        assert found[3].item() == -1
        for i in (0, 1, 2, 4, 5):
            assert torch.equal(found[i], torch.from_numpy(arrays[i]))


def test_an_array_is_staged_into_its_place():
    staging = Staging(CPU)
    target = torch.zeros(70_000, dtype=torch.int32)
    for step in range(NUM_BUFFERS + 1):
        for size in (3, 70_000):
            array = np.arange(size, dtype=np.int32) + step
            staging.stage_into(array, target[:size])
            assert torch.equal(target[:size], torch.from_numpy(array))


def test_a_copy_to_the_host_is_what_it_was_when_it_was_ordered():
    tensor = torch.tensor([1, 2, 3])
    arrive = Results(CPU).fetch([tensor])
    tensor.zero_()
    assert arrive()[0].tolist() == [1, 2, 3]


def test_a_plan_past_the_known_tokens_is_a_broken_invariant():
    _, device = make_inputs()
    device.update(step_plan([0], [2], [True], scheduled_new_reqs=[enter(0, [4, 5], 1)]))
    with pytest.raises(AssertionError, match="past known tokens"):
        gather_batch(step_plan([0], [3], [True]), device.rows)
