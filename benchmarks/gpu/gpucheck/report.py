"""Rows of results, kept as JSON and shown as a table or as Markdown."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Row:
    """One result. Times are milliseconds."""

    part: str
    case: str
    ms: float | None = None
    """What was measured."""
    limit_ms: float | None = None
    """What it would take at the speed of the card's limits."""
    ok: bool | None = None
    """Whether a check held; None where nothing was checked."""
    figures: dict[str, Any] = field(default_factory=dict)
    """Further numbers and words, by their heading."""

    @property
    def share(self) -> float | None:
        """How much of the limit's speed was reached."""
        if not self.ms or self.limit_ms is None:
            return None
        return self.limit_ms / self.ms


@dataclass(slots=True)
class PartState:
    """How far a part came."""

    status: str = "running"
    """`running`, `done`, `out of time`, or `failed: ...`"""
    seconds: float = 0.0


@dataclass
class Report:
    """Everything one run has found; written to `path` after every row."""

    path: Path | None = None
    machine: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    parts: dict[str, PartState] = field(default_factory=dict)
    profiles: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Kernels by time, of each profiled step."""

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.save()

    def save(self) -> None:
        if self.path is not None:
            self.path.write_text(json.dumps(self.as_json(), indent=1))

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "parts": {name: asdict(state) for name, state in self.parts.items()},
            "rows": [asdict(row) | {"share": row.share} for row in self.rows],
            "profiles": self.profiles,
        }

    @classmethod
    def load(cls, path: Path) -> Report:
        """What `save` wrote."""
        content = json.loads(path.read_text())
        rows = []
        for entry in content["rows"]:
            del entry["share"]
            rows.append(Row(**entry))
        return cls(
            machine=content["machine"],
            rows=rows,
            parts={name: PartState(**state) for name, state in content["parts"].items()},
            profiles=content["profiles"],
        )

    def take(self, other: Report) -> None:
        """Add what another report of the same run has found."""
        self.machine |= other.machine
        self.rows += other.rows
        self.parts |= other.parts
        self.profiles |= other.profiles
        self.save()

    @property
    def failures(self) -> list[str]:
        """What went wrong: checks that did not hold, parts that broke off."""
        wrong = [
            f"{row.part}: {row.case}: {_listed(row.figures)}"
            for row in self.rows
            if row.ok is False
        ]
        broken = [
            f"{name}: {state.status}"
            for name, state in self.parts.items()
            if state.status.startswith("failed")
        ]
        return wrong + broken

    def limit(self, name: str) -> float | None:
        """A limit of the card that the part `limits` measured, in units a second."""
        for row in self.rows:
            if row.part == "limits" and row.case == name:
                return float(row.figures["T/s"]) * 1e12
        return None


class OutOfTime(Exception):  # noqa: N818 - no error: the part ends where it is
    """A part has used its budget."""


class Budget:
    """The time of one part."""

    def __init__(self, seconds: float) -> None:
        self._begin = time.perf_counter()
        self._end = self._begin + seconds

    @property
    def used(self) -> float:
        return time.perf_counter() - self._begin

    @property
    def left(self) -> float:
        return self._end - time.perf_counter()

    def check(self, seconds: float = 0.0) -> None:
        """Raise `OutOfTime` unless so many seconds are left."""
        if self.left < seconds:
            raise OutOfTime


def shown(value: Any) -> str:
    """A figure in a table's cell."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if value != 0 and (abs(value) < 1e-2 or abs(value) >= 1e7):
            return f"{value:.2e}"
        return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _listed(figures: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {shown(value)}" for name, value in figures.items())


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def print_table(report: Report) -> None:
    """Everything as one table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("part", "case", "ms", "limit", "of limit", "ok"):
        words = heading in ("part", "case")
        table.add_column(heading, justify="left" if words else "right", no_wrap=True)
    table.add_column("figures", overflow="fold")
    last = ""
    for row in report.rows:
        table.add_row(
            row.part if row.part != last else "",
            row.case,
            shown(row.ms),
            shown(row.limit_ms),
            percent(row.share),
            shown(row.ok),
            _listed(row.figures),
        )
        last = row.part
    console = Console(width=180)
    console.print(table)
    for name, state in report.parts.items():
        console.print(f"{name}: {state.status}, {state.seconds:.0f} s", highlight=False)
    for failure in report.failures:
        console.print(f"FAILED  {failure}", highlight=False)


def markdown(report: Report) -> str:
    """A table for each part, for `docs/performance-gpu.md`."""
    machine = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    pieces = [f"Measured on: {machine}.\n"]
    for part in dict.fromkeys(row.part for row in report.rows):
        rows = [row for row in report.rows if row.part == part]
        pieces.append(f"### {part.capitalize()}\n\n{_markdown_table(rows)}")
    for name, kernels in report.profiles.items():
        headings = list(kernels[0]) if kernels else []
        lines = [_line(headings), _line(["---"] * len(headings))]
        lines += [_line(shown(kernel[heading]) for heading in headings) for kernel in kernels]
        pieces.append(f"### Kernels of a step: {name}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(pieces)


def _markdown_table(rows: list[Row]) -> str:
    columns: dict[str, list[str]] = {
        "case": [row.case for row in rows],
        "ms": [shown(row.ms) for row in rows],
        "limit, ms": [shown(row.limit_ms) for row in rows],
        "of limit": [percent(row.share) for row in rows],
    }
    for heading in dict.fromkeys(name for row in rows for name in row.figures):
        columns[heading] = [shown(row.figures.get(heading)) for row in rows]
    columns["ok"] = [shown(row.ok) for row in rows]
    columns = {heading: cells for heading, cells in columns.items() if any(cells)}
    lines = [_line(columns), _line(["---", *["---:"] * (len(columns) - 1)])]
    lines += [_line(cells) for cells in zip(*columns.values(), strict=True)]
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
