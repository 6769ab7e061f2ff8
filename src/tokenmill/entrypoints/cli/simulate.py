"""`tokenmill simulate`: what a number of engines would do with a load, without running a model."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import App, Group, Parameter

from tokenmill.config.engine_args import EngineArgs
from tokenmill.entrypoints.cli.flags import (
    ENGINE,
    ENGINE_DEFAULTS,
    EngineFlags,
    Quiet,
    option_flags,
)
from tokenmill.entrypoints.cli.progress import loading_progress
from tokenmill.entrypoints.cli.session import open_console
from tokenmill.simulate.options import SimulateOptions

if TYPE_CHECKING:
    from tokenmill.simulate.report import SimulationReport
    from tokenmill.simulate.search import Search, Trial

JSON = Parameter(negative=(), help="One JSON object on stdout in place of the tables.")
LOAD = Parameter(name="*", group=Group("Load, workers and goals", sort_key=1))

if TYPE_CHECKING:  # a class that is made at run time is no type to a checker
    SimulateFlags = SimulateOptions
else:
    SimulateFlags = option_flags(SimulateOptions)
SIMULATE_DEFAULTS = SimulateFlags()

NOTES = """
The scheduler and the KV cache are the real ones; only the time of a step is a model. Without
figures of a machine or step times, this machine's limits are measured, and a step takes what they
allow, which no engine quite reaches.
"""

app = App(
    name="simulate",
    usage="Usage: tokenmill simulate [OPTIONS]",
    help_epilogue=NOTES.replace("\n", " ").strip(),
)


@app.default
def simulate(
    *,
    load: Annotated[SimulateFlags, LOAD] = SIMULATE_DEFAULTS,
    json: Annotated[bool, JSON] = False,
    quiet: Quiet = False,
    engine: Annotated[EngineFlags, ENGINE] = ENGINE_DEFAULTS,
) -> int:
    """Say what engines would do with a load: latencies, throughput, KV cache, goodput."""
    options = SimulateOptions(**vars(load))
    from tokenmill.entrypoints.simulated import open_cluster
    from tokenmill.simulate.search import Search

    with loading_progress(open_console(), shown=not quiet) as on_progress:
        cluster = open_cluster(EngineArgs(**asdict(engine)), options, on_progress)
    begin = time.perf_counter()
    search, chosen = None, options
    if options.search is None:
        report = cluster.run(options)
    else:
        field = {"rate": "request_rate", "workers": "num_workers"}[options.search]
        kind = {"rate": float, "workers": int}[options.search]
        search = Search(
            lambda value: cluster.run(replace(options, **{field: kind(value)})), options.goal_share
        )
        best = _search(search, options)
        report, chosen = best.report, replace(options, **{field: kind(best.value)})
    seconds = time.perf_counter() - begin
    if json:
        _print_json(chosen, report, search)
    else:
        _show(cluster.config.model.name, chosen, report, search)
        print(f"simulated in {seconds:.1f} s", file=sys.stderr)
    return 0


def _search(search: Search, options: SimulateOptions) -> Trial:
    if options.search == "workers":
        return search.fewest_workers(options.num_workers)
    finite = options.request_rate < float("inf")
    return search.largest_rate(options.request_rate if finite else 1.0)


def _print_json(options: SimulateOptions, report: SimulationReport, search: Search | None) -> None:
    plain = {name: str(v) if v == float("inf") else v for name, v in asdict(options).items()}
    figures = {"command": "simulate", "options": plain, **asdict(report)}
    if search is not None:
        figures["trials"] = [
            {"value": each.value, "keeps": each.keeps, "share_good": each.report.share_good}
            for each in search.trials
        ]
    print(msgspec.json.encode(figures).decode())


def _show(
    model: str, options: SimulateOptions, report: SimulationReport, search: Search | None
) -> None:
    from rich.console import Console

    from tokenmill.entrypoints.cli.simulate_tables import show_report, show_search

    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 120)
    if search is not None:
        show_search(console, options, search)
    show_report(console, model, options, report)
