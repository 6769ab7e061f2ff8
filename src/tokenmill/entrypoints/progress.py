"""What is shown on a terminal while an offline engine loads or works."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tokenmill.outputs import RequestOutput


@contextmanager
def start_progress(given: Callable[[str, int, int], None] | None) -> Iterator[Any]:
    """What is called while a model is fetched and loaded: what the caller has `given`, or else bars
    with a rate, if stderr is a terminal.
    """
    if given is not None or not sys.stderr.isatty():
        yield given
        return
    from rich.console import Console

    from tokenmill.entrypoints.cli.progress import loading_progress

    with loading_progress(Console(stderr=True), shown=True) as on_progress:
        yield on_progress


@contextmanager
def request_progress(
    num_requests: int, *, shown: bool
) -> Iterator[Callable[[RequestOutput], None]]:
    """Give a function to be called with every finished output. Silent unless stderr is a
    terminal.
    """
    if not shown or not sys.stderr.isatty():
        yield lambda output: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[tokens]} tokens, {task.fields[rate]:.0f}/s"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("requests", total=num_requests, tokens=0, rate=0.0)
        tokens = 0

        def advance(output: RequestOutput) -> None:
            nonlocal tokens
            tokens += sum(len(sequence.token_ids) for sequence in output.outputs)
            elapsed = bar.tasks[0].elapsed or 1.0
            bar.update(task, advance=1, tokens=tokens, rate=tokens / elapsed)

        yield advance
