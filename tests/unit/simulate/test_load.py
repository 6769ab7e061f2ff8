"""What comes: options, random workloads, traces, and where requests are sent."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics

import pytest

from tokenmill.errors import ConfigError
from tokenmill.simulate.options import SimulateOptions
from tokenmill.simulate.requests import SAMPLED, SimulatedRequest, part
from tokenmill.simulate.routing import LeastLoaded, RoundRobin
from tokenmill.simulate.trace import TraceWorkload, read_trace
from tokenmill.simulate.workload import RandomWorkload


def arrivals(max_model_len=4096, **options):
    return list(RandomWorkload(SimulateOptions(**options), max_model_len).arrivals())


def gaps(requests):
    times = [request.arrival for request in requests]
    return [after - before for before, after in itertools.pairwise(times)]


@pytest.mark.parametrize("burstiness", [0.0, 0.5, 1.0, 2.0])
def test_times_have_their_rate_and_their_variation(burstiness):
    between = gaps(arrivals(num_requests=8000, request_rate=4.0, burstiness=burstiness))
    assert statistics.fmean(between) == pytest.approx(0.25, rel=0.08)
    assert statistics.pstdev(between) == pytest.approx(0.25 * burstiness, rel=0.12, abs=1e-9)


def test_all_at_once():
    assert {request.arrival for request in arrivals(request_rate=math.inf)} == {0.0}


def test_lengths_have_their_mean_and_their_variation():
    fixed = arrivals(num_requests=50, input_len=30, output_len=7)
    assert {(len(each.prompt), each.output_len) for each in fixed} == {(30, 7)}
    drawn = [len(each.prompt) for each in arrivals(num_requests=8000, input_len=200, length_cv=1.0)]
    assert statistics.fmean(drawn) == pytest.approx(200, rel=0.08)
    assert statistics.pstdev(drawn) == pytest.approx(200, rel=0.15)


def test_long_tails_are_cut_to_the_context():
    for each in arrivals(100, num_requests=500, input_len=60, output_len=60, length_cv=2.0):
        assert len(each.prompt) >= 1
        assert each.output_len >= 1
        assert len(each.prompt) + each.output_len <= 100


def test_prompts_share_their_prefixes_and_nothing_else():
    requests = arrivals(num_requests=100, prefix_len=20, num_prefixes=3, input_len=5)
    assert {len(each.prompt) for each in requests} == {25}
    assert len({tuple(each.prompt[:20]) for each in requests}) == 3
    assert len({tuple(each.prompt[20:]) for each in requests}) == 100


def test_other_rates_bring_the_same_requests():
    slow = arrivals(num_requests=50, request_rate=1.0, length_cv=1.0, priorities="0:1,3:2")
    fast = arrivals(num_requests=50, request_rate=9.0, length_cv=1.0, priorities="0:1,3:2")
    assert [each.prompt for each in slow] == [each.prompt for each in fast]
    assert [each.priority for each in slow] == [each.priority for each in fast]
    assert {each.priority for each in slow} == {0, 3}
    assert slow[-1].arrival > fast[-1].arrival


def test_a_turn_is_the_same_whenever_it_comes():
    options = SimulateOptions(num_requests=4, turns=2, input_len=9, output_len=5, length_cv=1.0)

    def second(when, *others):
        workload = RandomWorkload(options, 4096)
        first, third = workload.arrivals()
        first.num_output = third.num_output = 2
        for _ in others:
            workload.following(third, 1.0)
        following = workload.following(first, when)
        return following.number, following.prompt, following.output_len, following.arrival - when

    number, prompt, output_len, pause = second(10.0)
    assert number == 1
    assert second(20.0, "another before it") == (number, prompt, output_len, pytest.approx(pause))


def test_turns_follow_answers():
    workload = RandomWorkload(
        SimulateOptions(num_requests=3, turns=3, input_len=4, output_len=2, deadline=9.0), 100
    )
    (first,) = workload.arrivals()
    first.num_output = 2
    second = workload.following(first, 50.0)
    assert second.prompt[:6] == first.prompt + [SAMPLED] * 2
    assert len(second.prompt) == 10
    assert second.arrival > 50.0
    assert second.deadline == second.arrival + 9.0
    second.num_output = 2
    third = workload.following(second, 60.0)
    assert third.turns_left == 0
    assert workload.following(third, 70.0) is None


def test_a_session_ends_where_the_context_is_full():
    options = SimulateOptions(num_requests=9, turns=9, input_len=40, output_len=40)
    workload = RandomWorkload(options, 100, lengths=[(40, 40)])
    (first,) = workload.arrivals()
    first.num_output = 40
    assert workload.following(first, 1.0) is None


def test_real_lengths_stand_in_for_drawn_ones():
    workload = RandomWorkload(SimulateOptions(num_requests=200), 4096, [(3, 7), (5, 9)])
    found = {(len(each.prompt), each.output_len) for each in workload.arrivals()}
    assert found == {(3, 7), (5, 9)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_requests": 0}, "num_requests=0 must be an integer of at least 1"),
        ({"request_rate": 0.0}, "request_rate=0.0 must be more than 0"),
        ({"request_rate": math.nan}, "request_rate=nan"),
        ({"bandwidth": math.inf}, "bandwidth=inf"),
        ({"burstiness": -1.0}, "burstiness=-1.0 must be at least 0"),
        ({"acceptance": 1.5}, "acceptance=1.5 must be from 0 to 1"),
        ({"routing": "prefx"}, "routing='prefx' is not one of: .*prefix"),
        ({"search": "rate"}, "search=rate needs goals"),
        ({"search": "speed"}, "search='speed' is not one of"),
        ({"search": "rate", "goodput": "ttft:1", "trace": "x"}, "cannot be used with a trace"),
        ({"trace": "x", "sharegpt": "y"}, "give one"),
        ({"priorities": "high:1"}, "priorities='high:1' must be"),
        ({"priorities": "0:0"}, "priorities='0:0' must be"),
        ({"goodput": "tft:5"}, "goodput='tft:5' must name limits"),
        ({"percentiles": "200"}, "percentiles='200' must be numbers"),
    ],
)
def test_options_that_make_no_sense(options, words):
    with pytest.raises(ConfigError, match=words):
        SimulateOptions(**options)


def written(tmp_path, *lines):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    return path


def test_a_trace_with_prefixes(tmp_path):
    path = written(
        tmp_path,
        {"time": 7.0, "input_len": 9, "output_len": 2, "prefix": "b", "prefix_len": 4},
        {"time": 5.0, "input_len": 8, "output_len": 3, "prefix": "a", "prefix_len": 4},
        {"time": 6.0, "input_len": 8, "output_len": 1, "prefix": "a", "prefix_len": 4,
         "priority": 2, "deadline": 1.5},
    )  # fmt: skip
    first, second, third = TraceWorkload(read_trace(path)).arrivals()
    assert [each.arrival for each in (first, second, third)] == [0.0, 1.0, 2.0]
    assert [len(each.prompt) for each in (first, second, third)] == [8, 8, 9]
    assert first.prompt[:4] == second.prompt[:4] != third.prompt[:4]
    assert first.prompt[4:] != second.prompt[4:]
    assert (second.priority, second.deadline) == (2, 2.5)


def test_a_trace_of_hashed_blocks(tmp_path):
    path = written(
        tmp_path,
        {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [4, 9]},
        {"timestamp": 2500, "input_length": 1500, "output_length": 5, "hash_ids": [4, 9]},
        {"timestamp": 3000, "input_length": 100, "output_length": 5, "hash_ids": [9]},
    )
    first, second, third = TraceWorkload(read_trace(path)).arrivals()
    assert second.arrival == 2.5
    assert [len(each.prompt) for each in (first, second, third)] == [700, 1500, 100]
    assert first.prompt == second.prompt[:700]
    assert first.prompt[:100] != third.prompt


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"time": 1.0, "input_len": 5}, "line 1: .*output_len"),
        ({"time": 1.0, "input_len": 0, "output_len": 1}, "line 1: .*at least 1"),
        ({"time": 1.0, "input_len": 3, "output_len": 1, "prefix_len": 4}, "prefix_len"),
        ({"time": 1.0, "input_len": 3, "output_len": 1, "color": 4}, "color"),
    ],
)
def test_traces_that_make_no_sense(tmp_path, line, words):
    with pytest.raises(ConfigError, match=words):
        read_trace(written(tmp_path, line))


def test_traces_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none")
    with pytest.raises(ConfigError, match="holds no request"):
        read_trace(written(tmp_path))


def ask():
    return SimulatedRequest(0, 0.0, part(5, 8), 1).to_core()


def test_round_robin():
    router, loads = RoundRobin(), dict.fromkeys(range(3), 0.0)
    assert [router.assign(ask(), loads) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_least_loaded_is_least_loaded():
    draw, router = random.Random(1), LeastLoaded()
    for _ in range(100):
        loads = {number: float(draw.randrange(3)) for number in range(5)}
        assert loads[router.assign(ask(), loads)] == min(loads.values())
