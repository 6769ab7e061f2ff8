"""Figures as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from tokenmill.entrypoints.bench.kernels import KernelFigure, KernelReport
    from tokenmill.entrypoints.bench.profile import KernelShare, StageReport
    from tokenmill.entrypoints.bench.serving import PhaseReport, ServingReport
    from tokenmill.entrypoints.bench.startup import MemoryReport, StartupReport


def show_serving(console: Console, report: ServingReport) -> None:
    """Phases beside their limits, the whole call, and the profile if there is one."""
    requests = "1 request" if report.num_requests == 1 else f"{report.num_requests} requests"
    console.print(
        f"{requests} of {report.input_len} prompt and {report.output_len} new tokens:"
        f" {report.seconds:.3f} s, {report.output_tokens_per_second:.1f} new tokens/s,"
        f" {report.requests_per_second:.2f} requests/s over the whole call"
    )
    if report.drafts is not None:
        console.print(
            f"of {report.drafts.num_draft_tokens} drafts {report.drafts.share_held:.1%} held: a"
            f" step that checked some brought {report.drafts.mean_accepted_length:.2f} tokens"
        )
    console.print(_phase_table(report.phases))
    for phase in report.phases:
        console.print(_limit_line(phase, report), style="dim")
    if report.handover_seconds is not None:
        nanoseconds = 1e9 * report.handover_seconds
        console.print(f"a cache line passes between threads in {nanoseconds:.0f} ns", style="dim")
    for name, stages in report.profile.items():
        console.print(_profile_table(name, stages))
        if name in report.host_milliseconds:
            host = report.host_milliseconds[name]
            console.print(f"{name}: {host:.3f} ms of a step on the host, without these clocks")
        if name in report.kernels:
            console.print(_shares_table(name, report.kernels[name]))


def _phase_table(phases: Sequence[PhaseReport]) -> Table:
    table = _table(
        *("steps with", "steps", "tokens", "tokens/s", "ms a step", "p99", "limit, ms"),
        *("of limit", "bound by"),
    )
    for phase in phases:
        table.add_row(
            phase.phase,
            str(phase.num_steps),
            str(phase.num_tokens),
            f"{phase.tokens_per_second:,.1f}",
            f"{phase.step_milliseconds:.3f}",
            f"{phase.step_milliseconds_p99:.3f}",
            f"{1e3 * phase.limit_seconds / phase.num_steps:.3f}",
            f"{phase.share_of_limit:.0%}",
            phase.bound_by,
        )
    return table


def _limit_line(phase: PhaseReport, report: ServingReport) -> str:
    return (
        f"{phase.phase}: a step reads {phase.num_bytes / phase.num_steps / 1e6:,.1f} MB at"
        f" {phase.read_bandwidth / 1e9:,.1f} GB/s and computes"
        f" {phase.flops / phase.num_steps / 1e9:,.2f} GFLOP at"
        f" {report.peak.flops / 1e12:,.2f} TFLOP/s ({report.peak.measured_as})"
    )


def _profile_table(phase: str, stages: Sequence[StageReport]) -> Table:
    """The time in kernels stands beside the rest where the kernels are ours."""
    knows_kernels = any(stage.kernel_milliseconds for stage in stages)
    table = _table("stage", "ms", *(("in kernels", "on the host") if knows_kernels else ()))
    table.title = f"a step with {phase}, medians"
    for stage in stages:
        if stage.stage == "step":
            table.add_section()
        parts = (stage.kernel_milliseconds, stage.host_milliseconds) if knows_kernels else ()
        table.add_row(stage.stage, *(f"{each:.3f}" for each in (stage.milliseconds, *parts)))
    return table


def _shares_table(phase: str, kernels: Sequence[KernelShare]) -> Table:
    table = _table("kernel", "calls", "ms", "of kernels")
    table.title = f"kernels of a replayed step with {phase}, means"
    for each in kernels:
        table.add_row(
            each.kernel, str(each.num_calls), f"{each.milliseconds:.3f}", f"{each.share:.0%}"
        )
    return table


def show_kernels(console: Console, report: KernelReport) -> None:
    """Kernels in groups, each beside its limit."""
    peaks = ", ".join(
        f"{name} {peak.flops / 1e12:.2f} TFLOP/s ({peak.measured_as})"
        for name, peak in report.peaks.items()
    )
    console.print(f"{report.kernels}, {report.num_threads} threads; peak: {peaks}")
    for group in dict.fromkeys(figure.group for figure in report.figures):
        console.print(_kernel_table(group, [f for f in report.figures if f.group == group]))


def _kernel_table(group: str, figures: Sequence[KernelFigure]) -> Table:
    table = _table(
        "kernel", "shape", "rows", "ms", "GB/s", "of read", "TFLOP/s", "of peak", "of limit"
    )
    table.title = group
    for number, figure in enumerate(figures):
        before = figures[number - 1]
        if figure.shape != before.shape or (not figure.flops and figure.kernel != before.kernel):
            table.add_section()
        table.add_row(
            figure.kernel,
            figure.shape,
            str(figure.num_rows),
            f"{1e3 * figure.seconds:.4f}",
            f"{figure.num_bytes / figure.seconds / 1e9:.1f}",
            f"{figure.share_of_bandwidth:.0%}",
            f"{figure.flops / figure.seconds / 1e12:.3f}" if figure.flops else "",
            f"{figure.share_of_peak:.0%}" if figure.flops else "",
            f"{figure.share_of_limit:.0%}",
        )
    return table


def show_startup(console: Console, report: StartupReport) -> None:
    """Stages in order, then memory."""
    table = _table("stage", "s")
    for stage, seconds in report.stages.items():
        table.add_row(stage, f"{seconds:.3f}")
    table.add_section()
    table.add_row("from the end of import torch to the first token", f"{report.to_first_token:.3f}")
    table.add_row("from the start of the process to the first token", f"{report.whole:.3f}")
    console.print(table)
    console.print(
        f"The model's {report.checkpoint_bytes / 1e6:,.1f} MB are read in"
        f" {report.load_limit_seconds:.3f} s at the machine's best.",
        style="dim",
    )
    if report.memory is not None:
        console.print(_memory_table(report.memory))


def _memory_table(memory: MemoryReport) -> Table:
    table = _table("memory after the first token", "MiB", "limit, MiB", "of limit")
    mebibytes = 1 << 20

    def add(name: str, used: int, limit: int) -> None:
        table.add_row(
            name,
            f"{used / mebibytes:,.1f}",
            f"{limit / mebibytes:,.1f}",
            f"{used / limit:.0%}",
        )

    add("anonymous; limit: weights, KV pool, allowance", memory.anonymous, memory.limit)
    add("anonymous beside the weights; limit: allowance", memory.beside_weights, memory.allowance)
    table.add_row("weights, as the engine holds them", f"{memory.weights / mebibytes:,.1f}")
    table.add_row("KV pool, when it is full", f"{memory.kv_pool / mebibytes:,.1f}")
    return table


def _table(*headings: str) -> Table:
    table = Table(title_justify="left")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return table
