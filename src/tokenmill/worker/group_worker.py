"""The worker of a rank beside others that have parts of the same layers."""

from __future__ import annotations

from tokenmill.contracts.kv_cache import KVCacheConfig
from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.contracts.seams import KVTransfer
from tokenmill.parallel.group import TensorGroup
from tokenmill.worker.model_runner import ModelRunner
from tokenmill.worker.worker import Worker


class GroupWorker(Worker):
    """Runs steps together with other ranks, which are given the same plans.

    Each of them samples, or pools, for itself: with the same logits, seeds and positions they draw
    the same tokens, and nobody has to be told.
    """

    def __init__(
        self,
        runner: ModelRunner,
        kv_cache_config: KVCacheConfig,
        kv_transfer: KVTransfer | None,
        group: TensorGroup,
    ) -> None:
        super().__init__(runner, kv_cache_config, kv_transfer)
        self._group = group
        self._step_id = -1
        self._attempt = 0
        """At this step: one that fails on all ranks is run again request by request."""

    def run_pass(self, plan: SchedulerOutput) -> None:
        self._attempt = self._attempt + 1 if plan.step_id == self._step_id else 0
        self._step_id = plan.step_id
        self._group.begin(plan.step_id, self._attempt)
        super().run_pass(plan)
