"""Ctrl-C between steps, never inside one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Hold SIGINT back while the block runs, so that a step is done or not begun.

    The interrupt arrives when the block ends; a second one goes through at once. Outside the main
    thread, where Python delivers no signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.getsignal(signal.SIGINT)
    pending: list[FrameType | None] = []

    def remember(signum: int, frame: FrameType | None) -> None:
        if pending and callable(previous):
            previous(signum, frame)
        pending.append(frame)

    if not callable(previous):  # ignored, or not set from Python
        yield
        return
    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if pending:
            previous(signal.SIGINT, pending[0])
