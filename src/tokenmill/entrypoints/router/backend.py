"""What the router knows of one backend: whether it can be used, and how much it has to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum

from tokenmill.config.route_args import RouteArgs
from tokenmill.entrypoints.router.upstream import Answer, Headers, Upstream

_FIRST_EJECTION = 1.0
"""Seconds."""
_UNHEALTHY_AFTER = 2
"""Questions in a row without a good answer, after which nothing more is sent."""
_SHORTEST_WAIT = 1.0
_LONGEST_WAIT = 60.0
"""Seconds for which a backend is believed that asks to be left alone."""
_BUSY = (429,)
UNREADY = (503, 529)
"""529 is how an overloaded server puts it that speaks Anthropic's protocol."""
AGAIN_ELSEWHERE = (*_BUSY, *UNREADY, 502)
"""Statuses that say nothing of the request: another backend may take it."""


class Role(Enum):
    """What of a request a backend computes."""

    ALL = "all"
    PREFILL = "prefill"
    DECODE = "decode"


class Backend:
    """One server. Changed by the event loop only."""

    def __init__(
        self,
        index: int,
        url: str,
        role: Role,
        args: RouteArgs,
        *,
        api_key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`index` is its place among all backends."""
        self.index = index
        self.url = url.rstrip("/")
        self.role = role
        self.api_key = api_key
        self.models: frozenset[str] | None = None
        """Names that it serves; None while it has not told: it may serve any."""
        self.in_flight = 0
        """Requests that it has of us."""
        self.num_ejections = 0
        """In all."""
        self._upstream = Upstream(url, connect_timeout=args.connect_timeout)
        self._args = args
        self._clock = clock
        self._is_up = False
        self._num_unanswered = 0
        self._num_failures = 0
        self._ejections_in_row = 0
        self._ejected_until = 0.0
        self._unready_until = 0.0
        self._busy_until = 0.0

    async def request(
        self, method: bytes, target: bytes, headers: Headers, body: bytes, *, timeout: float
    ) -> Answer:
        """Send a request. Raises `UpstreamError`."""
        return await self._upstream.request(method, target, headers, body, timeout=timeout)

    def close(self) -> None:
        """Close its connections."""
        self._upstream.close()

    # ---- may it be used? --------------------------------------------------------------------

    @property
    def is_available(self) -> bool:
        """Whether requests may be sent there now."""
        return self._is_up and self.seconds_away == 0

    @property
    def seconds_away(self) -> float:
        """For how long it is to be left alone, if it is up at all."""
        return max(self._ejected_until - self._clock(), self._unready_until - self._clock(), 0.0)

    @property
    def is_up(self) -> bool:
        """Whether it answers when it is asked how it is."""
        return self._is_up

    @property
    def is_busy(self) -> bool:
        """Whether it has lately refused a request because it had too many."""
        return self._clock() < self._busy_until

    def serves(self, model: str | None) -> bool:
        """Whether it may have a model of this name."""
        return model is None or self.models is None or model in self.models

    # ---- what happens to it -----------------------------------------------------------------

    def answered_check(self, *, well: bool) -> None:
        """It was asked how it is."""
        self._num_unanswered = 0 if well else self._num_unanswered + 1
        if well:
            self._is_up = True
        elif self._num_unanswered >= _UNHEALTHY_AFTER:
            self._is_up = False

    def note_status(self, status: int, retry_after: float | None, *, is_last: bool) -> None:
        """It has answered a request. `is_last`: no other backend is available, so that failures
        that may be the requests' own are no reason to leave it alone.
        """
        wait = min(max(retry_after or 0.0, _SHORTEST_WAIT), _LONGEST_WAIT)
        if status in _BUSY:
            self._busy_until = self._clock() + wait
        elif status in UNREADY:
            self._unready_until = self._clock() + wait
        elif status < 500:
            self._num_failures = self._ejections_in_row = 0
        else:
            self._num_failures += 1
            if self._num_failures >= self._args.eject_after and not is_last:
                self._eject()

    def note_unreachable(self) -> None:
        """There is nobody: whoever comes next need not find out again."""
        self._eject()

    def note_broken(self, *, is_last: bool) -> None:
        """It has ended a connection that it should not have, or was silent for too long."""
        self.note_status(500, None, is_last=is_last)

    def _eject(self) -> None:
        seconds = _FIRST_EJECTION * 2.0**self._ejections_in_row
        self._ejected_until = self._clock() + min(seconds, self._args.max_eject_seconds)
        self._ejections_in_row = min(self._ejections_in_row + 1, 30)
        self._num_failures = 0
        self.num_ejections += 1


def retry_after_of(answer: Answer) -> float | None:
    """Seconds that a backend asks to be left alone; None if it says nothing, or a date."""
    value = answer.header(b"retry-after")
    return float(value) if value is not None and value.isdigit() else None


def make_backends(args: RouteArgs) -> list[Backend]:
    """All of the settings, in their order."""
    roles = [Role.ALL] * len(args.backend or [])
    roles += [Role.PREFILL] * len(args.prefill or [])
    roles += [Role.DECODE] * len(args.decode or [])
    given = args.backend_api_key or []
    keys = given if len(given) > 1 else [*given, None][:1] * len(roles)
    return [
        Backend(index, url, role, args, api_key=key)
        for index, (url, role, key) in enumerate(zip(args.urls, roles, keys, strict=True))
    ]
