"""Operations between the steps of a core: what happens when, to requests and to memory."""

from __future__ import annotations

import pytest

from helpers.core import Collector, check_invariants, create_core, create_request, run_to_end
from helpers.fake_executor import endless, generate_alone
from tokenmill.contracts.operations import (
    KV_CACHE,
    SCHEDULING,
    TAGS,
    WEIGHTS,
    Sleep,
    UpdateWeights,
    WakeUp,
)
from tokenmill.engine.operations import CoreOperations
from tokenmill.errors import CheckpointError, InvalidRequestError

UPDATE = UpdateWeights("there", "1")


class Memory:
    """Remembers what it was asked for."""

    def __init__(self):
        self.asked = []
        self.has_weights = True
        self.error = None

    def sleep(self, level):
        self.asked.append(level)
        return 0

    def wake_up(self):
        self.asked.append("wake up")

    def update_weights(self, path, tensors):
        self.asked.append(path)
        if self.error is not None:
            raise self.error
        self.has_weights = True


def core_with_memory(**settings):
    core, executor = create_core(next_token=endless, **settings)
    memory = Memory()
    core.operations = CoreOperations(core.scheduler, memory)
    return core, executor, memory


def done(core, operation, collector=None):
    """The state after an operation that waits for nothing but steps in flight."""
    future = core.operations.begin(operation)
    for _ in range(4):
        if not future.done():
            outputs = core.step()
            if collector is not None:
                collector.add(outputs.outputs)
    return future.result(0)


def started(core, count=3):
    """Requests that have begun, and what they have brought."""
    requests = [create_request(5 + each, max_tokens=8) for each in range(count)]
    for request in requests:
        core.add_request(request)
    collector = Collector()
    collector.add(core.step().outputs)
    return requests, collector


def check_rest(core, requests, collector):
    """Run to the end: all requests bring what they bring alone."""
    while core.has_requests():
        collector.add(core.step().outputs)
    check_invariants(core.scheduler)
    for request in requests:
        expected = generate_alone(request, core.scheduler, endless).token_ids
        assert collector.requests[request.request_id].token_ids == expected


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("operation", [Sleep(0, "keep"), Sleep(1, "keep"), Sleep(2, "keep")])
def test_requests_that_are_kept_go_on_with_the_same_tokens(operation, depth):
    core, executor, memory = core_with_memory(max_steps_in_flight=depth)
    requests, collector = started(core)
    asleep = done(core, operation, collector).asleep
    assert asleep == ((SCHEDULING,) if operation.level == 0 else TAGS)
    assert memory.asked == ([operation.level] if operation.level else [])
    assert len(core.scheduler.running) == (3 if operation.level == 0 else 0)
    sent = len(executor.plans)
    late = create_request(9, max_tokens=4)
    core.add_request(late)
    for _ in range(3):
        assert core.step().outputs == []
    assert len(executor.plans) == sent
    assert core.has_requests()
    assert done(core, WakeUp(), collector).asleep == ()
    check_rest(core, [*requests, late], collector)


@pytest.mark.parametrize("operation", [Sleep(1, "wait"), UPDATE])
def test_those_that_have_begun_are_waited_for_and_others_are_not_begun(operation):
    core, _, memory = core_with_memory(max_num_seqs=3)
    requests, _ = started(core)
    late = create_request(9, max_tokens=4)
    core.add_request(late)
    future = core.operations.begin(operation)
    ended = []
    while not future.done():
        assert memory.asked == []
        ended += [each.request_id for each in core.step().outputs if each.finished]
    assert sorted(ended) == sorted(each.request_id for each in requests)
    assert list(core.scheduler.requests) == [late.request_id]
    if isinstance(operation, Sleep):
        assert core.step().outputs == []
        done(core, WakeUp())
    check_rest(core, [late], Collector())


def test_a_preempted_request_counts_as_begun():
    core, _, _memory = core_with_memory(num_blocks=12)
    requests = [create_request(10, max_tokens=20) for _ in range(4)]
    for request in requests:
        core.add_request(request)
    while not core.scheduler.make_stats().num_preemptions:
        core.step()
    assert core.scheduler.waiting
    future = core.operations.begin(Sleep(1, "wait"))
    while not future.done():
        core.step()
    assert not any(
        each.first_scheduled_time is not None for each in core.scheduler.requests.values()
    )


def test_nobody_waits_for_requests_of_a_paused_engine():
    core, _, memory = core_with_memory()
    requests, collector = started(core)
    done(core, Sleep(0, "keep"), collector)
    done(core, Sleep(1, "wait"), collector)
    assert memory.asked == [1]
    done(core, WakeUp(), collector)
    check_rest(core, requests, collector)


def test_parts_wake_up_one_after_another():
    core, _, memory = core_with_memory()
    started(core)
    done(core, Sleep(2, "keep"))
    for tags, missing in [
        ((SCHEDULING,), "without kv_cache, weights"),
        ((SCHEDULING, KV_CACHE), "without weights"),
    ]:
        with pytest.raises(InvalidRequestError, match=missing):
            done(core, WakeUp(tags))
        assert core.operations.state.asleep == TAGS
    assert done(core, WakeUp(())).asleep == TAGS
    assert done(core, WakeUp((WEIGHTS,))).asleep == (SCHEDULING, KV_CACHE)
    assert memory.asked == [2, "wake up"]
    assert core.step().outputs == []
    assert done(core, WakeUp((KV_CACHE,))).asleep == ()
    assert run_to_end(core).requests


def test_prefixes_are_forgotten_where_kv_is():
    core, _executor, _ = core_with_memory()
    for operation, kept in [
        (Sleep(0, "keep"), True),
        (Sleep(0, "keep", clear_cache=True), False),
        (Sleep(1, "keep"), False),
        (UPDATE, False),
    ]:
        prompt = list(range(3, 23))
        first = create_request(prompt, max_tokens=2)
        core.add_request(first)
        run_to_end(core)
        done(core, operation)
        done(core, WakeUp())
        second = create_request(prompt, max_tokens=2)
        core.add_request(second)
        output = core.step().outputs[0]
        assert (output.num_cached_tokens > 0) is kept, operation
        run_to_end(core)


def test_an_update_names_the_weights_and_a_paused_engine_stays_so():
    core, _, memory = core_with_memory()
    assert core.operations.state.weight_version == "default"
    assert done(core, UPDATE).weight_version == "1"
    done(core, Sleep(0))
    state = done(core, UpdateWeights("elsewhere", "2"))
    assert (state.weight_version, state.asleep) == ("2", (SCHEDULING,))
    assert memory.asked == ["there", "elsewhere"]


def test_an_update_takes_the_place_of_waking_weights_up():
    core, _, memory = core_with_memory()
    done(core, Sleep(2))
    assert done(core, UPDATE).asleep == (SCHEDULING, KV_CACHE)
    assert done(core, WakeUp((KV_CACHE,))).asleep == ()
    assert memory.asked == [2, "there"]


@pytest.mark.parametrize("has_weights", [True, False])
def test_an_update_that_fails(has_weights):
    core, _, memory = core_with_memory()
    memory.error, memory.has_weights = CheckpointError("it is cut short"), has_weights
    with pytest.raises(CheckpointError):
        done(core, UPDATE)
    state = core.operations.state
    assert state.weight_version == "default"
    assert state.asleep == (() if has_weights else (SCHEDULING, WEIGHTS))
    if not has_weights:
        with pytest.raises(InvalidRequestError, match="update_weights"):
            done(core, WakeUp())
        memory.error = None
        assert done(core, UPDATE).asleep == ()
    core.add_request(create_request(5, max_tokens=2))
    assert run_to_end(core).requests


def test_operations_are_done_in_their_order():
    core, _, _memory = core_with_memory()
    futures = [core.operations.begin(each) for each in (Sleep(1), WakeUp(), Sleep(2), UPDATE)]
    assert core.has_requests()
    core.step()
    assert [each.result(0).asleep for each in futures] == [TAGS, (), TAGS, (SCHEDULING, KV_CACHE)]
    assert not core.has_requests()
