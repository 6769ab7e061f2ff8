"""The local executor, inline and with a step ahead in a thread."""

from __future__ import annotations

import threading

import pytest

from helpers.worker import INTERRUPT_TOKEN, Host, generate_alone, make_worker
from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.errors import EngineDeadError
from tokenmill.executor.local import local_executor

BOTH = pytest.mark.parametrize("background", [False, True])


def make_executor(background):
    worker, model = make_worker()
    return local_executor(worker, background=background), Host(worker), model


def submit(executor, plan):
    executor.execute_model(plan)
    return executor.sample_tokens(None)


@BOTH
def test_one_step_at_a_time(background):
    executor, host, _ = make_executor(background)
    host.add("a", [1, 2, 3], temperature=1.0, seed=3)
    for _ in range(5):
        host.settle(submit(executor, host.plan({"a": host.num_pending("a")})).result())
    executor.shutdown()
    assert host.requests["a"].output == generate_alone([1, 2, 3], 5, temperature=1.0, seed=3)


@BOTH
def test_two_plans_in_flight_bring_the_same_tokens(background):
    """Plan N + 1 reads the token of plan N, which the host does not know when it plans."""
    executor, host, _ = make_executor(background)
    prompts = {"a": [1, 2, 3], "b": [9] * 11, "c": [4]}
    for seed, (req_id, prompt) in enumerate(prompts.items()):
        host.add(req_id, prompt, temperature=1.0, seed=seed)
    in_flight = [submit(executor, host.plan({"a": 3, "b": 5}))]
    for _ in range(6):
        counts = {req_id: host.num_pending(req_id) for req_id in prompts}
        in_flight.append(submit(executor, host.plan(counts)))
        host.settle(in_flight.pop(0).result())
    host.settle(in_flight.pop().result())
    executor.shutdown()
    for (req_id, prompt), seed, count in zip(prompts.items(), range(3), (7, 6, 6), strict=True):
        want = generate_alone(prompt, count, temperature=1.0, seed=seed)
        assert host.requests[req_id].output == want


@BOTH
def test_a_request_that_fails_with_a_plan_behind_it_harms_nobody(background):
    from helpers.worker import ERROR_TOKEN

    executor, host, _ = make_executor(background)
    host.add("good", [1, 2], temperature=0.0)
    host.add("bad", [ERROR_TOKEN, 2], temperature=0.0)
    first = submit(executor, host.plan({"good": 2, "bad": 2}))
    second = submit(executor, host.plan({"good": 1, "bad": 1}))
    for future in (first, second):
        output = future.result()
        assert list(output.errors) == ["bad"]
        host.settle(output)
    host.leave_row("bad")
    host.settle(submit(executor, host.plan({"good": 1})).result())
    executor.shutdown()
    assert host.requests["good"].output == generate_alone([1, 2], 3, temperature=0.0)


def test_background_steps_run_in_one_other_thread():
    for background in (False, True):
        executor, host, model = make_executor(background)
        threads = set()
        compute_logits = model.compute_logits

        def spy(hidden_states, threads=threads, compute_logits=compute_logits):
            threads.add(threading.get_ident())
            return compute_logits(hidden_states)

        model.compute_logits = spy
        host.add("a", [1], temperature=0.0)
        futures = [submit(executor, host.plan({"a": 1})) for _ in range(3)]
        assert [future.result().step_id for future in futures] == [0, 1, 2]
        executor.shutdown()
        assert len(threads) == 1
        assert (threads == {threading.get_ident()}) is not background


@BOTH
def test_what_a_worker_raises_surfaces_at_the_result(background):
    """A plan that contradicts the rows is no request's fault."""
    executor, _, _ = make_executor(background)
    broken = SchedulerOutput(0, draft_token_ids={"nobody": [1]})
    future = submit(executor, broken)
    with pytest.raises(KeyError, match="nobody"):
        future.result()
    executor.shutdown()


def test_an_interrupt_passes_through_an_inline_step():
    executor, host, model = make_executor(background=False)
    model.num_interrupts = 1
    host.add("a", [INTERRUPT_TOKEN], temperature=0.0)
    with pytest.raises(KeyboardInterrupt):
        submit(executor, host.plan({"a": 1}))
    host.leave_row("a")
    host.add("b", [1], temperature=0.0)
    host.settle(submit(executor, host.plan({"b": 1})).result())
    assert host.requests["b"].output == generate_alone([1], 1, temperature=0.0)


@BOTH
def test_shutdown_finishes_what_runs_and_may_be_called_twice(background):
    executor, host, _ = make_executor(background)
    host.add("a", [1, 2], temperature=0.0)
    future = submit(executor, host.plan({"a": 2}))
    executor.shutdown()
    executor.shutdown()
    assert future.result().sampled_token_ids == [generate_alone([1, 2], 1, temperature=0.0)]
    with pytest.raises(EngineDeadError, match="shut down"):
        executor.execute_model(SchedulerOutput(1))
