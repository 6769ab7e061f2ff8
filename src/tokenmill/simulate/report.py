"""What came of a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.observe.spread import Spread, spread
from tokenmill.simulate.recorder import Recorder
from tokenmill.simulate.worker import SimulatedWorker


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """What `tokenmill simulate` says. Times are on the simulation's clock."""

    num_workers: int
    num_completed: int
    num_aborted: int
    """By their deadlines."""
    num_refused: int
    """They fit neither the context nor the KV cache."""
    seconds: float
    """From the first request's coming to the last one's end."""
    num_prompt_tokens: int
    num_output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    ttft: Spread
    """To the first token."""
    tpot: Spread
    """For each token after the first, of each request."""
    itl: Spread
    """Between two pieces of text, over all requests."""
    e2el: Spread
    """Whole requests."""
    queue: Spread
    """From a request's coming to its first step."""
    ttft_of_priority: dict[str, Spread]
    """Where there are several priorities."""
    goodput: float | None
    """Requests a second that kept the goals; None without goals."""
    share_good: float | None
    """Of all requests."""
    prefix_hit_rate: float
    """Share of the prompts' tokens that were found in the cache."""
    num_preemptions: int
    kv_usage_mean: float
    """Share of the blocks in use, over workers and time."""
    kv_usage_peak: float
    """Of the worker that used most."""
    busy: float
    """Share of the time in which a worker makes steps, over all."""
    busiest: float
    """Of the worker that makes most."""
    num_steps: int
    tokens_per_step: float


def report_of(
    recorder: Recorder, workers: Sequence[SimulatedWorker], percents: Sequence[float]
) -> SimulationReport:
    """Figures over all requests that have ended."""
    seconds = recorder.last_end or 1e-9
    num_requests = recorder.num_completed + recorder.num_aborted + recorder.num_refused
    counts = [worker.counts for worker in workers]
    num_blocks = workers[0].scheduler.kv.pool.num_usable_blocks
    num_steps = sum(each.num_steps for each in counts)
    num_tokens = recorder.num_prompt_tokens + recorder.num_output_tokens
    by_priority = recorder.ttft_of if len(recorder.ttft_of) > 1 else {}
    return SimulationReport(
        num_workers=len(workers),
        num_completed=recorder.num_completed,
        num_aborted=recorder.num_aborted,
        num_refused=recorder.num_refused,
        seconds=recorder.last_end,
        num_prompt_tokens=recorder.num_prompt_tokens,
        num_output_tokens=recorder.num_output_tokens,
        requests_per_second=recorder.num_completed / seconds,
        output_tokens_per_second=recorder.num_output_tokens / seconds,
        total_tokens_per_second=num_tokens / seconds,
        ttft=spread(recorder.ttft, percents),
        tpot=spread(recorder.tpot, percents),
        itl=recorder.gaps.spread(percents),
        e2el=spread(recorder.e2el, percents),
        queue=spread(recorder.queue, percents),
        ttft_of_priority={
            str(priority): spread(times, percents)
            for priority, times in sorted(by_priority.items())
        },
        goodput=recorder.num_good / seconds if recorder.goals else None,
        share_good=recorder.num_good / max(num_requests, 1) if recorder.goals else None,
        prefix_hit_rate=recorder.num_cached_tokens / max(recorder.num_prompt_tokens, 1),
        num_preemptions=recorder.num_preemptions,
        kv_usage_mean=sum(each.block_seconds for each in counts)
        / (seconds * num_blocks * len(workers)),
        kv_usage_peak=max(each.most_blocks for each in counts) / num_blocks,
        busy=sum(each.busy_seconds for each in counts) / (seconds * len(workers)),
        busiest=max(each.busy_seconds for each in counts) / seconds,
        num_steps=num_steps,
        tokens_per_step=sum(each.num_tokens for each in counts) / max(num_steps, 1),
    )
