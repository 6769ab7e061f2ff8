"""What a worker is told of the other ranks of its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.config.parallel import ParallelConfig, RankPlace
from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.models.base import CausalLM
from tokenmill.parallel.group import SOLO, SharedMemoryGroup, TensorGroup
from tokenmill.worker.groups import AttentionGroup
from tokenmill.worker.limits import RunnerLimits
from tokenmill.worker.model_runner import ModelRunner


class OneRank:
    """There are no others."""

    group: TensorGroup = SOLO

    def make_runner(
        self,
        model: CausalLM,
        attention_groups: Sequence[AttentionGroup],
        limits: RunnerLimits,
        **parts: Any,
    ) -> ModelRunner:
        """A runner with these parts."""
        return ModelRunner(model, attention_groups, limits, **parts)


ONE_RANK = OneRank()
_FIRST = ParallelConfig().place(0)


@dataclass(frozen=True, slots=True)
class SeveralRanks(OneRank):
    """A rank, and those that have parts of the same layers."""

    place: RankPlace = _FIRST
    group: TensorGroup = SOLO

    def make_runner(
        self,
        model: CausalLM,
        attention_groups: Sequence[AttentionGroup],
        limits: RunnerLimits,
        **parts: Any,
    ) -> ModelRunner:
        runner = GroupRunner(model, attention_groups, limits, **parts)
        runner.group = self.group
        return runner

    def break_up(self) -> None:
        """Have the others fail that wait for this rank, which has failed."""
        if isinstance(self.group, SharedMemoryGroup):
            self.group.break_up()


class GroupRunner(ModelRunner):
    """Runs steps together with other ranks, which are given the same plans.

    Each of them samples for itself: with the same logits, seeds and positions they draw the same
    tokens, and nobody has to be told.
    """

    group: TensorGroup

    def execute_model(self, plan: SchedulerOutput) -> None:
        self.group.begin()
        super().execute_model(plan)
