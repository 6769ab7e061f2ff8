"""Small simulations: an engine's settings without a model, and a run of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from helpers.core import create_kv_cache_config
from helpers.fake_engine import engine_config
from tokenmill.simulate.cost import CostModel
from tokenmill.simulate.options import SimulateOptions
from tokenmill.simulate.recorder import Recorder
from tokenmill.simulate.report import SimulationReport, report_of
from tokenmill.simulate.requests import SimulatedRequest
from tokenmill.simulate.routing import ROUTERS
from tokenmill.simulate.simulation import Simulation
from tokenmill.simulate.work import StepWork
from tokenmill.simulate.worker import SimulatedWorker
from tokenmill.simulate.workload import RandomWorkload, Workload


@dataclass(frozen=True)
class FixedCost:
    """Every step takes the same."""

    step_seconds: float

    def seconds(self, work: StepWork) -> float:
        return self.step_seconds


class Listed:
    """A workload of given requests."""

    def __init__(self, *requests: SimulatedRequest) -> None:
        self.requests = requests

    def arrivals(self):
        return iter(self.requests)

    def following(self, request, now):
        return None


class SimulatedEngine:
    """One simulation and its parts."""

    def __init__(
        self,
        workload: Workload | SimulateOptions,
        *,
        num_workers: int = 1,
        routing: str = "round_robin",
        cost: CostModel = FixedCost(1.0),
        num_blocks: int = 1000,
        block_size: int = 4,
        windows: tuple[int | None, ...] = (None,),
        enable_prefix_caching: bool = True,
        skips_steps: bool = True,
        acceptance: float = 0.0,
        goals: dict[str, float] | None = None,
        **settings: Any,
    ) -> None:
        args = {
            "scheduling_policy": "fcfs",
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_model_len": 512,
            "async_scheduling": False,
        }
        config = engine_config(**(args | settings))
        cache = replace(
            config.cache,
            num_blocks=num_blocks,
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
        )
        # Chunks are cut by these alone, so that plans can be counted by hand.
        scheduler = replace(config.scheduler, attention_cost=0.0, shared_tokens=0)
        self.config = replace(config, cache=cache, scheduler=scheduler)
        if isinstance(workload, SimulateOptions):
            workload = RandomWorkload(workload, config.scheduler.max_model_len)
        self.recorder = Recorder(goals or {})
        kv_cache = create_kv_cache_config(num_blocks, block_size, windows=windows)
        self.workers = [
            SimulatedWorker(
                self.config,
                kv_cache,
                cost,
                self.recorder,
                acceptance=acceptance,
                seed=number,
                skips_steps=skips_steps,
            )
            for number in range(num_workers)
        ]
        router = ROUTERS[routing](num_workers, self.config.cache)
        self._simulation = Simulation(self.workers, router, workload, self.recorder)

    def run(self) -> SimulationReport:
        self._simulation.run()
        for worker in self.workers:
            assert not worker.live
            assert not worker.scheduler.requests
            assert worker.scheduler.kv.audit() == []
            assert worker.scheduler.kv.pool.num_used_blocks == 0
        return report_of(self.recorder, self.workers, [50, 90, 99])
