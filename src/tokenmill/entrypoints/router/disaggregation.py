"""One request by two backends: one computes the prompt, the other takes its KV and goes on.

    client ─▶ prefill   the request with max_tokens=1 and kv_transfer_params.do_remote_decode
              prefill ─▶ its answer's kv_transfer_params: where the KV is held, and under what name
           ─▶ decode    the request as it was, with these: it fetches the KV and answers the client

What the client sees is the second answer, as it comes. Where there is no prefill backend, or it
fails, the other one computes the prompt as well: results are the same.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import msgspec
from starlette.types import Send

from tokenmill.entrypoints.http.record import RequestRecord
from tokenmill.entrypoints.router.backend import Role
from tokenmill.entrypoints.router.exchange import Exchange, Inbound, WholeAnswer, send_whole
from tokenmill.entrypoints.router.state import NoBackendError, RouterState
from tokenmill.entrypoints.router.upstream import Answer, UpstreamError
from tokenmill.errors import ModelNotFoundError

logger = logging.getLogger(__name__)

PAIRED = ("/v1/chat/completions", "/v1/completions")
"""Paths whose prompts another backend may compute."""
_PARAMS = "kv_transfer_params"
_REMOTE_DECODE = msgspec.Raw(b'{"do_remote_decode":true,"do_remote_prefill":false}')
_DROPPED = ("stream_options", "min_tokens", "best_of", "use_beam_search", "length_penalty")
_ONE_TOKEN = ("max_tokens", "max_completion_tokens")
_MOST_BYTES = 1 << 22

_Fields = dict[str, msgspec.Raw]


class _Prefilled(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


async def run_pair(
    state: RouterState, record: RequestRecord, inbound: Inbound, send: Send, path: str
) -> Exchange:
    """Answer the client; the exchange with the backend that did. Raises as `Exchange.run` does."""
    decode = Exchange(state, record, inbound, send)
    fields = _fields_of(inbound.body) if path in PAIRED else None
    if fields is None or _PARAMS in fields:
        await decode.run(Role.DECODE)
        return decode
    prefill = Exchange(state, record, replace(inbound, body=prefill_body(fields)), send)
    prefilled = await _prefilled(prefill)
    if prefilled is not None and prefilled.status >= 400:
        await send_whole(send, prefilled)
        return prefill
    params = None if prefilled is None else params_of(prefilled.body)
    if params is not None:
        body = msgspec.json.encode({**fields, _PARAMS: params})
        decode = Exchange(state, record, replace(inbound, body=body), send)
    await decode.run(Role.DECODE)
    return decode


def prefill_body(fields: _Fields) -> bytes:
    """A request that ends with its prompt and one token."""
    kept = {name: value for name, value in fields.items() if name not in _DROPPED}
    one = msgspec.Raw(b"1")
    limits = [name for name in _ONE_TOKEN if name in fields] or _ONE_TOKEN[:1]
    kept |= dict.fromkeys(limits, one) | {"n": one, "stream": msgspec.Raw(b"false")}
    return msgspec.json.encode({**kept, _PARAMS: _REMOTE_DECODE})


def params_of(body: bytes) -> msgspec.Raw | None:
    """Where the KV is, as a prefill backend has answered; None if it has not said."""
    try:
        params = msgspec.json.decode(body, type=_Prefilled).kv_transfer_params
    except msgspec.MsgspecError:
        return None
    return None if bytes(params) == b"null" else params


async def _prefilled(exchange: Exchange) -> WholeAnswer | None:
    """What a prefill backend answers; None if none of them can."""
    answers: list[WholeAnswer] = []

    async def take(answer: Answer) -> None:
        body = await answer.body(_MOST_BYTES)
        answers.append(WholeAnswer(answer.status, answer.headers, body))

    try:
        await exchange.ask(Role.PREFILL, take)
    except (UpstreamError, NoBackendError, ModelNotFoundError) as error:
        logger.warning("no prefill backend computes a prompt: %s", error)
    if answers and answers[0].status >= 500:
        logger.warning("a prefill backend has answered with status %d", answers[0].status)
        return None
    return answers[0] if answers else None


def _fields_of(body: bytes) -> _Fields | None:
    try:
        return msgspec.json.decode(body, type=_Fields)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # the backend says what is wrong with it
