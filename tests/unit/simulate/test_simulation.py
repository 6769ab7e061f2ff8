"""Simulations against schedules worked out by hand, sums, and a formula."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from helpers.simulated import Listed, SimulatedEngine
from tokenmill.simulate.options import SimulateOptions
from tokenmill.simulate.requests import SimulatedRequest, part


def request(number, arrival=0.0, input_len=8, output_len=4, **more):
    prompt = part(100 + number, input_len)
    return SimulatedRequest(number, arrival, prompt, output_len, **more)


def test_two_requests_by_hand():
    """Steps of a second:   0-1 a's prompt | 1-2 a | 2-3 a, b's prompt | 3-4 a, b | 4-5 b"""
    a, b = request(0, 0.0, output_len=4), request(1, 1.5, output_len=3)
    report = SimulatedEngine(Listed(a, b)).run()
    assert (a.first, a.last, a.num_output) == (1.0, 4.0, 4)
    assert (b.scheduled, b.first, b.last, b.num_output) == (2.0, 3.0, 5.0, 3)
    assert report.num_steps == 5
    assert report.tokens_per_step == (8 + 1 + (1 + 8) + 2 + 1) / 5
    assert report.seconds == 5.0
    assert report.ttft.mean == pytest.approx((1000 + 1500) / 2)
    assert report.e2el.mean == pytest.approx((4000 + 3500) / 2)
    assert report.itl.mean == pytest.approx(1000)
    assert report.itl.percentiles["p50"] == pytest.approx(1000, rel=1e-3)
    assert report.busy == 1.0


def test_two_steps_in_flight_by_hand():
    """The second step is planned when the first one begins, and begins when that ends: b, which
    comes meanwhile, is in the third.
    """
    a, b = request(0, 0.0, output_len=4), request(1, 0.5, output_len=2)
    SimulatedEngine(Listed(a, b), async_scheduling=True).run()
    assert (a.first, a.last) == (1.0, 4.0)
    assert (b.scheduled, b.first, b.last) == (1.0, 3.0, 4.0)


def test_an_idle_worker_begins_when_a_request_comes():
    late = request(0, 7.25, output_len=1)
    report = SimulatedEngine(Listed(late)).run()
    assert (late.scheduled, late.first) == (7.25, 8.25)
    assert report.busy == pytest.approx(1 / 8.25)


def test_a_long_prompt_is_computed_in_chunks():
    long = request(0, input_len=100, output_len=1)
    SimulatedEngine(Listed(long), max_num_batched_tokens=64).run()
    assert long.first == 2.0


def test_shared_prefixes_are_found_and_others_are_not():
    shared = part(1 << 30, 16)
    requests = [
        SimulatedRequest(n, 10.0 * n, shared + part(100 + n, 4), 2, priority=0) for n in range(3)
    ]
    other = request(3, 30.0, input_len=20)
    report = SimulatedEngine(Listed(*requests, other)).run()
    assert [each.num_cached for each in (*requests, other)] == [0, 16, 16, 0]
    assert report.prefix_hit_rate == 32 / 80


def test_a_pool_that_is_too_small_preempts_the_last_and_all_end():
    """Ten blocks of 4 hold one of these requests to its end and half of another."""
    first, second = request(0, output_len=20), request(1, output_len=20)
    report = SimulatedEngine(Listed(first, second), num_blocks=11).run()
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert report.num_preemptions == 1
    assert first.last < second.last
    assert report.kv_usage_peak == 1.0
    assert report.num_output_tokens == 40


def test_deadlines_end_requests_where_they_stand():
    fine = request(0, output_len=3)
    cut = request(1, output_len=100, deadline=9.5)
    never = request(2, 1.0, deadline=1.5)
    report = SimulatedEngine(Listed(fine, cut, never), max_num_seqs=2, goals={"ttft": 5e3}).run()
    assert (report.num_completed, report.num_aborted) == (1, 2)
    assert cut.num_output == 10  # the deadline is seen when a step ends
    assert never.first is None
    assert report.share_good == pytest.approx(1 / 3)


def test_urgent_requests_overtake_the_others():
    options = SimulateOptions(
        num_requests=100, request_rate=math.inf, input_len=8, output_len=4, priorities="0:1,7:1"
    )
    report = SimulatedEngine(options, scheduling_policy="priority", max_num_seqs=4).run()
    urgent, other = report.ttft_of_priority["0"], report.ttft_of_priority["7"]
    assert urgent.percentiles["p99"] < other.percentiles["p50"]


def test_what_fits_nowhere_is_refused():
    huge = request(0, input_len=600)
    report = SimulatedEngine(Listed(huge, request(1)), goals={"ttft": 1e9}).run()
    assert (report.num_refused, report.num_completed) == (1, 1)
    assert report.share_good == 0.5


def test_drafts_that_hold_save_steps():
    def steps(acceptance):
        one = request(0, output_len=41)
        engine = SimulatedEngine(
            Listed(one), acceptance=acceptance, spec_method="ngram", spec_tokens=3
        )
        assert engine.run().num_output_tokens == 41
        return engine.workers[0].counts.num_steps

    assert steps(0.0) == 41
    assert steps(1.0) == 11  # one token, then four a step
    assert 11 < steps(0.7) < 41


def test_sessions_find_what_was_said_before():
    options = SimulateOptions(
        num_requests=20, turns=5, input_len=8, output_len=8, request_rate=0.01, think_seconds=1.0
    )
    engine = SimulatedEngine(options)
    report = engine.run()
    assert report.num_completed == 20
    # Prompts of 8, 24, 40, 56 and 72 tokens; of the last answer all but one token is computed.
    assert report.num_prompt_tokens == 4 * (8 + 24 + 40 + 56 + 72)
    assert report.num_output_tokens == 160
    assert engine.recorder.num_cached_tokens == 4 * (12 + 28 + 44 + 60)


@pytest.mark.parametrize("routing", ["round_robin", "least_loaded", "prefix"])
def test_every_request_ends_once_and_all_tokens_are_there(routing):
    options = SimulateOptions(
        num_requests=300, request_rate=4.0, input_len=40, output_len=20, length_cv=0.8,
        prefix_len=16, num_prefixes=3, turns=2, think_seconds=3.0,
    )  # fmt: skip
    engine = SimulatedEngine(options, num_workers=3, routing=routing, num_blocks=130)
    ended = []
    engine._simulation._recorder = Ends(engine.recorder, ended)
    report = engine.run()
    assert sorted(each.number for each in ended) == list(range(300))
    assert report.num_completed == 300
    assert report.num_output_tokens == sum(each.output_len for each in ended)
    assert all(each.num_output == each.output_len for each in ended)
    assert report.num_prompt_tokens == sum(len(each.prompt) for each in ended)
    assert report.num_preemptions > 0
    # What was computed is what was asked for, less what was found, and more after preemptions.
    computed = sum(worker.counts.num_tokens for worker in engine.workers)
    least = sum(len(each.prompt) + each.output_len - 1 - each.num_cached for each in ended)
    assert computed >= least


class Ends:
    """A recorder that keeps the requests themselves."""

    def __init__(self, recorder, ended):
        self._recorder, self._ended = recorder, ended

    def __getattr__(self, name):
        return getattr(self._recorder, name)

    def end(self, request, now):
        self._ended.append(request)
        self._recorder.end(request, now)


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_one_server_with_a_fixed_time_waits_as_the_formula_says(load):
    """M/D/1: the mean wait is load / (2 (1 - load)) services."""
    options = SimulateOptions(num_requests=10_000, request_rate=load, input_len=1, output_len=1)
    engine = SimulatedEngine(options, max_num_seqs=1, enable_prefix_caching=False)
    report = engine.run()
    assert report.queue.mean / 1e3 == pytest.approx(load / (2 * (1 - load)), rel=0.1)
    assert report.busy == pytest.approx(load, rel=0.03)


def test_a_seed_tells_everything():
    options = SimulateOptions(
        num_requests=200, request_rate=3.0, input_len=30, output_len=10, length_cv=1.0, turns=2,
        prefix_len=8, num_prefixes=4, burstiness=2.0, priorities="0:1,1:2",
    )  # fmt: skip

    def run(seed):
        chosen = replace(options, seed=seed)
        settings = {"acceptance": 0.5, "spec_method": "ngram", "spec_tokens": 2}
        return SimulatedEngine(chosen, num_workers=2, routing="prefix", **settings).run()

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_prefixes_go_where_they_have_been():
    options = SimulateOptions(
        num_requests=200, request_rate=0.4, input_len=4, output_len=4, prefix_len=64,
        num_prefixes=8,
    )  # fmt: skip

    def hit_rate(routing):
        return SimulatedEngine(options, num_workers=8, routing=routing).run().prefix_hit_rate

    assert hit_rate("prefix") > hit_rate("round_robin") + 0.1


def test_the_least_loaded_of_all_is_chosen_in_turn():
    requests = [request(number, output_len=100) for number in range(4)]
    engine = SimulatedEngine(Listed(*requests), num_workers=4, routing="least_loaded")
    engine.run()
    assert [worker.counts.num_steps for worker in engine.workers] == [100] * 4
