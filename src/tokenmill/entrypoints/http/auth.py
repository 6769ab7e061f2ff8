"""API keys: who may use the server."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from tokenmill.config.route_args import RouteArgs
from tokenmill.config.serve_args import ServeArgs
from tokenmill.entrypoints.http.errors import AuthenticationError
from tokenmill.errors import ConfigError

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
"""Paths that probes reach without a key."""

Headers = Iterable[tuple[bytes, bytes]]
"""Names in lower case, as ASGI has them."""


class ApiKeys:
    """The keys that open the server, as digests only. Without any, everybody may enter."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in dict.fromkeys(keys)]

    def __len__(self) -> int:
        return len(self._digests)

    def check(self, headers: Headers) -> str | None:
        """A name for the key that a request brings, which tells nothing about it; None where no
        keys are set. Raises `AuthenticationError`.

        Every key is compared, each in constant time, so that time tells nothing either.
        """
        if not self._digests:
            return None
        presented = _presented(headers)
        if not presented:
            raise AuthenticationError(
                "this server needs an API key; send `Authorization: Bearer KEY` or `x-api-key`."
            )
        for digest in map(_digest, presented):
            matches = [hmac.compare_digest(digest, known) for known in self._digests]
            if any(matches):
                return hashlib.sha256(b"name of " + digest).hexdigest()[:32]
        raise AuthenticationError("the API key is not one of this server's.")


def api_keys(args: ServeArgs | RouteArgs) -> ApiKeys:
    """Keys of the settings and their file. Raises `ConfigError` for a file without any."""
    keys = list(args.api_key or [])
    if args.api_key_file is not None:
        try:
            text = Path(args.api_key_file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
            raise ConfigError(f"api_key_file={args.api_key_file!r}: {reason}.") from error
        lines = [line.strip() for line in text.splitlines()]
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise ConfigError(
                f"api_key_file={args.api_key_file!r} holds no key; write one on a line of its own."
            )
        keys += found
    return ApiKeys(keys)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _presented(headers: Headers) -> list[bytes]:
    """What may be a key. A client that has two ways to bring one may fill the other with anything:
    the first of each is looked at.
    """
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() == b"bearer" and key.strip():
                found.setdefault(name, key.strip())
        elif name == b"x-api-key" and value.strip():
            found.setdefault(name, value.strip())
    return list(found.values())
