"""`tokenmill bench`: figures of this machine, each beside its limit."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import App, Group, Parameter

from tokenmill.config.engine_args import EngineArgs
from tokenmill.entrypoints.bench.options import (
    KernelOptions,
    LatencyOptions,
    StartupOptions,
    ThroughputOptions,
)
from tokenmill.entrypoints.cli.flags import (
    ENGINE,
    ENGINE_DEFAULTS,
    NOT_A_FLAG,
    EngineFlags,
    Quiet,
    option_flags,
)
from tokenmill.entrypoints.cli.session import BuildLLM, open_console, open_llm

if TYPE_CHECKING:
    from tokenmill.entrypoints.bench.serving import ServingReport

JSON = Parameter(negative=(), help="One JSON object on stdout in place of the tables.")
PROFILE = Parameter(negative=(), help="Show what the stages of a step take, too.")
Json = Annotated[bool, JSON]
Profile = Annotated[bool, PROFILE]
StepTimes = Annotated[
    Path | None, Parameter(help="A file for the work and the time of each step: JSON lines.")
]
OPTIONS = Parameter(name="*", group=Group("Measurement", sort_key=1))

if TYPE_CHECKING:  # classes that are made at run time are no types to a checker
    LatencyFlags = LatencyOptions
    ThroughputFlags = ThroughputOptions
    KernelFlags = KernelOptions
    StartupFlags = StartupOptions
else:
    LatencyFlags = option_flags(LatencyOptions)
    ThroughputFlags = option_flags(ThroughputOptions)
    KernelFlags = option_flags(KernelOptions)
    StartupFlags = option_flags(StartupOptions)
LATENCY_DEFAULTS = LatencyFlags()
THROUGHPUT_DEFAULTS = ThroughputFlags()
KERNEL_DEFAULTS = KernelFlags()
STARTUP_DEFAULTS = StartupFlags()

NOTES = """
Limits are measured in the same run: reading memory on a buffer of the step's size, and multiplying
with operands near the units. A figure's share of its limit is what the machine's best would take,
divided by what was taken.
"""

app = App(
    name="bench",
    help="Measure this machine: figures beside their limits.",
    help_epilogue=NOTES.replace("\n", " ").strip(),
)
app.command(
    "tokenmill.entrypoints.cli.bench_serve:app",
    name="serve",
    help="Send requests to a server at a rate or in a crowd: latencies, throughput, goodput.",
)


@app.command(usage="Usage: tokenmill bench latency [OPTIONS]")
def latency(
    *,
    options: Annotated[LatencyFlags, OPTIONS] = LATENCY_DEFAULTS,
    profile: Profile = False,
    step_times: StepTimes = None,
    json: Json = False,
    quiet: Quiet = False,
    engine: Annotated[EngineFlags, ENGINE] = ENGINE_DEFAULTS,
    build_llm: Annotated[BuildLLM, NOT_A_FLAG],
) -> int:
    """Time of one batch: its prompts, and each token after them."""
    checked = LatencyOptions(**vars(options))
    with open_llm(engine, build_llm, open_console(), quiet=quiet) as llm:
        from tokenmill.entrypoints.bench.serving import held_weights, measure_latency

        weights = held_weights(_engine_args(engine), llm.llm_engine.config)
        report = measure_latency(llm, weights, checked, profile=profile, step_times=step_times)
        _show_serving("latency", llm.llm_engine.summary, report, json=json)
    return 0


@app.command(usage="Usage: tokenmill bench throughput [OPTIONS]")
def throughput(
    *,
    options: Annotated[ThroughputFlags, OPTIONS] = THROUGHPUT_DEFAULTS,
    profile: Profile = False,
    step_times: StepTimes = None,
    json: Json = False,
    quiet: Quiet = False,
    engine: Annotated[EngineFlags, ENGINE] = ENGINE_DEFAULTS,
    build_llm: Annotated[BuildLLM, NOT_A_FLAG],
) -> int:
    """Tokens per second of many requests that are queued at once."""
    checked = ThroughputOptions(**vars(options))
    with open_llm(engine, build_llm, open_console(), quiet=quiet) as llm:
        from tokenmill.entrypoints.bench.serving import held_weights, measure_throughput

        weights = held_weights(_engine_args(engine), llm.llm_engine.config)
        report = measure_throughput(llm, weights, checked, profile=profile, step_times=step_times)
        _show_serving("throughput", llm.llm_engine.summary, report, json=json)
    return 0


@app.command(usage="Usage: tokenmill bench kernels [OPTIONS]")
def kernels(
    *,
    options: Annotated[KernelFlags, OPTIONS] = KERNEL_DEFAULTS,
    json: Json = False,
    engine: Annotated[EngineFlags, ENGINE] = ENGINE_DEFAULTS,
) -> int:
    """Each kernel by itself, in the shapes of the model: products, attention, the fused ones."""
    checked = KernelOptions(**vars(options))
    open_console()
    from tokenmill.entrypoints.bench.kernels import measure_kernels

    report = measure_kernels(_engine_args(engine), checked)
    if json:
        _print_json({"command": "kernels", **asdict(report)})
    else:
        from tokenmill.entrypoints.cli.bench_tables import show_kernels

        show_kernels(_stdout(), report)
    return 0


@app.command(usage="Usage: tokenmill bench startup [OPTIONS]")
def startup(
    *,
    options: Annotated[StartupFlags, OPTIONS] = STARTUP_DEFAULTS,
    json: Json = False,
    engine: Annotated[EngineFlags, ENGINE] = ENGINE_DEFAULTS,
) -> int:
    """From a new process to its first token, stage by stage, and the memory it takes."""
    checked = StartupOptions(**vars(options))
    open_console()
    from tokenmill.entrypoints.bench.startup import measure_startup

    report = measure_startup(_engine_args(engine), checked)
    if json:
        _print_json({"command": "startup", **asdict(report)})
    else:
        from tokenmill.entrypoints.cli.bench_tables import show_startup

        show_startup(_stdout(), report)
    return 0


def _show_serving(command: str, summary: str, report: ServingReport, *, json: bool) -> None:
    if json:
        _print_json({"command": command, "engine": summary, **asdict(report)})
        return
    from tokenmill.entrypoints.cli.bench_tables import show_serving

    show_serving(_stdout(), report)


def _engine_args(flags: EngineFlags) -> EngineArgs:
    return EngineArgs(**asdict(flags))


def _print_json(figures: dict[str, Any]) -> None:
    print(msgspec.json.encode(figures).decode())


def _stdout() -> Any:
    """Tables are the result, so they go where results go; never cut to a terminal's width."""
    from rich.console import Console

    return Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 120)
