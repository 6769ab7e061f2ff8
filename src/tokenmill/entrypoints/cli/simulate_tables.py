"""What a simulation says, as tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tokenmill.observe.spread import Spread
from tokenmill.simulate.options import SimulateOptions
from tokenmill.simulate.report import SimulationReport
from tokenmill.simulate.search import Search


def show_report(
    console: Console, model: str, options: SimulateOptions, report: SimulationReport
) -> None:
    """Throughput, latencies, and what the workers were like."""
    workers = "1 worker" if report.num_workers == 1 else f"{report.num_workers:,} workers"
    if report.num_workers > 1:
        workers += f" ({options.routing})"
    failed = f", {report.num_aborted:,} aborted" if report.num_aborted else ""
    failed += f", {report.num_refused:,} refused" if report.num_refused else ""
    console.print(
        f"{model} on {workers}: {report.num_completed:,} requests in {report.seconds:,.1f}"
        f" simulated seconds{failed}"
    )
    console.print(
        f"{report.requests_per_second:,.2f} requests/s,"
        f" {report.output_tokens_per_second:,.1f} output tokens/s,"
        f" {report.total_tokens_per_second:,.1f} tokens/s in all"
        f" ({report.num_prompt_tokens:,} prompt, {report.num_output_tokens:,} output)"
    )
    console.print(_latencies(report))
    console.print(
        f"KV cache {report.kv_usage_mean:.1%} in use on average, {report.kv_usage_peak:.1%} at"
        f" most; {report.prefix_hit_rate:.1%} of prompts found in it;"
        f" {report.num_preemptions:,} preemptions"
    )
    console.print(
        f"workers make steps {report.busy:.1%} of the time, the busiest {report.busiest:.1%};"
        f" {report.num_steps:,} steps of {report.tokens_per_step:,.1f} tokens"
    )
    if report.goodput is not None and report.share_good is not None:
        console.print(
            f"goodput {report.goodput:,.2f} requests/s ({report.share_good:.1%} of all keep"
            f" {options.goodput})"
        )


def show_search(console: Console, options: SimulateOptions, search: Search) -> None:
    """All trials, and the answer."""
    what = "requests/s" if options.search == "rate" else "workers"
    table = Table(what, "keep the goals", "")
    for trial in sorted(search.trials, key=lambda trial: trial.value):
        share = trial.report.share_good or 0.0
        table.add_row(f"{trial.value:,.4g}", f"{share:.1%}", "enough" if trial.keeps else "too few")
    console.print(table)
    value = options.request_rate if options.search == "rate" else options.num_workers
    superlative = "most" if options.search == "rate" else "fewest"
    console.print(
        f"{value:,.4g} {what} are the {superlative} with which {search.share:.1%} of the requests"
        f" keep {options.goodput}:"
    )


def _latencies(report: SimulationReport) -> Table:
    table = Table("milliseconds", "mean", *report.ttft.percentiles)

    def add(name: str, times: Spread) -> None:
        values = [times.mean, *times.percentiles.values()]
        table.add_row(name, *(f"{value:,.2f}" for value in values))

    add("TTFT", report.ttft)
    for priority, times in report.ttft_of_priority.items():
        add(f"  priority {priority}", times)
    add("TPOT", report.tpot)
    add("ITL", report.itl)
    add("E2EL", report.e2el)
    add("queue", report.queue)
    return table
