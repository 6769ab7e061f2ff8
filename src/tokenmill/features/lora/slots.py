"""The host half: which requests may start, where no more than so many adapters run at a time.

A request whose adapter runs already, or for whose adapter there is a free slot, may start. The
first one for which there is none picks an adapter that is to give its slot up: the one with the
fewest requests. Those run to their end, but no request behind ours starts with it. So a queue full
of requests for two adapters cannot keep a third one waiting for ever, and requests for the others,
or for none, pass by meanwhile.

    max_loras = 2      running  A A B      waiting  c  a  b  base  d
    c picks B: b waits, a and base start; d picks A: requests for A that come behind it wait, too
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tokenmill.contracts.request import AdapterRef

WAIT_REASON = "adapter slot"


class AdapterSlots:
    """Counts the adapters that run. It is asked for each waiting request in turn, pass by pass."""

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras
        self._running: Counter[str] = Counter()
        """Requests by their adapter's `load_id`."""
        self._gives_up: dict[str, str] = {}
        """Which adapter gives its slot up, by the waiting one that gets it."""
        self._gave_up: dict[str, str] = {}
        """The same in the pass before: a choice stands as long as it makes sense."""

    def begin_pass(self, running: Iterable[AdapterRef | None]) -> None:
        """The waiting requests are asked for in their order, beside those that run."""
        self._running = Counter(each.load_id for each in running if each is not None)
        self._gave_up, self._gives_up = self._gives_up, {}

    def wait_reason(self, adapter: AdapterRef | None) -> str | None:
        """Why the next request in the queue may not start; None if it may. Then it either does, or
        is the last one of the pass.
        """
        if adapter is None:
            return None
        wanted = adapter.load_id
        runs = wanted in self._running
        if runs and wanted in self._gives_up.values():
            return WAIT_REASON
        if runs or len(self._running) < self._max_loras:
            self._running[wanted] += 1
            return None
        if wanted not in self._gives_up:
            self._choose(wanted)
        return WAIT_REASON

    def _choose(self, wanted: str) -> None:
        """Let an adapter give its slot up, unless all do so already."""
        left = self._running.keys() - self._gives_up.values()
        if left:
            before = self._gave_up.get(wanted)
            fewest = min(left, key=lambda load_id: (self._running[load_id], load_id))
            self._gives_up[wanted] = before if before in left else fewest
