"""Ranks on other machines: they come to the executor, and are started by a command over there."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from tokenmill.config.parallel import ParallelConfig
from tokenmill.errors import ConfigError, EngineDeadError
from tokenmill.executor import messages

logger = logging.getLogger(__name__)

_LOOK_INTERVAL = 0.2
"""Seconds between two looks at the ranks of this machine, while others are waited for."""
_NEWS_INTERVAL = 10.0
"""Seconds between two lines about who is missing."""
_BACKLOG = 128
"""Ranks that may come at the same time."""
_HELLO_TIMEOUT = 5.0
"""Seconds for whoever has connected to say which rank it is."""


class RankPlaces(Protocol):
    """Machines on which somebody else starts all ranks, for one engine."""

    @property
    def parallel(self) -> ParallelConfig:
        """As the ranks are told: `master_addr` is where the first rank is."""
        ...

    def accept(self, check_others: Callable[[], None]) -> Iterator[tuple[int, socket.socket]]:
        """Each rank with its stream, as they come; `check_others` as of `accept_ranks`."""
        ...

    def how_it_ended(self, rank: int) -> str:
        """Of a rank whose stream has ended: `was killed by SIGKILL`."""
        ...

    def end(self, *, grace: float = ...) -> None:
        """End the ranks, after `grace` seconds by force. May be called twice."""
        ...


def accept_ranks(
    parallel: ParallelConfig, check_others: Callable[[], None]
) -> Iterator[tuple[int, socket.socket]]:
    """Each rank of the other machines with its stream, as they come; waits for all of them.

    `check_others` is called now and then, and may raise. Raises `ConfigError` if `master_addr` and
    `master_port` are no place to wait at.
    """
    ranks = range(parallel.num_local, parallel.world_size)
    if not ranks:
        return
    with open_listener(parallel.master_addr, parallel.master_port) as listener:
        remedy = "start `tokenmill serve --headless` on their machines"
        yield from accept_at(listener, ranks, check_others, remedy)


def open_listener(host: str, port: int) -> socket.socket:
    """Where ranks may come to; port 0 is any free one. Raises `ConfigError`."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"master_addr={host!r} and master_port={port}: ranks of other machines cannot be"
            f" waited for there: {error.strerror or error}. Give an address of this machine, and a"
            f" free port."
        ) from error
    listener.settimeout(_LOOK_INTERVAL)
    return listener


def accept_at(
    listener: socket.socket, ranks: Iterable[int], check_others: Callable[[], None], remedy: str
) -> Iterator[tuple[int, socket.socket]]:
    """Each of these ranks with its stream, as they come to `open_listener`'s; `remedy` is said if
    some do not come for long.
    """
    missing = set(ranks)
    host, port = listener.getsockname()[:2]
    next_news = time.monotonic() + _NEWS_INTERVAL
    while missing:
        check_others()
        if time.monotonic() > next_news:
            next_news += _NEWS_INTERVAL
            numbers = ", ".join(map(str, sorted(missing)))
            logger.warning("waiting for ranks %s at %s:%d; %s", numbers, host, port, remedy)
        try:
            stream, _ = listener.accept()
        except TimeoutError:
            continue
        rank = _hello(stream)
        if rank not in missing:
            logger.warning("somebody connected who is none of the ranks waited for")
            stream.close()
            continue
        missing.remove(rank)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield rank, stream


def _hello(stream: socket.socket) -> int:
    """Which rank has connected; -1 for whoever does not say so."""
    stream.settimeout(_HELLO_TIMEOUT)
    try:
        message = messages.receive_from_rank(stream, messages.HELLO_BYTES)
    except (OSError, EOFError, EngineDeadError):
        return -1
    stream.settimeout(None)
    return message.rank if isinstance(message, messages.Hello) else -1
