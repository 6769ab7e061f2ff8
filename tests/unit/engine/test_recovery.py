"""Who enters a new core first, who is condemned, and when it is enough."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from helpers.core import create_request
from tokenmill.engine.recovery import RestartPolicy, Roster
from tokenmill.engine.serve_options import ServeOptions
from tokenmill.errors import ConfigError


def roster_of(*ids: str) -> Roster:
    roster = Roster()
    for request_id in ids:
        roster.add(create_request(4, request_id=request_id))
    return roster


def due(roster: Roster) -> list[str]:
    return [submission.submission_id for submission in roster.take_due()]


def test_without_a_crash_all_enter_at_once_under_their_own_ids():
    roster = roster_of("a", "b")
    submissions = roster.take_due()
    assert [s.submission_id for s in submissions] == ["a", "b"]
    assert all(s.is_first for s in submissions)
    assert due(roster) == []
    roster.add(create_request(4, request_id="c"))
    assert due(roster) == ["c"]
    assert roster.remove("b") == "b"
    assert (len(roster), roster.num_submitted) == (2, 2)


def test_suspects_are_tried_one_by_one_before_all_go_on():
    roster = roster_of("a", "b", "c")
    due(roster)
    assert roster.core_died(["a", "c"]) == []
    assert roster.num_submitted == 0
    assert due(roster) == ["a.1"]
    roster.add(create_request(4, request_id="d"))  # arrives meanwhile, and waits
    assert due(roster) == []
    assert roster.took_tokens("a", 1) is None
    assert roster.took_tokens("a", 1) == "a.1"  # stands down until the others have been tried
    assert due(roster) == ["c.1"]
    assert roster.request_id("a.1") is None
    assert roster.took_tokens("c", 2) is None  # the last one stays
    assert due(roster) == ["b.1", "d", "a.2"]
    assert roster.request_id("a.2") == "a"


def test_a_suspect_that_ends_makes_room_for_the_next():
    roster = roster_of("a", "b", "c")
    due(roster)
    roster.core_died(["a", "b", "c"])
    assert due(roster) == ["a.1"]
    assert roster.remove("b") is None  # aborted while it waited for its trial
    assert roster.remove("a") == "a.1"
    assert due(roster) == ["c.1"]


def test_two_deaths_alone_condemn():
    roster = roster_of("a", "b")
    due(roster)
    assert roster.core_died(["a", "b"]) == []
    assert due(roster) == ["a.1"]
    assert roster.core_died(["a.1"]) == []
    assert due(roster) == ["b.1"]  # who has not failed alone goes first
    roster.took_tokens("b", 100)
    assert due(roster) == ["a.2"]
    assert roster.core_died(["a.2"]) == ["a"]
    roster.remove("a")
    assert due(roster) == ["b.2"]


def test_a_death_between_steps_is_nobodys_fault():
    roster = roster_of("a", "b")
    due(roster)
    for count in range(1, 4):
        assert roster.core_died([]) == []
        assert due(roster) == [f"a.{count}", f"b.{count}"]


def test_a_death_on_trial_but_outside_of_a_step_is_no_strike():
    roster = roster_of("a", "b")
    due(roster)
    roster.core_died(["a", "b"])
    for count in range(1, 4):
        assert due(roster) == [f"a.{count}"]
        assert roster.core_died([]) == []
    assert due(roster) == ["a.4"]


def test_later_trials_last_longer():
    roster = roster_of("a", "b")
    due(roster)
    submission = {"a": "a", "b": "b"}
    for length in (2, 8, 32):
        roster.core_died([submission["a"], submission["b"]])
        (first,) = due(roster)
        assert roster.took_tokens(first[0], length - 1) is None
        assert roster.took_tokens(first[0], 1) == first
        (second,) = due(roster)
        roster.took_tokens(second[0], length)
        assert second[0] != first[0]
        (again,) = due(roster)
        submission = {second[0]: second, again[0]: again}


def test_outputs_of_the_dead_and_unknown_ids_are_nobodys():
    roster = roster_of("a")
    due(roster)
    assert roster.core_died(["nobody", "a"]) == []
    assert roster.request_id("a") is None
    assert roster.request_id("nobody") is None


def test_suspects_of_a_core_that_is_given_up_are_tried_in_another_one():
    roster, other = roster_of("a", "b", "c"), roster_of("x", "y")
    due(roster)
    due(other)
    roster.core_died(["a", "b"])
    for entry in roster.take_out(roster.held_back):
        other.put_in(entry)
    assert (len(roster), roster.held_back) == (0, [])
    assert due(other) == ["a.1"]
    assert other.took_tokens("a", 2) == "a.1"
    assert due(other) == ["b.1"]
    assert other.took_tokens("b", 2) is None
    assert due(other) == ["c.1", "a.2"]


def test_a_death_on_trial_beside_others_is_no_strike():
    roster, other = roster_of("a"), roster_of("x")
    due(roster)
    due(other)
    roster.core_died(["a"])
    (entry,) = roster.take_out(["a"])
    other.put_in(entry)
    assert due(other) == ["a.1"]
    assert other.core_died(["a.1", "x"]) == []
    assert due(other) == ["x.1"]  # no one has died alone: in the order of arrival
    other.took_tokens("x", 2)
    assert due(other) == ["a.2"]
    assert other.core_died(["a.2"]) == []
    assert due(other) == ["a.3"]
    assert other.core_died(["a.3"]) == ["a"]


class RosterMachine(RuleBasedStateMachine):
    """Cores that die whenever some requests are in them, whatever else happens."""

    def __init__(self) -> None:
        super().__init__()
        self.roster = Roster()
        self.alive: set[str] = set()
        self.in_core: dict[str, str] = {}
        self.ever_submitted: set[str] = set()
        self.number = 0
        self.is_trial = False

    def submit(self) -> None:
        while submissions := self.roster.take_due():
            for submission in submissions:
                assert submission.submission_id not in self.ever_submitted, "an id is used twice"
                self.ever_submitted.add(submission.submission_id)
                self.in_core[submission.request.request_id] = submission.submission_id

    def end(self, request_id: str) -> None:
        self.alive.discard(request_id)
        assert self.roster.remove(request_id) == self.in_core.pop(request_id, None)
        self.submit()

    @rule()
    def arrive(self) -> None:
        request_id = f"r{self.number}"
        self.number += 1
        self.alive.add(request_id)
        self.roster.add(create_request(4, request_id=request_id))
        self.submit()

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.alive))))

    @precondition(lambda self: self.in_core)
    @rule(data=st.data(), count=st.integers(1, 5))
    def take_tokens(self, data: st.DataObject, count: int) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.in_core)))
        stands_down = self.roster.took_tokens(request_id, count)
        if stands_down is not None:
            assert self.in_core.pop(request_id) == stands_down
        self.submit()

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        ids = sorted(self.in_core.values())
        under_way = data.draw(st.lists(st.sampled_from(ids), unique=True)) if ids else []
        alone = len(self.in_core) == 1
        condemned = self.roster.core_died(under_way)
        self.in_core.clear()
        assert not condemned or alone
        for request_id in condemned:
            self.end(request_id)
        self.submit()

    @invariant()
    def nobody_is_lost(self) -> None:
        assert len(self.roster) == len(self.alive)
        assert self.roster.num_submitted == len(self.in_core)
        for request_id, submission_id in self.in_core.items():
            assert self.roster.request_id(submission_id) == request_id
        # Whoever is not in the core waits for a trial that is on.
        assert not self.alive or self.in_core
        assert set(self.in_core) == self.alive or len(self.in_core) == 1


TestRoster = RosterMachine.TestCase
TestRoster.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_pauses_double_up_to_the_limit_and_are_forgotten_in_time():
    now = 0.0
    options = ServeOptions(max_restarts=6, restart_window=100.0, max_restart_delay=3.0)
    policy = RestartPolicy(options, clock=lambda: now)
    assert [policy.next_pause() for _ in range(7)] == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0, None]
    now = 99.0
    assert policy.next_pause() is None
    now = 100.0
    assert policy.next_pause() == 0.0


def test_no_restart_at_all():
    assert RestartPolicy(ServeOptions(max_restarts=0)).next_pause() is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_queue", -1),
        ("max_queue_tokens", 0),
        ("max_restarts", -1),
        ("restart_window", 0.0),
        ("heartbeat_timeout", -1.0),
        ("step_timeout", float("nan")),
    ],
)
def test_options_that_cannot_work_are_refused(name, value):
    with pytest.raises(ConfigError, match=name):
        ServeOptions(**{name: value})
