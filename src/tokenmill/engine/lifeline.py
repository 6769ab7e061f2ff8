"""No core outlives its front end, and none seems alive that is not.

Three ways to notice that the front end has died, each for what the others miss: the kernel kills
the core (Linux; at once, even inside a kernel call that never returns), the core's standard input
ends (everywhere), and its parent changes (if somebody else holds the other end of the pipe).
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading

from tokenmill.engine.status_page import StatusPage

BEAT_INTERVAL = 0.25
"""Seconds between two signs of life."""
_PR_SET_PDEATHSIG = 1


def start_lifeline(page: StatusPage, parent_pid: int) -> None:
    """Tie this process to its parent, and show on the page that it lives, from now on."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    thread = threading.Thread(
        target=_watch, args=(page, parent_pid), name="tokenmill-lifeline", daemon=True
    )
    thread.start()


def _watch(page: StatusPage, parent_pid: int) -> None:
    stdin = sys.stdin.fileno()
    while os.getppid() == parent_pid:  # else it died before the kernel was told to kill us
        page.beat_core()
        readable, _, _ = select.select([stdin], [], [], BEAT_INTERVAL)
        if readable and not os.read(stdin, 1):
            break
    os._exit(1)
