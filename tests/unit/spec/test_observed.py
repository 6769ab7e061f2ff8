"""Counts of drafts on their way to whoever looks at them."""

from __future__ import annotations

import msgspec

from tokenmill.contracts.request import SchedulerStats
from tokenmill.engine.engine_stats import EngineStats, StatsKeeper
from tokenmill.entrypoints.http.load_lines import drafts_line


def test_counts_go_on_where_the_core_before_stopped() -> None:
    keeper = StatsKeeper()
    keeper.update(SchedulerStats(num_drafts=4, num_accepted_tokens_per_pos=[3, 1]))
    keeper.core_ended()
    keeper.update(SchedulerStats(num_drafts=2, num_accepted_tokens_per_pos=[1, 1]))
    stats = keeper.snapshot(num_unfinished=0)
    assert (stats.num_drafts, stats.num_accepted_tokens_per_pos) == (6, [4, 2])
    assert stats.num_accepted_tokens == 6


def test_a_core_that_has_told_nothing_yet() -> None:
    keeper = StatsKeeper()
    keeper.update(SchedulerStats(num_accepted_tokens_per_pos=[3, 1]))
    keeper.core_ended()
    assert keeper.snapshot(num_unfinished=0).num_accepted_tokens_per_pos == [3, 1]


def test_they_travel() -> None:
    stats = SchedulerStats(num_drafts=4, num_draft_tokens=9, num_accepted_tokens_per_pos=[3, 1])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=SchedulerStats) == stats


def test_the_line_is_of_the_time_between() -> None:
    before = EngineStats(num_drafts=10, num_draft_tokens=40, num_accepted_tokens_per_pos=[9, 1])
    now = EngineStats(num_drafts=14, num_draft_tokens=56, num_accepted_tokens_per_pos=[12, 7])
    line = drafts_line(before, now)
    assert line == "; of 16 drafts 56.2% held, 3.25 tokens a step that had some"
    assert drafts_line(now, now) == ""
