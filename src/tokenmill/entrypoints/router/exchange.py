"""One request through the router: to a backend, to another one where nothing has come, and back."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.types import Message, Send

from tokenmill.entrypoints.http.auth import Headers
from tokenmill.entrypoints.http.record import RequestRecord
from tokenmill.entrypoints.router.backend import AGAIN_ELSEWHERE, Backend, Role, retry_after_of
from tokenmill.entrypoints.router.policies import Pick
from tokenmill.entrypoints.router.responses import PATH, IdReader
from tokenmill.entrypoints.router.routing_keys import RoutingKeys
from tokenmill.entrypoints.router.state import RouterState
from tokenmill.entrypoints.router.upstream import (
    Answer,
    ConnectError,
    UpstreamError,
    UpstreamTimeoutError,
)

_HOP_BY_HOP = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
        b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
    )
)  # fmt: skip
"""Headers that are about one connection (RFC 9110, 7.6.1)."""
_OURS = frozenset((b"host", b"content-length", b"expect", b"x-request-id"))
_KEY_HEADERS = frozenset((b"authorization", b"x-api-key"))
_MOST_REFUSAL_BYTES = 1 << 20

Take = Callable[[Answer], Awaitable[None]]
"""Handles an answer whose head has come."""


@dataclass(frozen=True, slots=True)
class Inbound:
    """A client's request, whole."""

    method: bytes
    target: bytes
    """Path and query, as they came."""
    headers: Headers
    body: bytes
    keys: RoutingKeys


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """A backend's answer in one piece."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Exchange:
    """Sends a request on and its answer back."""

    def __init__(
        self, state: RouterState, record: RequestRecord, inbound: Inbound, send: Send
    ) -> None:
        self._state = state
        self._record = record
        self._inbound = inbound
        self._send = send
        self._makes_response = record.path.endswith(PATH) and inbound.method == b"POST"
        self.backend: Backend | None = None
        """Who has it, or had it last."""

    async def run(self, role: Role = Role.ALL) -> None:
        """Answer the client. Raises `UpstreamError`, `ModelNotFoundError` or `NoBackendError` if
        nothing was sent to it; `UpstreamError` as well if an answer breaks off.
        """
        refusal = await self.ask(role, self._pass_on)
        if refusal is not None:
            await send_whole(self._send, refusal)

    async def ask(self, role: Role, take: Take) -> WholeAnswer | None:
        """Have `take` handle the answer of the first backend that does not refuse for reasons of
        its own. If all do, the last one's refusal.
        """
        state, tried = self._state, set[Backend]()
        refusal: WholeAnswer | None = None
        failure: UpstreamError | None = None
        while True:
            candidates = state.candidates(self._inbound.keys.model, role, tried)
            if not candidates or len(tried) > state.args.retries:
                if failure is not None:
                    raise failure
                if refusal is not None:
                    return refusal
                raise state.nobody(self._inbound.keys.model, role)
            pick = state.picker.pick(self._inbound.keys, candidates)
            tried.add(pick.backend)
            try:
                refusal, failure = await self._attempt(pick, take), None
            except UpstreamError as error:
                if self._record.status or isinstance(error, UpstreamTimeoutError):
                    raise
                failure, refusal = error, None
                continue
            if refusal is None:
                return None

    async def _attempt(self, pick: Pick, take: Take) -> WholeAnswer | None:
        backend, state = pick.backend, self._state
        self.backend = backend
        state.metrics.count_pick(pick, self._inbound.keys)
        backend.in_flight += 1
        started = time.monotonic()
        try:
            answer = await self._ask(backend)
            try:
                state.metrics.count_answer(backend, answer.status, time.monotonic() - started)
                backend.note_status(
                    answer.status, retry_after_of(answer), is_last=self._is_last(backend)
                )
                if answer.status in AGAIN_ELSEWHERE:
                    body = await answer.body(_MOST_REFUSAL_BYTES)
                    return WholeAnswer(answer.status, answer.headers, body)
                await take(answer)
                return None
            finally:
                answer.close()
        except UpstreamError as error:
            state.metrics.count_error(backend, error)
            if isinstance(error, ConnectError):
                backend.note_unreachable()
                state.forget(backend)
            else:
                backend.note_broken(is_last=self._is_last(backend))
            raise
        finally:
            backend.in_flight -= 1

    def _is_last(self, backend: Backend) -> bool:
        others = self._state.candidates(self._inbound.keys.model, backend.role, [backend])
        return not others

    async def _ask(self, backend: Backend) -> Answer:
        inbound = self._inbound
        return await backend.request(
            inbound.method,
            inbound.target,
            upstream_headers(self._state, backend, inbound.headers, self._record.request_id),
            inbound.body,
            timeout=self._state.args.backend_timeout,
        )

    async def _pass_on(self, answer: Answer) -> None:
        await self._send(start_message(answer.status, answer.headers))
        reader = IdReader() if self._makes_response and answer.status == 200 else None
        async for piece in answer.pieces():
            if reader is not None and (found := reader.read(piece)) is not None:
                assert self.backend is not None
                self._state.picker.responses.note(found, self.backend.index)
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})


def start_message(status: int, headers: Headers) -> Message:
    """The head of a backend's answer, for the client."""
    dropped = _dropped(headers)
    kept = [(name, value) for name, value in headers if name not in dropped]
    return {"type": "http.response.start", "status": status, "headers": kept}


async def send_whole(send: Send, answer: WholeAnswer) -> None:
    """A backend's answer to the client, in one piece."""
    await send(start_message(answer.status, answer.headers))
    await send({"type": "http.response.body", "body": answer.body})


def upstream_headers(
    state: RouterState, backend: Backend, headers: Headers, request_id: str
) -> list[tuple[bytes, bytes]]:
    """A client's headers as a backend is to see them: with its own key, if the settings have one,
    and without a key that was meant for the router.
    """
    dropped = _dropped(headers) | _OURS
    named = b"authorization"
    if state.keys or backend.api_key is not None:
        named = next((name for name, _ in headers if name in _KEY_HEADERS), named)
        dropped |= _KEY_HEADERS
    kept = [(name, value) for name, value in headers if name not in dropped]
    kept.append((b"x-request-id", request_id.encode("ascii")))
    if backend.api_key is not None:
        scheme = "Bearer " if named == b"authorization" else ""
        kept.append((named, f"{scheme}{backend.api_key}".encode()))
    return kept


def _dropped(headers: Headers) -> frozenset[bytes]:
    """Names of headers that end here: the usual ones, and those that `Connection` names."""
    named = [value for name, value in headers if name == b"connection"]
    if not named:
        return _HOP_BY_HOP
    return _HOP_BY_HOP | {each.strip().lower() for value in named for each in value.split(b",")}
