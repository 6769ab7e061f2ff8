"""Steps that are made at once leave what the same steps leave one by one."""

from __future__ import annotations

import math
from dataclasses import astuple, replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from helpers.simulated import Listed, SimulatedEngine
from tokenmill.simulate.cruise import Cruise
from tokenmill.simulate.options import SimulateOptions
from tokenmill.simulate.requests import SimulatedRequest, part
from tokenmill.simulate.work import StepWork

PHASES = (Phase.explicit, Phase.generate)
"""Simulations are too long to be shrunk."""


class Growing:
    """Steps take longer the more they read, and no two the same."""

    def seconds(self, work: StepWork) -> float:
        return 0.01 + 1e-3 * work.num_tokens + 1e-5 * work.num_keys + 1e-4 * work.num_requests


def outcome(report):
    """The report, with sums of many floats to within their rounding, and without what is rounded
    (percentiles of gaps) or averaged (blocks in use).
    """
    itl = replace(report.itl, percentiles={})
    return numbers(astuple(replace(report, kv_usage_mean=0.0, itl=itl)))


def numbers(value):
    if isinstance(value, tuple):
        return [numbers(each) for each in value]
    if isinstance(value, dict):
        return {name: numbers(each) for name, each in value.items()}
    return pytest.approx(value, rel=1e-9) if isinstance(value, float) else value


@settings(max_examples=50, deadline=None, derandomize=True, phases=PHASES)
@given(data=st.data())
def test_reports_are_the_same(data):
    options = SimulateOptions(
        num_requests=data.draw(st.integers(1, 60)),
        request_rate=data.draw(st.sampled_from([0.2, 2.0, 20.0, math.inf])),
        burstiness=data.draw(st.sampled_from([0.0, 1.0, 3.0])),
        input_len=data.draw(st.integers(1, 60)),
        output_len=data.draw(st.integers(1, 80)),
        length_cv=data.draw(st.sampled_from([0.0, 1.0])),
        prefix_len=data.draw(st.sampled_from([0, 10, 16])),
        num_prefixes=2,
        turns=data.draw(st.integers(1, 3)),
        think_seconds=1.0,
        priorities=data.draw(st.sampled_from([None, "0:1,1:1"])),
        deadline=data.draw(st.sampled_from([None, 2.0, 30.0])),
        seed=data.draw(st.integers(0, 1000)),
    )
    engine = {
        "num_workers": data.draw(st.integers(1, 2)),
        "routing": data.draw(st.sampled_from(["round_robin", "least_loaded", "prefix"])),
        "cost": Growing(),
        "num_blocks": data.draw(st.sampled_from([40, 130, 1000])),
        "max_num_seqs": data.draw(st.sampled_from([1, 3, 8])),
        "max_num_batched_tokens": data.draw(st.sampled_from([8, 64])),
        "async_scheduling": data.draw(st.booleans()),
        "scheduling_policy": data.draw(st.sampled_from(["fcfs", "priority"])),
        "windows": data.draw(st.sampled_from([(None,), (None, None), (None, 8)])),
        "goals": {"ttft": 1000.0, "tpot": 30.0},
    }
    check_both_ways(options, engine)


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        (  # a prompt in flight: its blocks are cached when it settles
            {"request_rate": 0.2, "burstiness": 3.0, "input_len": 17, "output_len": 52,
             "deadline": 2.0, "seed": 865},
            {"num_workers": 2, "num_blocks": 40, "windows": (None, None)},
        ),
        (  # one that waits for blocks finds a prefix that another has just computed
            {"request_rate": 20.0, "input_len": 23, "output_len": 36, "length_cv": 1.0,
             "prefix_len": 10, "num_prefixes": 2, "seed": 513},
            {"num_blocks": 40, "max_num_seqs": 3},
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_reports_are_the_same_where_steps_are_nearly_alike(options, engine, async_scheduling):
    engine = {**engine, "cost": Growing(), "async_scheduling": async_scheduling}
    check_both_ways(SimulateOptions(num_requests=40, **options), engine)


def check_both_ways(options, engine):
    step_by_step = SimulatedEngine(options, **engine, skips_steps=False)
    at_once = SimulatedEngine(options, **engine)
    expected, found = step_by_step.run(), at_once.run()
    # Blocks in use are averaged over a cruise, where tables grow step by step.
    usage = expected.kv_usage_mean
    assert found.kv_usage_mean == pytest.approx(usage, rel=0.2, abs=0.02)
    assert outcome(found) == outcome(expected)
    assert at_once.recorder.gaps.num_times == step_by_step.recorder.gaps.num_times
    for number in (0, len(at_once.workers) - 1):
        ours, theirs = at_once.workers[number], step_by_step.workers[number]
        assert ours.counts.num_tokens == theirs.counts.num_tokens
        assert ours.scheduler.make_stats() == theirs.scheduler.make_stats()


def test_most_steps_are_skipped_where_nothing_comes():
    options = SimulateOptions(
        num_requests=4, request_rate=math.inf, input_len=8, output_len=400, seed=1
    )
    engine = SimulatedEngine(options)
    scheduler, plans = engine.workers[0].scheduler, []
    schedule = scheduler.schedule

    def counted():
        plans.append(1)
        return schedule()

    scheduler.schedule = counted
    report = engine.run()
    assert report.num_steps == 400
    assert len(plans) < 10


@pytest.mark.parametrize("skips_steps", [True, False])
@pytest.mark.parametrize(("policy", "starts"), [("priority", 13.0), ("fcfs", 30.0)])
def test_one_that_fits_overtakes_one_that_does_not_if_it_is_urgent(policy, starts, skips_steps):
    """Nineteen blocks of 4: `large` waits for the end of `running`, from which on steps are alike;
    `urgent` comes in the middle of them.
    """
    running = SimulatedRequest(0, 0.0, part(100, 40), 30)
    large = SimulatedRequest(1, 0.5, part(101, 60), 1, priority=5)
    urgent = SimulatedRequest(2, 12.5, part(102, 4), 1, priority=0)
    SimulatedEngine(
        Listed(running, large, urgent),
        num_blocks=20,
        scheduling_policy=policy,
        skips_steps=skips_steps,
    ).run()
    assert large.scheduled == 30.0
    assert urgent.scheduled == starts


class Noting(Listed):
    """Notes when requests have ended."""

    def __init__(self, *requests):
        super().__init__(*requests)
        self.ends = {}

    def following(self, request, now):
        self.ends[request.number] = now


@pytest.mark.parametrize("skips_steps", [True, False])
def test_what_a_deadline_has_ended_is_told_with_the_next_result(skips_steps):
    """`late` is found overdue when `first` makes room for `long`, whose steps are alike."""
    first = SimulatedRequest(0, 0.0, part(100, 1), 3)
    late = SimulatedRequest(1, 0.1, part(101, 1), 1, deadline=2.5)
    long = SimulatedRequest(2, 0.2, part(102, 1), 60)
    workload = Noting(first, late, long)
    settings = {"max_num_seqs": 1, "async_scheduling": True}
    SimulatedEngine(workload, skips_steps=skips_steps, **settings).run()
    assert workload.ends == {0: 3.0, 1: 4.0, 2: 63.0}


@pytest.mark.parametrize("num_in_flight", [0, 1])
def test_a_cruise_stops_before_the_first_plan_that_has_something_to_see(num_in_flight):
    cruise = Cruise.of(10.0, [11.0] * num_in_flight, [1.0] * 5)
    first = 11.0
    assert cruise.end == 15.0
    assert cruise.busy_seconds == 5.0
    cruise.stop_at(12.5)  # planned at 10, 11, 12, and then at 13
    assert (cruise.num_steps, cruise.end) == (3, 13.0)
    assert cruise.settled == [first, 12.0, 13.0]
    assert cruise.in_flight == [14.0] * num_in_flight
    assert cruise.busy_seconds == 3.0
    cruise.stop_at(12.0)
    assert cruise.num_steps == 2
    cruise.stop_at(10.0)
    assert (cruise.num_steps, cruise.end, cruise.in_flight) == (0, 10.0, [11.0] * num_in_flight)
