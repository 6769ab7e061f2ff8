"""How far simulations are from what an engine does: half of the work is learnt from, half checked.

For each rate, requests come at random times (Poisson) to an engine that is stepped in this process,
once to learn from and once, with other requests, to check. A cost model is fitted to the steps of
the first half (as `tokenmill simulate --step-times` does it). Printed are

    steps      by how much predicted seconds miss those of the second half's steps
    requests   latencies and throughput of the second half, measured and simulated

The simulated engine gets the same requests at the same times. On SmolLM2-135M unless `--model` says
otherwise. `--json` prints one object; `--step-times FILE` keeps the steps that were learnt from.

    python benchmarks/simulate_validation.py --rates 1,3,6 --num-requests 60
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tokenmill import LLM, SamplingParams
from tokenmill.config.engine_config import EngineConfig
from tokenmill.contracts.kv_cache import KVCacheConfig
from tokenmill.contracts.request import FinishReason
from tokenmill.entrypoints.bench.recorder import EngineParts, StepRecord, StepRecorder
from tokenmill.entrypoints.bench.serving import step_times_of
from tokenmill.observe.spread import spread
from tokenmill.sampling_params import RequestOutputKind
from tokenmill.simulate.cost import CostModel
from tokenmill.simulate.fitting import FEATURES, fit, relative_errors, write_step_times
from tokenmill.simulate.options import SimulateOptions
from tokenmill.simulate.recorder import Recorder
from tokenmill.simulate.report import report_of
from tokenmill.simulate.requests import SimulatedRequest
from tokenmill.simulate.routing import RoundRobin
from tokenmill.simulate.simulation import Simulation
from tokenmill.simulate.worker import SimulatedWorker
from tokenmill.simulate.workload import RandomWorkload

PERCENTS = [50, 90, 99]
LATENCIES = ("ttft", "tpot", "itl", "e2el")


@dataclass(slots=True)
class Listed:
    """A workload that is known."""

    requests: list[SimulatedRequest]

    def arrivals(self):
        return iter(self.requests)

    def following(self, request: SimulatedRequest, now: float) -> None:
        """None depends on another."""


@dataclass(frozen=True, slots=True)
class Run:
    """What an engine did with a load."""

    recorder: Recorder
    steps: list[StepRecord] = field(default_factory=list)


def make_load(options: argparse.Namespace, rate: float, seed: int, config: EngineConfig):
    """Requests with ids that the model has."""
    chosen = SimulateOptions(
        num_requests=options.num_requests,
        request_rate=rate,
        input_len=options.input_len,
        output_len=options.output_len,
        length_cv=options.length_cv,
        seed=seed,
    )
    draw = random.Random(seed)
    requests = list(RandomWorkload(chosen, config.scheduler.max_model_len).arrivals())
    for request in requests:
        request.prompt = [draw.randrange(config.model.vocab_size) for _ in request.prompt]
    return requests


def fresh(requests: Sequence[SimulatedRequest]) -> list[SimulatedRequest]:
    """The same requests, to be sent once more."""
    return [
        SimulatedRequest(each.number, each.arrival, each.prompt, each.output_len)
        for each in requests
    ]


def run_engine(llm: LLM, requests: list[SimulatedRequest]) -> Run:
    """Requests come between steps, when their time has come."""
    llm.reset_prefix_cache()
    engine, recorder = llm.llm_engine, Recorder()
    waiting, live = fresh(requests), {}
    with StepRecorder(llm, profile=False) as steps:
        begin = time.perf_counter()
        while waiting or live:
            now = time.perf_counter() - begin
            while waiting and waiting[0].arrival <= now:
                request = waiting.pop(0)
                live[request.request_id] = request
                params = SamplingParams(
                    temperature=0.0,
                    max_tokens=request.output_len,
                    ignore_eos=True,
                    output_kind=RequestOutputKind.DELTA,
                )
                prompt = {"prompt_token_ids": request.prompt}
                engine.add_request(request.request_id, prompt, params)
            if not live:
                time.sleep(min(waiting[0].arrival - now, 0.001))
                continue
            outputs = steps.step()
            now = time.perf_counter() - begin
            for output in outputs:
                request = live[output.request_id]
                (sequence,) = output.outputs
                if sequence.token_ids:
                    recorder.add(request, len(sequence.token_ids), now)
                if output.finished:
                    request.finish_reason = FinishReason.LENGTH
                    recorder.end(live.pop(output.request_id), now)
    return Run(recorder, steps.steps)


def simulate(
    config: EngineConfig, cache: KVCacheConfig, cost: CostModel, requests: list[SimulatedRequest]
) -> dict[str, Any]:
    """Figures of the same requests in a simulation."""
    recorder = Recorder()
    worker = SimulatedWorker(config, cache, cost, recorder)
    Simulation([worker], RoundRobin(), Listed(fresh(requests)), recorder).run()
    return asdict(report_of(recorder, [worker], PERCENTS))


def figures_of(run: Run) -> dict[str, Any]:
    """The same figures as measured."""
    recorder = run.recorder
    return {
        "output_tokens_per_second": recorder.num_output_tokens / recorder.last_end,
        "ttft": asdict(spread(recorder.ttft, PERCENTS)),
        "tpot": asdict(spread(recorder.tpot, PERCENTS)),
        "itl": asdict(recorder.gaps.spread(PERCENTS)),
        "e2el": asdict(spread(recorder.e2el, PERCENTS)),
    }


def validate(options: argparse.Namespace, llm: LLM) -> dict[str, Any]:
    """Learn, check, and compare."""
    config, cache = llm.llm_engine.config, EngineParts.of(llm).worker.kv_cache_config
    rates = [float(rate) for rate in options.rates.split(",")]
    run_engine(llm, make_load(options, rates[-1], 99, config))  # to warm up
    learnt = [run_engine(llm, make_load(options, rate, 1, config)) for rate in rates]
    steps = [step for run in learnt for step in run.steps]
    times = step_times_of(llm, steps)
    if options.step_times is not None:
        write_step_times(options.step_times, times)
    cost = fit(times)
    checks, checked_times = [], []
    for rate in rates:
        requests = make_load(options, rate, 2, config)
        run = run_engine(llm, requests)
        checked_times += step_times_of(llm, run.steps)
        simulated = simulate(config, cache, cost, requests)
        measured = figures_of(run)
        checks.append(
            {
                "rate": rate,
                "measured": measured,
                "simulated": {name: simulated[name] for name in measured},
            }
        )
    errors = relative_errors(cost, checked_times)
    measured_seconds = sum(step.seconds for step in checked_times)
    return {
        "model": config.model.name,
        "costs": dict(zip(FEATURES, cost.costs, strict=True)),
        "num_steps_learnt": len(times),
        "steps": {
            "num_steps": len(errors),
            "median_error": statistics.median(map(abs, errors)),
            "p90_error": sorted(map(abs, errors))[int(0.9 * (len(errors) - 1))],
            "total_error": sum(map(cost.seconds, checked_times)) / measured_seconds - 1.0,
        },
        "requests": checks,
    }


def show(found: dict[str, Any]) -> None:
    """A table for each rate."""
    steps = found["steps"]
    print(
        f"{found['model']}: fitted to {found['num_steps_learnt']} steps; of {steps['num_steps']}"
        f" others the time is missed by {steps['median_error']:.1%} (median), by"
        f" {steps['p90_error']:.1%} (nine of ten less), and in all by {steps['total_error']:+.1%}"
    )
    for check in found["requests"]:
        measured, simulated = check["measured"], check["simulated"]
        tokens = "output_tokens_per_second"
        print(f"\n{check['rate']:g} requests/s      measured   simulated     error")
        rows = [("tokens/s", measured[tokens], simulated[tokens])]
        for name in LATENCIES:
            rows.append((f"{name} mean, ms", measured[name]["mean"], simulated[name]["mean"]))
            for percent, value in measured[name]["percentiles"].items():
                rows.append(
                    (f"{name} {percent}, ms", value, simulated[name]["percentiles"][percent])
                )
        for name, one, other in rows:
            error = f"{other / one - 1:+9.1%}" if one else "        -"
            print(f"{name:<16}{one:12,.2f}{other:12,.2f} {error}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--rates", default="1,3,6", help="requests a second, with commas")
    parser.add_argument("--num-requests", type=int, default=60, help="of each run")
    parser.add_argument("--input-len", type=int, default=200)
    parser.add_argument("--output-len", type=int, default=100)
    parser.add_argument("--length-cv", type=float, default=0.8)
    parser.add_argument("--step-times", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engine", type=json.loads, default={}, help="settings, a JSON object")
    options = parser.parse_args(arguments)
    model = {} if options.model is None else {"model": options.model}
    with LLM(**model, **options.engine) as llm:
        found = validate(options, llm)
    if options.json:
        json.dump(found, sys.stdout)
        print()
    else:
        show(found)


if __name__ == "__main__":
    main()
