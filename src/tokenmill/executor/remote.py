"""Ranks on other machines: they come to the executor, and are started by a command over there."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator

from tokenmill.config.parallel import ParallelConfig
from tokenmill.errors import ConfigError, EngineDeadError
from tokenmill.executor import messages

logger = logging.getLogger(__name__)

_LOOK_INTERVAL = 0.2
"""Seconds between two looks at the ranks of this machine, while others are waited for."""
_NEWS_INTERVAL = 10.0
"""Seconds between two lines about who is missing."""
_HELLO_TIMEOUT = 5.0
"""Seconds for whoever has connected to say which rank it is."""


def accept_ranks(
    parallel: ParallelConfig, check_others: Callable[[], None]
) -> Iterator[tuple[int, socket.socket]]:
    """Each rank of the other machines with its stream, as they come; waits for all of them.

    `check_others` is called now and then, and may raise. Raises `ConfigError` if `master_addr` and
    `master_port` are no place to wait at.
    """
    missing = set(range(parallel.num_local, parallel.world_size))
    if not missing:
        return
    with _listener(parallel) as listener:
        next_news = time.monotonic() + _NEWS_INTERVAL
        while missing:
            check_others()
            if time.monotonic() > next_news:
                next_news += _NEWS_INTERVAL
                logger.warning(
                    "waiting for ranks %s at %s:%d; start `tokenmill serve --headless` on their"
                    " machines",
                    ", ".join(map(str, sorted(missing))),
                    parallel.master_addr,
                    parallel.master_port,
                )
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


def _listener(parallel: ParallelConfig) -> socket.socket:
    address = parallel.master_addr, parallel.master_port
    try:
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server(address, family=family, backlog=parallel.world_size)
    except OSError as error:
        raise ConfigError(
            f"master_addr={address[0]!r} and master_port={address[1]}: ranks of other machines"
            f" cannot be waited for there: {error.strerror or error}. Give an address of this"
            f" machine, and a free port."
        ) from error
    listener.settimeout(_LOOK_INTERVAL)
    return listener


def _hello(stream: socket.socket) -> int:
    """Which rank has connected; -1 for whoever does not say so."""
    stream.settimeout(_HELLO_TIMEOUT)
    try:
        message = messages.receive_from_rank(stream)
    except (OSError, EOFError, EngineDeadError):
        return -1
    stream.settimeout(None)
    return message.rank if isinstance(message, messages.Hello) else -1
