"""What is asked of all backends at once: to forget prefixes, to load or unload an adapter."""

from __future__ import annotations

import asyncio

from starlette.types import Send

from tokenmill.entrypoints.http.record import RequestRecord
from tokenmill.entrypoints.router.backend import Backend
from tokenmill.entrypoints.router.checks import look
from tokenmill.entrypoints.router.exchange import (
    Inbound,
    WholeAnswer,
    send_whole,
    upstream_headers,
)
from tokenmill.entrypoints.router.state import RouterState
from tokenmill.entrypoints.router.upstream import UpstreamError

_RESET = "/reset_prefix_cache"
BROADCAST = (_RESET, "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_MOST_BYTES = 1 << 20


async def broadcast(
    state: RouterState, record: RequestRecord, inbound: Inbound, send: Send
) -> None:
    """Ask all that are available. The client gets the first answer that is an error, else the first
    one. Raises `NoBackendError`, or `UpstreamError` if one of them does not answer.
    """
    able = [each for each in state.backends if each.is_available]
    if not able:
        raise state.no_backend(state.backends)
    replies = await asyncio.gather(*(_ask(state, record, inbound, each) for each in able))
    failed = [each for each in replies if each.status >= 400]
    reply = (failed or replies)[0]
    if inbound.target.startswith(_RESET.encode()):
        for backend in able:
            state.picker.forget(backend)
    else:  # the lists of models have changed
        await asyncio.gather(*(look(each, state.args, ask_models=True) for each in able))
    await send_whole(send, reply)


async def _ask(
    state: RouterState, record: RequestRecord, inbound: Inbound, backend: Backend
) -> WholeAnswer:
    headers = upstream_headers(state, backend, inbound.headers, record.request_id)
    try:
        answer = await backend.request(
            inbound.method,
            inbound.target,
            headers,
            inbound.body,
            timeout=state.args.backend_timeout,
        )
        try:
            return WholeAnswer(answer.status, answer.headers, await answer.body(_MOST_BYTES))
        finally:
            answer.close()
    except UpstreamError as error:
        state.metrics.count_error(backend, error)
        raise
