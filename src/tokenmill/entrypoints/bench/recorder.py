"""What an engine's steps computed, and how long they took."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from tokenmill.engine.client import InProcessClient
from tokenmill.entrypoints.bench.cost import RequestWork
from tokenmill.errors import ConfigError
from tokenmill.executor.local import LocalExecutor
from tokenmill.kernels import native
from tokenmill.observe.stage_times import StageTime, StageTimes
from tokenmill.worker.graphs.cpu import RecordedForward
from tokenmill.worker.graphs.decode import NativeDecodeSteps

if TYPE_CHECKING:
    from tokenmill.contracts.plan import SchedulerOutput
    from tokenmill.engine.core import EngineCore
    from tokenmill.engine.output_processor import OutputProcessor
    from tokenmill.entrypoints.llm import LLM
    from tokenmill.models.base import CausalLM
    from tokenmill.outputs import RequestOutput
    from tokenmill.worker.model_runner import ModelRunner
    from tokenmill.worker.worker import Worker

CORE_STEP = "step"
"""The stage that contains all others but `output`."""

RUNNER_STAGES = {
    "update_states": "apply plan",
    "_prepare_inputs": "prepare",
    "_build_attention_metadata": "prepare",
    "_forward": "forward",
    "_compute_logits": "logits",
    "_sample": "sample",
    "_count_new_tokens": "commit",
    "_finish": "commit",
    "_commit": "commit",
}
"""Methods of the runner to the names of their stages."""

NATIVE_STAGES = ("forward", "logits", "sample")
"""Of the kernels in the one call of a native step that only decodes; its rest is `prepare`."""

NO_KERNELS = frozenset(
    (
        "active_isa", "allocate_weights", "count_tasks", "detected_isa", "measure_handover",
        "measure_peak", "measure_read_bandwidth", "num_threads", "pack_bf16", "pack_blocks",
        "pack_float32", "packed_bf16_bytes", "packed_blocks_bytes", "packed_float32_bytes",
        "quantized_bytes", "set_active_isa", "set_num_threads",
    )
)  # fmt: skip
"""Functions of the native module that no step computes with."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Where to look inside an engine that runs in this process."""

    core: EngineCore
    worker: Worker
    runner: ModelRunner
    model: CausalLM
    output_processor: OutputProcessor

    @classmethod
    def of(cls, llm: LLM) -> EngineParts:
        engine = llm.llm_engine
        client = engine._client
        if engine.config.data_parallel_size > 1:
            raise ConfigError(
                f"data_parallel_size={engine.config.data_parallel_size} cannot be looked into from"
                f" here; measure one replica, or a server of them with `tokenmill bench serve`."
            )
        num_ranks = engine.config.parallel.world_size
        if num_ranks > 1:
            raise ConfigError(
                f"A model in {num_ranks} processes (tensor_parallel_size, pipeline_parallel_size)"
                f" cannot be looked into from here; measure a server of it with `tokenmill bench"
                f" serve`."
            )
        assert isinstance(client, InProcessClient), "a core elsewhere cannot be looked into"
        executor = client.core._executor
        assert isinstance(executor, LocalExecutor), "a worker elsewhere cannot be looked into"
        worker = executor._running_worker()
        runner = worker.runner
        return cls(client.core, worker, runner, runner._model, engine._output_processor)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of the engine."""

    work: tuple[RequestWork, ...]
    num_sampled: int
    seconds: float
    """From the plan to the outputs."""
    stages: dict[str, StageTime] = field(default_factory=dict)
    """Empty without a profile."""
    kernels: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Calls and seconds of the kernels of a replayed step; empty without a profile."""

    @property
    def num_tokens(self) -> int:
        return sum(each.num_tokens for each in self.work)

    @property
    def is_decode(self) -> bool:
        """Whether every request computed one token, and drafts if it had some, and sampled."""
        checks_all = all(each.num_tokens == each.num_logits for each in self.work)
        return checks_all and self.num_sampled == len(self.work)


class StepRecorder:
    """Steps an engine and keeps a record of each step, inside a `with` block.

    It is the core's journal, which tells it the plans; a profile is measured by `StageTimes`.
    Without `stages` only the step and the time in its kernels are: two clocks, which cost little.
    """

    def __init__(self, llm: LLM, *, profile: bool, stages: bool = True) -> None:
        self.steps: list[StepRecord] = []
        self._engine = llm.llm_engine
        self._parts = EngineParts.of(llm)
        self._profile, self._stages = profile, stages
        forward = self._parts.runner._forward_pass
        timed = profile and stages and isinstance(forward, RecordedForward)
        self._replayed = cast(RecordedForward, forward) if timed else None
        self._times = StageTimes()
        self._num_computed: dict[str, int] = {}
        self._under_way: dict[int, tuple[RequestWork, ...]] = {}
        self._begun: list[tuple[SchedulerOutput, list[int] | None]] = []
        self._drafts = self._engine.config.speculation is not None
        self._settled: SchedulerOutput | None = None

    def __enter__(self) -> StepRecorder:
        self._journal_before = self._parts.core.journal
        self._parts.core.journal = self
        if self._profile:
            watch_step(self._times, self._parts)
        if self._profile and self._stages:
            watch_stages(self._times, self._parts)
        if self._replayed is not None:
            self._replayed.time_kernels(True)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._times.__exit__()
        if self._replayed is not None:
            self._replayed.time_kernels(False)
        self._parts.core.journal = self._journal_before

    def step(self) -> list[RequestOutput]:
        """Step the engine."""
        begin = time.perf_counter()
        outputs = self._engine.step()
        seconds = time.perf_counter() - begin
        for plan, ends in self._begun:
            self._under_way[plan.step_id] = self._work_of(plan, ends)
        self._begun.clear()
        if self._settled is not None:
            plan, self._settled = self._settled, None
            self.steps.append(
                StepRecord(
                    self._under_way.pop(plan.step_id),
                    sum(plan.is_sampled),
                    seconds,
                    stages=self._times.take(),
                    kernels=self._replayed.take_kernel_times() if self._replayed else {},
                )
            )
        return outputs

    def begin(self, plan: SchedulerOutput) -> None:
        """A plan is submitted; what it computes is worked out when the clocks have stopped."""
        ends = None
        if self._drafts:  # those that do not hold are taken back
            requests = self._parts.core.scheduler.requests
            ends = [requests[req_id].num_computed_tokens for req_id in plan.req_ids]
        self._begun.append((plan, ends))

    def end(self, plan: SchedulerOutput) -> None:
        """Its step has settled."""
        self._settled = plan

    def _work_of(self, plan: SchedulerOutput, ends: list[int] | None) -> tuple[RequestWork, ...]:
        """To be asked of the plans in their order; `ends` are the requests' lengths behind them,
        where they do not follow from the plans.
        """
        for request in plan.scheduled_new_reqs:
            self._num_computed[request.req_id] = request.num_computed_tokens
        work = []
        counts = zip(plan.req_ids, plan.num_scheduled_tokens, plan.num_logits, strict=True)
        for index, (req_id, num_tokens, num_logits) in enumerate(counts):
            self._num_computed[req_id] += num_tokens
            if ends is not None:
                self._num_computed[req_id] = ends[index]
            work.append(RequestWork(num_tokens, self._num_computed[req_id], num_logits))
        return tuple(work)


def watch_step(times: StageTimes, parts: EngineParts) -> None:
    """Measure whole steps, and the kernels in them, where they are native."""
    times.watch(parts.core, "step", CORE_STEP)
    steps = parts.runner._decode_steps
    if isinstance(steps, NativeDecodeSteps):
        times.watch_native(
            steps,
            "run",
            "prepare",
            lambda: dict(zip(NATIVE_STAGES, steps.kernel_seconds, strict=True)),
        )
    if native.is_available():
        watch_native_kernels(times)


def watch_stages(times: StageTimes, parts: EngineParts) -> None:
    """Measure the stages of a step, too."""
    times.watch(parts.core.scheduler, "schedule", "schedule")
    for method, stage in RUNNER_STAGES.items():
        times.watch(parts.runner, method, stage)
    if isinstance(parts.runner._decode_steps, NativeDecodeSteps):
        times.watch(parts.runner._decode_steps, "commit", "commit")
    times.watch(parts.core.scheduler, "update_from_output", "settle")
    times.watch(parts.output_processor, "process_outputs", "output")


def watch_native_kernels(times: StageTimes) -> None:
    """Count all calls of the native module, and the replay of recorded steps, as kernel time."""
    module = native.module()
    for name, value in vars(module).items():
        if callable(value) and not isinstance(value, type) and name not in NO_KERNELS:
            times.watch_kernel(module, name)
    times.watch_kernel(module.Program, "replay")
