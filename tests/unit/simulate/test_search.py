"""Searches, on borders that are known."""

from __future__ import annotations

import types

import pytest

from helpers.simulated import SimulatedEngine
from tokenmill.errors import ConfigError
from tokenmill.simulate.options import SimulateOptions
from tokenmill.simulate.search import RATE_PRECISION, Search


def search(keeps, share=0.9):
    return Search(lambda value: types.SimpleNamespace(share_good=float(keeps(value))), share)


@pytest.mark.parametrize("border", [0.013, 1.0, 7.3, 480.0])
@pytest.mark.parametrize("start", [0.5, 1.0, 64.0])
def test_the_largest_rate_is_found_from_anywhere(border, start):
    found = search(lambda rate: rate <= border).largest_rate(start)
    assert border / RATE_PRECISION <= found.value <= border
    assert found.keeps


@pytest.mark.parametrize("border", [1, 2, 5, 63, 64, 65])
@pytest.mark.parametrize("start", [1, 16])
def test_the_fewest_workers_are_found_from_anywhere(border, start):
    looking = search(lambda count: count >= border)
    assert looking.fewest_workers(start).value == border
    assert len(looking.trials) == len({trial.value for trial in looking.trials}) < 16


def test_goals_that_nothing_keeps_and_goals_that_all_keep():
    with pytest.raises(ConfigError, match=r"misses the goals, with 0\.0%"):
        search(lambda rate: False).largest_rate(1.0)
    with pytest.raises(ConfigError, match="still keeps the goals"):
        search(lambda rate: True).largest_rate(1.0)
    with pytest.raises(ConfigError, match="misses the goals"):
        search(lambda count: False).fewest_workers(1)


def test_a_rate_that_one_server_bears():
    """One request at a time, a second each: nearly one a second, if it may wait."""

    def run(rate):
        options = SimulateOptions(
            num_requests=300, request_rate=rate, burstiness=0.0, input_len=1, output_len=1
        )
        settings = {"max_num_seqs": 1, "enable_prefix_caching": False}
        return SimulatedEngine(options, goals={"ttft": 1001.0}, **settings).run()

    assert Search(run, 0.99).largest_rate(0.3).value == pytest.approx(1.0, rel=0.03)
