"""The workers of a core, with a model that is loaded: one in this process, or ranks in processes of
their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenmill.checkpoint.checkpoint import Checkpoint
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.engine_config import EngineConfig
from tokenmill.contracts.kv_cache import KVCacheConfig
from tokenmill.contracts.operations import ModelMemory
from tokenmill.contracts.seams import Executor, KVTransfer


@dataclass(frozen=True, slots=True)
class Workers:
    """A model that is loaded."""

    executor: Executor
    kv_cache_config: KVCacheConfig
    kv_transfer: KVTransfer | None = None
    memory: ModelMemory | None = None
    """None stays as it is."""


def start_workers(
    args: EngineArgs,
    config: EngineConfig,
    checkpoint: Checkpoint,
    on_progress: Callable[[int, int], None],
    on_death: Callable[[], None] | None = None,
) -> Workers:
    """Load the model. In this process, torch is imported for that; several ranks open the files
    that `args` name themselves. `on_death` is called where one of them dies between steps.
    """
    if config.parallel.world_size > 1:
        from tokenmill.executor.multiproc import MultiprocExecutor

        places = None
        if args.distributed_executor_backend == "ray":
            from tokenmill.executor.ray import RayRanks

            places = RayRanks(args, config)
        ranks = MultiprocExecutor(args, config, on_progress, on_death=on_death, places=places)
        return Workers(ranks, ranks.kv_cache_config)
    from tokenmill.executor.local import local_executor
    from tokenmill.worker.build import build_worker

    worker = build_worker(config, checkpoint, on_progress)
    background = config.scheduler.max_steps_in_flight > 1 and config.device == "cpu"
    executor = local_executor(worker, background=background)
    memory = None
    if config.device == "cpu":
        from tokenmill.worker.memory import WorkerMemory

        keeps = config.enable_sleep_mode
        memory = WorkerMemory(worker.runner, config, checkpoint, keeps_checkpoint=keeps)
    return Workers(executor, worker.kv_cache_config, worker.kv_transfer, memory)
