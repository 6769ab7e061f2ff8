"""Files of requests in OpenAI's batch format, answered by the application without a socket.

A line is `{"custom_id", "method": "POST", "url", "body"}`; its result has the status and the body
that a client would have got. Results are written as they come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from tokenmill.entrypoints.http.app import create_app
from tokenmill.entrypoints.http.error_shapes import OVERLOADED
from tokenmill.entrypoints.http.errors import error_body
from tokenmill.entrypoints.http.state import ServerState
from tokenmill.errors import EngineDeadError, InvalidRequestError, shown

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
)
"""What a line may ask for."""
_LONGEST_ID = 1_024
_PAUSE = 1.0
"""Seconds after which a request that found the queue full tries again, if none ends before."""


class BatchLine(msgspec.Struct, kw_only=True):
    """One request."""

    custom_id: str
    method: str = "POST"
    url: str
    body: msgspec.Raw


class _Modes(msgspec.Struct):
    """Fields of a body whose answer would not be one whole."""

    stream: Any = None
    background: Any = None


@dataclass(slots=True)
class BatchCounts:
    """What has become of the requests."""

    num_done: int = 0
    num_failed: int = 0
    """Of these, with another status than 200."""


def read_batch(lines: Iterable[bytes]) -> Iterator[BatchLine]:
    """The requests of a file's lines; empty ones are passed over.

    Raises `InvalidRequestError` with the line's number.
    """
    seen: set[str] = set()
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        try:
            line = msgspec.json.decode(raw, type=BatchLine)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _wrong(number, f"is no request of a batch: {error}") from error
        if line.custom_id in seen:
            raise _wrong(number, f"has the custom_id {shown(line.custom_id)} of an earlier line")
        if len(line.custom_id) > _LONGEST_ID:
            raise _wrong(number, f"has a custom_id of more than {_LONGEST_ID} characters")
        if line.method != "POST":
            raise _wrong(number, f"has the method {shown(line.method)}; it must be POST")
        if line.url not in URLS:
            raise _wrong(
                number, f"has the url {shown(line.url)}; it must be one of {', '.join(URLS)}"
            )
        if not bytes(line.body).lstrip().startswith(b"{"):
            raise _wrong(number, "has a body that is no object")
        seen.add(line.custom_id)
        yield line


def answered_ids(lines: Iterable[bytes]) -> set[str]:
    """The ids of requests that a file of results has an answer to; a last line that was cut off in
    the middle is none.
    """
    found = set()
    for raw in lines:
        try:
            result = msgspec.json.decode(raw)
            if result["response"]["status_code"] == 200:
                found.add(result["custom_id"])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
            continue
    return found


class BatchRunner:
    """Answers requests, so many at once that the engine always has the next ones."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._app = create_app(state)
        running = state.engine.config.scheduler.max_num_seqs
        self._concurrency = min(2 * running, state.admission.max_sequences)
        self._ended = asyncio.Event()
        self.counts = BatchCounts()

    async def run(self, lines: Iterable[BatchLine], write: Callable[[bytes], None]) -> None:
        """Answer all of them; `write` gets each result as a line, and its errors end the run.

        Raises `EngineDeadError`.
        """
        remaining = iter(lines)

        async def work() -> None:
            for line in remaining:  # shared: whoever is free takes the next one
                write(await self._answer(line))

        tasks = [asyncio.create_task(work()) for _ in range(self._concurrency)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, line: BatchLine) -> bytes:
        while True:
            request_id = self._state.new_name()
            status, body = await self._status_and_body(line, request_id)
            if status in (503, OVERLOADED):  # nobody stops this server: there is no engine
                raise EngineDeadError("the engine is dead; the requests without a result remain.")
            if status != 429:
                break
            # Wider requests than expected (`n`) have filled the queue: it is not full for long.
            self._ended.clear()
            try:
                await asyncio.wait_for(self._ended.wait(), _PAUSE)
            except TimeoutError:
                continue
        self._ended.set()
        self.counts.num_done += 1
        self.counts.num_failed += status != 200
        response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
        result = {
            "id": f"batch_req_{request_id}",
            "custom_id": line.custom_id,
            "response": response,
            "error": None,
        }
        return msgspec.json.encode(result) + b"\n"

    async def _status_and_body(self, line: BatchLine, request_id: str) -> tuple[int, bytes]:
        body = bytes(line.body)
        try:
            modes = msgspec.json.decode(body, type=_Modes)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            modes = _Modes()  # the application says what is wrong
        for name in ("stream", "background"):
            if getattr(modes, name):
                error = InvalidRequestError(
                    f"{name}: a batch has whole answers only; leave it out.", parameter=name
                )
                return 400, error_body(error)
        return await _call(self._app, line.url, body, request_id)


async def _call(app: ASGIApp, path: str, body: bytes, request_id: str) -> tuple[int, bytes]:
    """(status, body) of a POST request, whose client stays until it is answered."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("ascii"),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode("ascii")),
            (b"x-request-id", request_id.encode("ascii")),
        ],
        "client": None,
        "server": None,
    }
    unread = [body]
    status = 0
    pieces: list[bytes] = []

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await asyncio.Future()  # nothing more, and nobody leaves

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            pieces.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, b"".join(pieces)


def _wrong(number: int, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"line {number} {what}.", parameter="input_file")
