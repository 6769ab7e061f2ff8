"""`tokenmill bench serve`: a load on any server that speaks OpenAI's protocol."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import App, Group, Parameter

from tokenmill.entrypoints.bench.load_options import LoadOptions
from tokenmill.entrypoints.cli import event_loop
from tokenmill.entrypoints.cli.flags import option_flags
from tokenmill.observe.environment import openai_api_key

if TYPE_CHECKING:
    from tokenmill.entrypoints.bench.load import LoadReport

JSON = Parameter(negative=(), help="One JSON object on stdout in place of the tables.")
LOAD = Parameter(name="*", group=Group("Load", sort_key=1))

if TYPE_CHECKING:  # a class that is made at run time is no type to a checker
    LoadFlags = LoadOptions
else:
    LoadFlags = option_flags(LoadOptions)
LOAD_DEFAULTS = LoadFlags()

NOTES = """
The key of a server that needs one is taken from OPENAI_API_KEY. TTFT is the time to the first text,
TPOT that for each token after it, ITL the time between two pieces of text, E2EL that of a whole
request. Server and load share this machine if they run on it.
"""

app = App(
    name="serve",
    usage="Usage: tokenmill bench serve [OPTIONS]",
    help_epilogue=NOTES.replace("\n", " ").strip(),
)


@app.default
def serve(
    *,
    load: Annotated[LoadFlags, LOAD] = LOAD_DEFAULTS,
    json: Annotated[bool, JSON] = False,
) -> int:
    """Send requests to a server at a rate or in a crowd: latencies, throughput, goodput."""
    options = LoadOptions(**vars(load))
    from tokenmill.entrypoints.bench.load import measure_load

    report = event_loop.run(measure_load(options, openai_api_key()))
    if json:
        figures = {"command": "serve", "options": _plain(options), **asdict(report)}
        print(msgspec.json.encode(figures).decode())
    else:
        _show(report)
    return 0 if not report.num_failed else 1


def _plain(options: LoadOptions) -> dict[str, object]:
    """The options as JSON can hold them: it has no infinity."""
    return {name: str(v) if v == float("inf") else v for name, v in asdict(options).items()}


def _show(report: LoadReport) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(
        f"{report.model}: {report.num_completed} requests in {report.seconds:.2f} s,"
        f" {report.num_failed} failed, at most {report.max_concurrency} at once"
    )
    console.print(
        f"{report.requests_per_second:.2f} requests/s,"
        f" {report.output_tokens_per_second:,.1f} output tokens/s,"
        f" {report.total_tokens_per_second:,.1f} tokens/s in all"
        f" ({report.num_prompt_tokens:,} prompt, {report.num_output_tokens:,} output)"
    )
    table = Table("milliseconds", "mean", *report.ttft.percentiles)
    for name in ("ttft", "tpot", "itl", "e2el"):
        spread = getattr(report, name)
        values = [spread.mean, *spread.percentiles.values()]
        table.add_row(name.upper(), *(f"{value:,.2f}" for value in values))
    console.print(table)
    if report.goodput is not None and report.share_good is not None:
        console.print(f"goodput {report.goodput:.2f} requests/s ({report.share_good:.1%} of all)")
    for error in report.errors:
        console.print(f"failed: {error}")
