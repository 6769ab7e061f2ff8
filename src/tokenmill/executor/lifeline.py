"""No process of ours outlives the one that started it.

Three ways to notice that the parent has died, each for what the others miss: the kernel kills the
child (Linux; at once, even inside a kernel call that never returns), its standard input ends
(everywhere), and its parent changes (if somebody else holds the other end of the pipe).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import NoReturn

BEAT_INTERVAL = 0.25
"""Seconds between two looks at the parent, and between two signs of life."""
_PR_SET_PDEATHSIG = 1


def start_child(
    module: str,
    *arguments: str,
    pass_fds: Collection[int],
    environment: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.Popen[bytes]:
    """Run a module of ours in a process that begins with `begin_child` and `start_lifeline`: on the
    interpreter that this one is, with the same modules in reach. Raises `OSError`.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.PIPE,  # its end tells the child that we are gone
        pass_fds=pass_fds,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            **environment,
        },
    )


def begin_child() -> None:
    """Leave it to the parent when to end, for which a signal to the whole process group is meant;
    and have the stack written to stderr, if there is one, when the system ends this process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.stderr is not None:
        faulthandler.enable()


def start_lifeline(
    parent_pid: int, *, dies_with_thread: bool = True, beat: Callable[[], object] = lambda: None
) -> None:
    """Tie this process to its parent, and call `beat` again and again, from now on.

    The kernel's way counts the thread that started this process for its parent:
    `dies_with_thread` says that it lives as long.
    """
    if dies_with_thread and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    thread = threading.Thread(
        target=_watch, args=(parent_pid, beat), name="tokenmill-lifeline", daemon=True
    )
    thread.start()


def _watch(parent_pid: int, beat: Callable[[], object]) -> None:
    stdin = sys.stdin.fileno()
    while os.getppid() == parent_pid:  # else it died before the kernel was told to kill us
        beat()
        readable, _, _ = select.select([stdin], [], [], BEAT_INTERVAL)
        if readable and not os.read(stdin, 1):
            break
    os._exit(1)


def leave(status: int) -> NoReturn:
    """End this process at once: threads of kernels and of torch have nothing left to do, and
    nothing to say about it.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(status)


def how_it_ended(process: subprocess.Popen[bytes]) -> str | None:
    """`was killed by SIGKILL`, `exited with status 1`; None for a process that runs."""
    status = process.poll()
    if status is None or status >= 0:
        return None if status is None else f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-status}"
