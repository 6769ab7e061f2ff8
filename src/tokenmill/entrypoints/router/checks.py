"""Questions to each backend: how it is, and which models it has."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from tokenmill.config.route_args import RouteArgs
from tokenmill.entrypoints.router.backend import Backend
from tokenmill.entrypoints.router.upstream import Headers, UpstreamError

logger = logging.getLogger(__name__)

_MODELS_EVERY = 5
"""Questions on health for each on models: adapters come and go."""
_MOST_BYTES = 1 << 22
"""Of a list of models."""


class ModelEntry(msgspec.Struct):
    """One of a backend's models; what else it tells is passed on as it is."""

    id: str


class _ModelList(msgspec.Struct):
    data: list[msgspec.Raw]


async def watch(backend: Backend, args: RouteArgs, on_loss: Callable[[Backend], None]) -> None:
    """Ask for as long as the router lives; `on_loss` is told of a backend that is there no more."""
    number = 0
    while True:
        was_up = backend.is_up
        await look(backend, args, ask_models=number % _MODELS_EVERY == 0 or not was_up)
        if backend.is_up != was_up:
            logger.warning("backend %s is %s", backend.url, "up" if backend.is_up else "down")
        if was_up and not backend.is_up:
            on_loss(backend)
        number += 1
        await asyncio.sleep(args.health_interval)


async def look(backend: Backend, args: RouteArgs, *, ask_models: bool) -> None:
    """One round of questions."""
    well = False
    try:
        answer = await backend.request(
            b"GET", args.health_path.encode("ascii"), own_key(backend), b"",
            timeout=args.health_timeout,
        )  # fmt: skip
        answer.close()
        well = answer.status == 200
        if well and ask_models:
            found = await models_of(backend, own_key(backend), args.health_timeout)
            backend.models = None if found is None else frozenset(found)
    except UpstreamError as error:
        logger.debug("backend %s: %s", backend.url, error)
    backend.answered_check(well=well)


async def models_of(
    backend: Backend, headers: Headers, timeout: float
) -> dict[str, msgspec.Raw] | None:
    """What a backend tells of each of its models, by their names; None if it does not tell.

    Raises `UpstreamError`.
    """
    answer = await backend.request(b"GET", b"/v1/models", headers, b"", timeout=timeout)
    try:
        body = await answer.body(_MOST_BYTES)
    finally:
        answer.close()
    if answer.status != 200:
        return None
    try:
        entries = msgspec.json.decode(body, type=_ModelList).data
        return {msgspec.json.decode(each, type=ModelEntry).id: each.copy() for each in entries}
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def own_key(backend: Backend) -> Headers:
    """The key that the settings have for a backend, as a header."""
    if backend.api_key is None:
        return []
    return [(b"authorization", f"Bearer {backend.api_key}".encode())]
