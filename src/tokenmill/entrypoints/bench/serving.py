"""Requests through an engine: how long their prompts and their tokens take, beside the limits."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, median_low
from typing import TYPE_CHECKING, Any, TypeVar

from tokenmill.config.memory import Weights
from tokenmill.config.quantization import weights_of
from tokenmill.contracts.kv_cache import KVCacheConfig, KVCacheSpec
from tokenmill.engine.build import open_model
from tokenmill.entrypoints.bench.cost import Cost, ModelCost, model_cost
from tokenmill.entrypoints.bench.limits import Limits, Peak, limits_of
from tokenmill.entrypoints.bench.options import LatencyOptions, ThroughputOptions
from tokenmill.entrypoints.bench.profile import KernelShare, StageReport, kernels_of, profile_of
from tokenmill.entrypoints.bench.recorder import CORE_STEP, EngineParts, StepRecord, StepRecorder
from tokenmill.models.mixtral import expert_counts
from tokenmill.sampling_params import RequestOutputKind, SamplingParams
from tokenmill.simulate.cost import EXPERTS
from tokenmill.simulate.fitting import write_step_times
from tokenmill.simulate.work import StepTime, WorkCounter

if TYPE_CHECKING:
    from tokenmill.config.engine_args import EngineArgs
    from tokenmill.config.engine_config import EngineConfig
    from tokenmill.contracts.request import SchedulerStats
    from tokenmill.entrypoints.llm import LLM


_Report = TypeVar("_Report")


@dataclass(frozen=True, slots=True)
class DraftReport:
    """What became of drafts."""

    num_draft_tokens: int
    """Checked."""
    share_held: float
    mean_accepted_length: float
    """Tokens that a request has brought in a step that checked drafts of it."""

    @classmethod
    def between(cls, before: SchedulerStats, after: SchedulerStats) -> DraftReport | None:
        """None if there were no drafts."""
        num_steps = after.num_drafts - before.num_drafts
        num_tokens = after.num_draft_tokens - before.num_draft_tokens
        num_held = after.num_accepted_tokens - before.num_accepted_tokens
        if not num_steps:
            return None
        return cls(num_tokens, num_held / num_tokens, 1 + num_held / num_steps)


@dataclass(frozen=True, slots=True)
class Run:
    """Requests that were queued at once, until the last was done."""

    num_requests: int
    num_output_tokens: int
    seconds: float
    steps: list[StepRecord]
    drafts: DraftReport | None = None


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """Steps of one kind: those with prompt tokens among them, or those that only decode."""

    phase: str
    """`prompts` or `decode`."""
    num_steps: int
    num_tokens: int
    """Computed in these steps."""
    seconds: float
    tokens_per_second: float
    step_milliseconds: float
    """Median."""
    step_milliseconds_p99: float
    num_bytes: float
    """Weights, keys and values that have to be read, of all steps."""
    flops: float
    read_bandwidth: float
    """Bytes per second, measured on a buffer of a step's size."""
    limit_seconds: float
    """The longer of reading and computing, step by step, at the machine's best."""
    bound_by: str
    """`memory` or `compute`: what most of the limit comes from."""
    share_of_limit: float
    """1 would be as fast as the machine allows."""


@dataclass(frozen=True, slots=True)
class ServingReport:
    """What `tokenmill bench latency` and `throughput` say; a run of the median length."""

    num_requests: int
    input_len: int
    output_len: int
    peak: Peak
    handover_seconds: float | None
    """A cache line's way from one thread to another; None if it was not measured."""
    phases: list[PhaseReport]
    seconds: float
    """Of the whole call."""
    all_seconds: list[float]
    """Of each run."""
    requests_per_second: float
    output_tokens_per_second: float
    profile: dict[str, list[StageReport]]
    """By phase; empty if none was asked for."""
    kernels: dict[str, list[KernelShare]]
    """Likewise; empty as well where steps are not replayed by the native kernels."""
    host_milliseconds: dict[str, float]
    """By phase, of a step outside of its kernels, median of a run without the clocks of the
    stages; empty without a profile, and where the kernels are not native."""
    drafts: DraftReport | None
    """None if there were none."""


def measure_latency(
    llm: LLM,
    weights: Weights,
    options: LatencyOptions,
    *,
    profile: bool,
    step_times: Path | None = None,
) -> ServingReport:
    """One batch, again and again; the steps that count are written to a file `step_times`.

    Raises `InvalidRequestError` if it does not fit the context.
    """
    counts = [options.batch_size] * options.num_iters_warmup
    count = options.batch_size
    return _measure(llm, weights, counts, count, options, profile=profile, step_times=step_times)


def measure_throughput(
    llm: LLM,
    weights: Weights,
    options: ThroughputOptions,
    *,
    profile: bool,
    step_times: Path | None = None,
) -> ServingReport:
    """Many requests; otherwise likewise."""
    counts = [max(options.num_prompts // 8, 1)] * options.num_iters_warmup
    count = options.num_prompts
    return _measure(llm, weights, counts, count, options, profile=profile, step_times=step_times)


def _measure(
    llm: LLM,
    weights: Weights,
    warmup_counts: list[int],
    count: int,
    options: LatencyOptions | ThroughputOptions,
    *,
    profile: bool,
    step_times: Path | None,
) -> ServingReport:
    for warmup_count in warmup_counts:
        run_requests(llm, warmup_count, options.input_len, options.output_len)
    runs = [
        run_requests(llm, count, options.input_len, options.output_len, profile=profile)
        for _ in range(options.num_iters)
    ]
    if step_times is not None:
        steps = [step for run in runs for step in run.steps]
        write_step_times(step_times, step_times_of(llm, steps))
    config = llm.llm_engine.config
    cost, limits = cost_of(llm, weights), limits_of(config.device, config.model.dtype)
    peak = limits.peak(blocks=cost.in_blocks)
    seconds = median_low(run.seconds for run in runs)
    chosen = next(run for run in runs if run.seconds == seconds)
    return ServingReport(
        num_requests=count,
        input_len=options.input_len,
        output_len=options.output_len,
        peak=peak,
        handover_seconds=limits.handover(),
        phases=[
            _phase_report(phase, steps, cost, limits, peak)
            for phase, steps in phases_of(chosen.steps).items()
        ],
        seconds=seconds,
        all_seconds=[run.seconds for run in runs],
        requests_per_second=count / seconds,
        output_tokens_per_second=chosen.num_output_tokens / seconds,
        profile=_by_phase(runs, profile_of) if profile else {},
        kernels=_by_phase(runs, kernels_of) if profile else {},
        host_milliseconds=_host_milliseconds(llm, count, options) if profile else {},
        drafts=chosen.drafts,
    )


def _host_milliseconds(
    llm: LLM, count: int, options: LatencyOptions | ThroughputOptions
) -> dict[str, float]:
    run = run_requests(
        llm, count, options.input_len, options.output_len, profile=True, stages=False
    )
    in_step = {
        phase: [step.stages[CORE_STEP] for step in steps]
        for phase, steps in phases_of(run.steps).items()
    }
    return {
        phase: 1e3 * median(each.seconds - each.kernel_seconds for each in times)
        for phase, times in in_step.items()
        if any(each.kernel_seconds for each in times)
    }


def run_requests(
    llm: LLM,
    count: int,
    input_len: int,
    output_len: int,
    *,
    profile: bool = False,
    stages: bool = True,
) -> Run:
    """Queue `count` requests with random prompts, and step until all are done.

    `stages` is whether a profile is of all stages, or of whole steps.
    """
    engine = llm.llm_engine
    llm.reset_prefix_cache()
    params = SamplingParams(
        temperature=0,
        max_tokens=output_len,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    prompts = random_prompts(count, input_len, engine.config.model.vocab_size)
    request_ids = [f"bench-{number}" for number in range(count)]
    num_output_tokens = 0
    scheduler = EngineParts.of(llm).core.scheduler
    before = scheduler.make_stats()
    with StepRecorder(llm, profile=profile, stages=stages) as recorder:
        begin = time.perf_counter()
        try:
            for request_id, prompt in zip(request_ids, prompts, strict=True):
                engine.add_request(request_id, prompt, params)
            while engine.has_unfinished_requests():
                for output in recorder.step():
                    num_output_tokens += sum(len(each.token_ids) for each in output.outputs)
        finally:
            engine.abort_request(request_ids)
        seconds = time.perf_counter() - begin
    drafts = DraftReport.between(before, scheduler.make_stats())
    return Run(count, num_output_tokens, seconds, recorder.steps, drafts)


def random_prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Token ids, the same for the same arguments."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def step_times_of(llm: LLM, steps: Sequence[StepRecord]) -> list[StepTime]:
    """What `tokenmill simulate` learns from."""
    counter = WorkCounter(EngineParts.of(llm).worker.kv_cache_config)
    times = []
    for step in steps:
        counts = [counter.of_request(work.num_tokens, work.seq_len) for work in step.work]
        times.append(
            StepTime(
                num_requests=len(step.work),
                num_tokens=step.num_tokens,
                num_logits=sum(work.num_logits for work in step.work),
                num_keys=sum(num_keys for num_keys, _ in counts),
                num_scores=sum(num_scores for _, num_scores in counts),
                seconds=step.seconds,
            )
        )
    return times


def phases_of(steps: Sequence[StepRecord]) -> dict[str, list[StepRecord]]:
    """The steps with prompt tokens, and those without; only kinds that there are."""
    parts = {
        "prompts": [step for step in steps if not step.is_decode],
        "decode": [step for step in steps if step.is_decode],
    }
    return {phase: part for phase, part in parts.items() if part}


def cost_of(llm: LLM, weights: Weights) -> ModelCost:
    """What the steps of this engine cost at least."""
    parts = EngineParts.of(llm)
    return model_cost(
        weights,
        parts.model.attention_layers(),
        kv_bytes_per_token(parts.worker.kv_cache_config),
        chosen_share(weights, llm.llm_engine.config.model.hf_config),
    )


def chosen_share(weights: Weights, hf_config: Mapping[str, Any]) -> float:
    """The share of a layer's experts that a token chooses; 1 where there are none."""
    if not any(EXPERTS in name for name in weights.shapes):
        return 1.0
    counts = expert_counts(hf_config)
    return float(counts["num_experts_per_tok"]) / float(counts["num_experts"])


def held_weights(args: EngineArgs, config: EngineConfig) -> Weights:
    """The model's tensors and how an engine of these settings holds them, from the file headers."""
    checkpoint = open_model(args, lambda stage, done, total: None)
    try:
        return weights_of(config, dict(checkpoint.tensor_shapes), dict(checkpoint.tensor_formats))
    finally:
        checkpoint.close()


def kv_bytes_per_token(cache: KVCacheConfig) -> dict[str, int]:
    """Layer name to bytes of one token's K and V."""
    return {
        name: group.spec.bytes_per_token
        for group in cache.groups
        if isinstance(group.spec, KVCacheSpec)
        for name in group.layer_names
    }


def _phase_report(
    phase: str, steps: Sequence[StepRecord], cost: ModelCost, limits: Limits, peak: Peak
) -> PhaseReport:
    costs = [cost.of(step.work) for step in steps]
    total = sum(costs, Cost())
    bandwidth = limits.read_bandwidth(int(total.num_bytes / len(steps)))
    reading = [each.num_bytes / bandwidth for each in costs]
    computing = [each.flops / peak.flops for each in costs]
    limit = sum(map(max, reading, computing))
    seconds = sum(step.seconds for step in steps)
    num_tokens = sum(step.num_tokens for step in steps)
    in_order = sorted(step.seconds for step in steps)
    return PhaseReport(
        phase=phase,
        num_steps=len(steps),
        num_tokens=num_tokens,
        seconds=seconds,
        tokens_per_second=num_tokens / seconds,
        step_milliseconds=1e3 * median(in_order),
        step_milliseconds_p99=1e3 * in_order[int(0.99 * len(in_order))],
        num_bytes=total.num_bytes,
        flops=total.flops,
        read_bandwidth=bandwidth,
        limit_seconds=limit,
        bound_by="memory" if sum(reading) >= sum(computing) else "compute",
        share_of_limit=limit / seconds,
    )


def _by_phase(
    runs: Sequence[Run], report: Callable[[Sequence[StepRecord]], list[_Report]]
) -> dict[str, list[_Report]]:
    by_phase = phases_of([step for run in runs for step in run.steps])
    reports = {phase: report(steps) for phase, steps in by_phase.items()}
    return {phase: lines for phase, lines in reports.items() if lines}
