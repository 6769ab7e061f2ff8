"""What is shown on stderr while a model is fetched and loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tokenmill.observe.rate import rate

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

OnProgress = Callable[[str, int, int], None]
"""Called with (stage, bytes done, bytes in total)."""


@contextmanager
def loading_progress(console: Console, *, shown: bool) -> Iterator[OnProgress]:
    """Give a function to be called with progress: bars with rate and time left on a terminal,
    which vanish at the end; elsewhere one line for each stage, with bytes, seconds and rate.
    """
    if not shown:
        yield lambda stage, done, total: None
        return
    with (_bars if console.is_terminal else _lines)(console) as on_progress:
        yield on_progress


@contextmanager
def _bars(console: Console) -> Iterator[OnProgress]:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True) as bars:

        def on_progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield on_progress


@contextmanager
def _lines(console: Console) -> Iterator[OnProgress]:
    stage, started, num_bytes = "", 0.0, 0

    def finish() -> None:
        if stage:
            console.print(f"{stage}: {rate(num_bytes, time.monotonic() - started)}")

    def on_progress(new_stage: str, done: int, total: int) -> None:
        nonlocal stage, started, num_bytes
        if new_stage != stage:
            finish()
            stage, started = new_stage, time.monotonic()
        num_bytes = done

    yield on_progress
    finish()
