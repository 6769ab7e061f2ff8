"""The loop of the core's process: it sleeps when it may, and says what there is to say."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from helpers.core import create_core, create_request
from helpers.fake_executor import endless, generate_alone
from tokenmill.engine import wire
from tokenmill.engine.core_process import FRONT_END_TIMEOUT, CoreLoop
from tokenmill.engine.status_page import StatusPage


class ScriptedChannel:
    """Plays a front end: gives the messages of a script, notes how long the loop would wait.

    An entry is a message, a function that is called for one, or None for "nothing comes". With the
    script at its end the loop is told to stop when it has nothing to do.
    """

    def __init__(self, *script: wire.ToCore | Callable[[], wire.ToCore | None] | None) -> None:
        self.script = list(script)
        self.sent: list[wire.FromCore] = []
        self.timeouts: list[int | None] = []

    def receive(self, timeout_ms: int | None) -> wire.ToCore | None:
        self.timeouts.append(timeout_ms)
        if self.script:
            entry = self.script.pop(0)
            return entry() if callable(entry) else entry
        return wire.Stop() if timeout_ms is None else None

    def send(self, message: wire.FromCore) -> None:
        self.sent.append(message)

    def flush_logs(self) -> None:
        """There are none."""

    @property
    def outputs(self):
        return [
            output
            for message in self.sent
            if isinstance(message, wire.StepOutputs)
            for output in message.outputs.outputs
        ]


@pytest.fixture
def page():
    page = StatusPage.create(max_steps_in_flight=2, max_num_seqs=16)
    yield page
    page.close()


def run(page, channel, **kwargs):
    core, executor = create_core(next_token=endless, **kwargs)
    CoreLoop(core, channel, page).run()
    return core, executor


def test_requests_are_computed_and_idling_waits_without_limit(page):
    requests = [create_request(6, max_tokens=4) for _ in range(3)]
    channel = ScriptedChannel(wire.AddRequests(requests))
    core, executor = run(page, channel)
    for request in requests:
        mine = [o for o in channel.outputs if o.request_id == request.request_id]
        ids = [token for output in mine for token in output.new_token_ids]
        assert ids == generate_alone(request, core.scheduler, endless).token_ids
    assert channel.timeouts[0] is None
    assert channel.timeouts[-1] is None
    assert set(channel.timeouts[1:-1]) == {0}
    assert len(executor.plans) == 4
    assert page.under_way() == []
    last = channel.sent[-1]
    assert (last.outputs.stats.num_running, last.outputs.stats.num_used_blocks) == (0, 0)


def test_the_page_tells_the_step_while_it_runs(page):
    seen = []
    core, executor = create_core(next_token=endless, max_steps_in_flight=2)
    execute = executor.execute_model

    def watching(plan):
        seen.append((plan.req_ids, page.under_way()))
        execute(plan)

    executor.execute_model = watching
    request = create_request(6, max_tokens=4)
    CoreLoop(core, ScriptedChannel(wire.AddRequests([request])), page).run()
    assert len(seen) == 4
    for ids, under_way in seen:
        assert ids == [request.request_id]
        assert set(under_way) == set(ids)
    assert page.under_way() == []


def test_statistics_come_without_an_output_only_if_they_have_changed(page):
    request = create_request(6, max_tokens=100)
    channel = ScriptedChannel(
        wire.AddRequests([request]),
        None,
        wire.AbortRequests([request.request_id]),
        None,
        wire.AbortRequests(["nobody"]),
        wire.AbortRequests(["nobody"]),
    )
    run(page, channel)
    first, ready, *rest = channel.sent
    assert isinstance(ready, wire.Ready)
    kinds = [(len(m.outputs.outputs), m.outputs.stats.num_running) for m in (first, *rest)]
    assert kinds == [(0, 0), (1, 1), (0, 0)]


def test_a_request_that_cannot_be_served_is_refused_and_harms_nobody(page):
    fits, does_not = create_request(6, max_tokens=2), create_request(200)
    channel = ScriptedChannel(wire.AddRequests([does_not, fits]))
    run(page, channel, num_blocks=10)
    (refusal,) = [m for m in channel.sent if isinstance(m, wire.Refusal)]
    assert refusal.request_id == does_not.request_id
    assert refusal.error.kind == "InvalidRequestError"
    assert [len(output.new_token_ids) for output in channel.outputs] == [1, 1]
    assert page.under_way() == []


def test_the_prefix_cache_is_reset_only_while_nothing_runs(page):
    request = create_request(6, max_tokens=3)
    channel = ScriptedChannel(
        wire.ResetPrefixCache(), wire.AddRequests([request]), None, wire.ResetPrefixCache()
    )
    run(page, channel)
    answers = [m.done for m in channel.sent if isinstance(m, wire.PrefixCacheReset)]
    assert answers == [True, False]


class HeldBack:
    """A rule that lets nothing start until it is told to."""

    def __init__(self):
        self.is_open = False

    def begin_pass(self, running):
        """Nothing changes."""

    def wait_reason(self, request):
        return None if self.is_open else "the door is shut"


def test_requests_that_may_not_start_yet_are_asked_about_ever_more_rarely(page):
    door = HeldBack()

    def open_door():
        door.is_open = True

    request = create_request(6, max_tokens=2)
    channel = ScriptedChannel(wire.AddRequests([request]), *[None] * 20, open_door)
    run(page, channel, readiness_rules=[door])
    waits = [timeout for timeout in channel.timeouts if timeout]
    assert waits[:8] == [1, 2, 4, 8, 16, 32, 50, 50]
    assert max(waits) == 50
    assert sum(len(output.new_token_ids) for output in channel.outputs) == 2
    assert channel.timeouts[-1] is None


def test_a_front_end_that_is_stopped_pauses_the_core(page):
    request = create_request(6, max_tokens=5)

    def fall_silent():
        page._words[1] = time.monotonic_ns() - int((FRONT_END_TIMEOUT + 1) * 1e9)

    channel = ScriptedChannel(
        wire.AddRequests([request]), fall_silent, None, None, page.beat_front_end
    )
    _, executor = run(page, channel)
    assert len(executor.plans) == 5
    assert [t for t in channel.timeouts if t] == [100, 100, 100]


def test_turns_show_that_the_loop_gets_on(page):
    before = page.num_turns
    run(page, ScriptedChannel(wire.AddRequests([create_request(6, max_tokens=5)])))
    assert page.num_turns - before == 6
    assert os.fstat(page.fd).st_size > 0
