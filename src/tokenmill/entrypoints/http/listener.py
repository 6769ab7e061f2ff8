"""The socket that a server listens on, taken before anything that lasts."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenmill.config.route_args import RouteArgs
from tokenmill.config.serve_args import ServeArgs
from tokenmill.errors import ConfigError

_OWNER_ONLY = 0o177
"""umask for a unix socket: nobody else may connect unless its owner changes the mode."""


_BACKLOG = 2048
"""Connections that may wait to be accepted."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A bound socket that does not listen yet."""

    socket: socket.socket
    address: str
    """What to tell a client: a URL, or a path after `unix:`."""
    path: Path | None = None
    """Of a unix socket."""
    inode: int = 0
    """What lies at the path, as long as no other server has put its own there."""

    @property
    def owns_path(self) -> bool:
        """Whether the unix socket can still be reached."""
        with contextlib.suppress(OSError):
            return self.path is not None and self.path.stat().st_ino == self.inode
        return False

    def listen(self) -> None:
        """Let clients connect. Raises `ConfigError` if another server was faster."""
        if self.path is None:
            # For the server after this one, which may bind while connections of this one linger.
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        elif not self.owns_path:
            raise ConfigError(f"cannot listen on {self.address}: another server has taken it.")
        try:
            self.socket.listen(_BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot listen on {self.address}: {error.strerror}.") from error


@contextlib.contextmanager
def bind(args: ServeArgs | RouteArgs) -> Iterator[Listener]:
    """Take the address of the settings; given back at the end. Raises `ConfigError`."""
    if args.uds is not None:
        with _bind_path(Path(args.uds).expanduser()) as listener:
            yield listener
        return
    sock = _bind_port(args.host, args.port)
    with sock:
        scheme = "http" if args.ssl_certfile is None else "https"
        host = f"[{args.host}]" if ":" in args.host else args.host
        yield Listener(sock, f"{scheme}://{host}:{sock.getsockname()[1]}")


def _bind_port(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        try:
            _bind_alone(sock, address)
        except OSError:
            sock.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"cannot listen on host={host!r} port={port}: {reason}. Choose others, or port=0 for"
            f" a free one."
        ) from error
    return sock


def _bind_alone(sock: socket.socket, address: tuple[object, ...]) -> None:
    """Bind so that nobody else can bind the address before we listen, if that is possible."""
    try:
        sock.bind(address)
    except OSError:
        # Connections of an earlier server may linger there (TIME_WAIT). They are no obstacle to a
        # shared address, which another server that is starting may then share until one listens.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)


@contextlib.contextmanager
def _bind_path(path: Path) -> Iterator[Listener]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with sock:
        _remove_stale(path)
        before = os.umask(_OWNER_ONLY)
        try:
            sock.bind(str(path))
        except OSError as error:
            reason = error.strerror or str(error)  # a path that is too long has no number
            raise ConfigError(f"cannot listen on uds={str(path)!r}: {reason}.") from error
        finally:
            os.umask(before)
        listener = Listener(sock, f"unix:{path}", path, path.stat().st_ino)
        try:
            yield listener
        finally:
            if listener.owns_path:
                path.unlink(missing_ok=True)


def _remove_stale(path: Path) -> None:
    """Remove a socket that a server left behind. One that still answers is left alone."""
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(str(path))
    except ConnectionRefusedError:
        path.unlink()
    except OSError:
        return
