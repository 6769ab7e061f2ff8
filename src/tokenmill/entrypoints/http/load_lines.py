"""A line on load and throughput from time to time, while there is anything to tell."""

from __future__ import annotations

import asyncio
import logging
import time

from tokenmill.contracts.request import SchedulerStats
from tokenmill.engine.engine_stats import EngineStats
from tokenmill.entrypoints.http.state import ServerState

logger = logging.getLogger(__name__)


async def write_load_lines(state: ServerState) -> None:
    """Runs until it is cancelled."""
    interval = state.args.log_stats_interval
    if not interval:
        return
    before = await state.engine.stats()
    counts = _counts(state, before)
    then = time.monotonic()
    while True:
        await asyncio.sleep(interval)
        stats = await state.engine.stats()
        now, new_counts = time.monotonic(), _counts(state, stats)
        if new_counts != counts or stats.num_unfinished:
            prompt, output = (
                (new - old) / (now - then) for new, old in zip(new_counts, counts, strict=True)
            )
            logger.info(
                "running %d, waiting %d; KV cache %.1f%% used; prompts %.1f tok/s, output"
                " %.1f tok/s; prefix cache hits %.1f%%%s",
                stats.num_running,
                stats.num_waiting,
                100 * stats.kv_cache_usage,
                prompt,
                output,
                100 * stats.prefix_cache_hits / max(stats.prefix_cache_queries, 1),
                drafts_line(before, stats),
            )
        counts, then, before = new_counts, now, stats


def drafts_line(before: SchedulerStats, now: SchedulerStats) -> str:
    """What became of the drafts in between; empty if there were none."""
    num_drafts = now.num_drafts - before.num_drafts
    num_tokens = now.num_draft_tokens - before.num_draft_tokens
    if num_drafts <= 0 or num_tokens <= 0:
        return ""
    num_accepted = now.num_accepted_tokens - before.num_accepted_tokens
    return (
        f"; of {num_tokens} drafts {100 * num_accepted / num_tokens:.1f}% held,"
        f" {1 + num_accepted / num_drafts:.2f} tokens a step that had some"
    )


def _counts(state: ServerState, stats: EngineStats) -> tuple[int, int]:
    """Tokens of prompts and of answers so far, of those too that go out in one piece later."""
    return state.metrics.num_prompt_tokens, stats.num_output_tokens
