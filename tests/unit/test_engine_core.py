"""The loop: submit, settle, one step after another or one ahead."""

from __future__ import annotations

import pytest

from helpers.core import create_core, create_request, run_to_end
from helpers.fake_executor import endless, generate_alone
from tokenmill.contracts.request import FinishReason
from tokenmill.errors import EngineDeadError, InvalidRequestError


@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_requests_bring_what_they_bring_alone(depth, num_drafts):
    core, _ = create_core(max_steps_in_flight=depth, num_drafts=num_drafts, num_blocks=20)
    requests = [create_request(3 + 2 * number, max_tokens=6 + number) for number in range(8)]
    for request in requests:
        core.add_request(request)
    collector = run_to_end(core)
    for request in requests:
        expected = generate_alone(request, core.scheduler)
        collected = collector.requests[request.request_id]
        assert collected.token_ids == expected.token_ids
        assert collected.last.finish_reason == expected.finish_reason


@pytest.mark.parametrize(("depth", "num_sent"), [(1, 1), (2, 2)])
def test_a_step_fills_the_pipeline_and_settles_the_oldest(depth, num_sent):
    core, executor = create_core(max_steps_in_flight=depth, next_token=endless)
    core.add_request(create_request(5, max_tokens=8))
    (output,) = core.step().outputs
    assert len(output.new_token_ids) == 1
    assert len(executor.plans) == num_sent


def test_without_work_no_step_is_sent():
    core, executor = create_core()
    outputs = core.step()
    assert (outputs.outputs, executor.plans) == ([], [])
    assert core.scheduler.make_stats().num_running == 0
    assert not core.has_requests()


def test_abort_drops_the_rest_and_settles_what_is_in_flight():
    core, executor = create_core(max_steps_in_flight=2, next_token=endless)
    request = create_request(5, max_tokens=8)
    core.add_request(request)
    core.step()
    core.abort_requests([request.request_id, "nobody"])
    assert core.has_requests()  # one step is still in flight
    assert core.step().outputs == []
    assert not core.has_requests()
    other = create_request(5, max_tokens=2)
    core.add_request(other)
    collected = run_to_end(core).requests[other.request_id]
    assert collected.token_ids == generate_alone(other, core.scheduler, endless).token_ids
    assert len(executor.rows) == 1  # a freed row is told with the next plan


def test_an_overdue_request_ends_without_a_step():
    core, executor = create_core()
    request = create_request(5, deadline=0.0)
    core.add_request(request)
    (output,) = core.step().outputs
    assert (output.request_id, output.finish_reason) == (request.request_id, FinishReason.ABORT)
    assert executor.plans == []


def test_a_refused_request_leaves_no_trace():
    core, _ = create_core(num_blocks=3)
    with pytest.raises(InvalidRequestError):
        core.add_request(create_request(50))
    assert not core.has_requests()


def test_after_shutdown_nothing_goes():
    core, executor = create_core()
    core.shutdown()
    core.shutdown()
    assert executor.num_shutdowns == 2
    with pytest.raises(EngineDeadError):
        core.add_request(create_request(5))
    with pytest.raises(EngineDeadError):
        core.step()
