"""Stage times of many steps, as one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tokenmill.entrypoints.bench.recorder import CORE_STEP, StepRecord
from tokenmill.observe.stage_times import StageTime

STAGES = (
    "schedule", "apply plan", "prepare", "forward", "logits", "sample", "commit", "settle",
)  # fmt: skip
"""The parts of a step, in their order."""


@dataclass(frozen=True, slots=True)
class StageReport:
    """One stage over many steps; medians, in milliseconds."""

    stage: str
    milliseconds: float
    kernel_milliseconds: float
    """Of these, inside kernels; 0 where they are not ours."""
    host_milliseconds: float
    """The rest."""


@dataclass(frozen=True, slots=True)
class KernelShare:
    """What one kernel takes of a replayed step, on average over many steps."""

    kernel: str
    """With the shape of its weight, [columns x depth]."""
    num_calls: int
    """Of one step."""
    milliseconds: float
    share: float
    """Of the time in the step's kernels."""


def kernels_of(steps: Sequence[StepRecord]) -> list[KernelShare]:
    """The kernels of the steps that were replayed, the longest first."""
    steps = [step for step in steps if step.kernels]
    if not steps:
        return []
    seconds = {
        label: sum(step.kernels[label][1] for step in steps) / len(steps)
        for label in steps[0].kernels
    }
    whole = sum(seconds.values())
    return [
        KernelShare(label, steps[0].kernels[label][0], 1e3 * mine, mine / whole)
        for label, mine in sorted(seconds.items(), key=lambda each: -each[1])
    ]


def profile_of(steps: Sequence[StepRecord]) -> list[StageReport]:
    """The stages, what is between them, the whole step of the core, and output processing.

    With steps in flight stages overlap, and the rest may be negative.
    """
    parts = [_report(stage, [_of(step, stage) for step in steps]) for stage in STAGES]
    rest = _report("between", [_between(step) for step in steps])
    whole = [
        _report(stage, [_of(step, stage) for step in steps]) for stage in (CORE_STEP, "output")
    ]
    return [*parts, rest, *whole]


def _of(step: StepRecord, stage: str) -> StageTime:
    return step.stages.get(stage, StageTime())


def _between(step: StepRecord) -> StageTime:
    """What no stage accounts for."""
    parts = [_of(step, stage) for stage in STAGES]
    whole = _of(step, CORE_STEP)
    return StageTime(
        whole.seconds - sum(part.seconds for part in parts),
        whole.kernel_seconds - sum(part.kernel_seconds for part in parts),
    )


def _report(stage: str, times: Sequence[StageTime]) -> StageReport:
    return StageReport(
        stage,
        1e3 * median(each.seconds for each in times),
        1e3 * median(each.kernel_seconds for each in times),
        1e3 * median(each.seconds - each.kernel_seconds for each in times),
    )
