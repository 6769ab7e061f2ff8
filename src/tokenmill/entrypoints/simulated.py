"""From settings to simulations: a model's headers, a machine, and what a step costs there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.engine_config import EngineConfig
from tokenmill.config.machine import Accelerator, Machine
from tokenmill.config.memory import Weights, format_bytes, layer_kv_bytes
from tokenmill.config.quantization import weights_of
from tokenmill.contracts.kv_cache import KVCacheConfig
from tokenmill.engine.build import Progress, find_machine, open_model, settle_config
from tokenmill.entrypoints.bench.load_prompts import answered_lengths
from tokenmill.errors import ConfigError, shown
from tokenmill.simulate.cost import EXPERTS, CostModel, MachineFigures, RooflineCost, WeightSizes
from tokenmill.simulate.fitting import fit, read_step_times
from tokenmill.simulate.model import cache_of, parameters_of
from tokenmill.simulate.options import SimulateOptions
from tokenmill.simulate.recorder import Recorder
from tokenmill.simulate.report import SimulationReport, report_of
from tokenmill.simulate.routing import ROUTERS
from tokenmill.simulate.simulation import Simulation
from tokenmill.simulate.trace import TraceLine, TraceWorkload, read_trace
from tokenmill.simulate.worker import SimulatedWorker
from tokenmill.simulate.workload import Lengths, RandomWorkload, Workload

BYTES_PER_BLOCK = 500
"""Of this process's memory, at most, for a simulated block: 150, and more once it is cached."""
_LARGEST_BUFFER = 1 << 28
"""Bytes that are read to measure how fast: beyond all caches, whatever a model's size."""
_SIMULATED_GPU = (9, 0)
"""Compute capability of a GPU that is not here."""


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """Engines of one kind, ready to be simulated as often as need be."""

    config: EngineConfig
    cache: KVCacheConfig
    cost: CostModel
    trace: list[TraceLine] | None = None
    lengths: Lengths | None = None

    def run(self, options: SimulateOptions) -> SimulationReport:
        """A simulation from the start. Raises `ConfigError` if it is too large for this machine."""
        self._check_memory(options)
        recorder = Recorder(options.goals())
        workers = [
            SimulatedWorker(
                self.config,
                self.cache,
                self.cost,
                recorder,
                acceptance=options.acceptance,
                seed=options.seed + number,
            )
            for number in range(options.num_workers)
        ]
        router = ROUTERS[options.routing](options.num_workers, self.config.cache)
        Simulation(workers, router, self._workload(options), recorder).run()
        return report_of(recorder, workers, options.percents())

    def _workload(self, options: SimulateOptions) -> Workload:
        if self.trace is not None:
            return TraceWorkload(self.trace)
        return RandomWorkload(options, self.config.scheduler.max_model_len, self.lengths)

    def _check_memory(self, options: SimulateOptions) -> None:
        needed = options.num_workers * self.cache.num_blocks * BYTES_PER_BLOCK
        available = find_machine(EngineArgs(device="cpu")).available_memory
        if needed > available:
            raise ConfigError(
                f"num_workers={options.num_workers} with {self.cache.num_blocks} blocks each take"
                f" about {format_bytes(needed)} here, of which {format_bytes(available)} are free."
                f" Raise block_size, which makes as many tokens fewer blocks, or lower num_workers."
            )


def open_cluster(
    args: EngineArgs, options: SimulateOptions, on_progress: Progress
) -> SimulatedCluster:
    """Read what there is to read, and measure what is not given.

    Raises what opening a model raises, and `ConfigError` for what cannot be simulated.
    """
    if options.priorities is not None and args.scheduling_policy != "priority":
        raise ConfigError(
            f"priorities={shown(options.priorities)} change nothing with"
            f" scheduling_policy={shown(args.scheduling_policy)}; set it to 'priority', or leave"
            f" them out."
        )
    checkpoint = open_model(args, on_progress, without_torch=True)
    try:
        config = settle_config(args, checkpoint, _machine(args, options))
        weights = weights_of(
            config, dict(checkpoint.tensor_shapes), dict(checkpoint.tensor_formats)
        )
    finally:
        checkpoint.close()
    return SimulatedCluster(
        config=config,
        cache=cache_of(config),
        cost=_cost(config, weights, options),
        trace=None if options.trace is None else read_trace(Path(options.trace)),
        lengths=None
        if options.sharegpt is None
        else answered_lengths(Path(options.sharegpt), options.chars_per_token),
    )


def _machine(args: EngineArgs, options: SimulateOptions) -> Machine:
    """The machine at hand, with the memory that was given, and with a GPU if one was asked for."""
    if options.memory is None:
        return find_machine(args)
    num_bytes = int(options.memory * 1e9)
    machine = find_machine(replace(args, device="cpu"))
    if args.device == "cuda":
        gpu = Accelerator("a simulated GPU", _SIMULATED_GPU, num_bytes, num_bytes)
        return replace(machine, accelerator=gpu)
    return replace(machine, total_memory=num_bytes, available_memory=num_bytes)


def _cost(config: EngineConfig, weights: Weights, options: SimulateOptions) -> CostModel:
    if options.step_times is not None:
        return fit(read_step_times(Path(options.step_times)))
    parameters, sizes = parameters_of(config), WeightSizes.of(weights)
    return RooflineCost(
        sizes=sizes,
        machine=_figures(config, sizes, options),
        bytes_per_key=layer_kv_bytes(parameters, config.cache.dtype),
        flops_per_score=4 * parameters.num_heads * parameters.head_size,
        chosen_share=_chosen_share(config, weights),
    )


def _figures(config: EngineConfig, sizes: WeightSizes, options: SimulateOptions) -> MachineFigures:
    """What was given; the rest as `tokenmill bench` measures it, here and now."""
    bandwidth = 1e9 * (options.bandwidth or 0.0)
    flops = 1e12 * (options.tflops or 0.0)
    if not bandwidth or not flops:
        from tokenmill.entrypoints.bench.limits import limits_of

        limits = limits_of(config.device, config.model.dtype)
        bandwidth = bandwidth or limits.read_bandwidth(min(sizes.layer_bytes, _LARGEST_BUFFER))
        flops = flops or limits.peak(blocks=sizes.in_blocks).flops
    return MachineFigures(
        bandwidth=bandwidth,
        flops=flops,
        step_seconds=1e-3 * options.step_overhead,
        request_seconds=1e-6 * options.request_overhead,
    )


def _chosen_share(config: EngineConfig, weights: Weights) -> float:
    if not any(EXPERTS in name for name in weights.shapes):
        return 1.0
    from tokenmill.entrypoints.bench.serving import chosen_share

    return chosen_share(weights, config.model.hf_config)
