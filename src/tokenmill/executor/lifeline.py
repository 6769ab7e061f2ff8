"""No rank outlives the process that started it."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading

_LOOK_INTERVAL = 0.25
"""Seconds between two looks at who the parent is."""
_PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int, *, dies_with_thread: bool) -> None:
    """End this process when its standard input ends, or its parent is another one.

    On Linux, where the thread that started it lives as long as the parent (`dies_with_thread`), the
    system ends it at once, even in a call that never returns.
    """
    if dies_with_thread and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(
        target=_watch, args=(parent_pid,), name="tokenmill-lifeline", daemon=True
    ).start()


def _watch(parent_pid: int) -> None:
    stdin = sys.stdin.fileno()
    while os.getppid() == parent_pid:  # else it died before the system was told to end us
        readable, _, _ = select.select([stdin], [], [], _LOOK_INTERVAL)
        if readable and not os.read(stdin, 1):
            break
    os._exit(1)
