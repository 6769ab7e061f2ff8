"""A progress bar over requests, on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tokenmill.outputs import RequestOutput


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
