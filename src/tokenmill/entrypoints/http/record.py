"""What is noted about one HTTP request, for the log and the metrics: no prompt, no key."""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from tokenmill.entrypoints.http.auth import Headers
from tokenmill.errors import InvalidRequestError, shown

ANSWERED_HEADERS = ("x-request-id", "request-id", "retry-after")
"""Headers of ours that pages of other origins may read."""
CLIENT_GONE = 499
"""Status in the log where the client left before its answer was complete; nginx's number."""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
"""Ids that come back as they are; others could break a header or a log line."""
_MAX_RANK_DIGITS = 6


@dataclass(slots=True)
class RequestRecord:
    """Filled in on the way."""

    request_id: str
    """The client's `x-request-id`, or one of ours: for logs and for answers, never a key."""
    method: str
    path: str
    started: float = field(default_factory=time.monotonic)
    key_name: str | None = None
    """Which API key was used, by a name that does not tell the key."""
    status: int = 0
    code: str | None = None
    """Of the error, if it ended with one."""
    data_parallel_rank: int | None = None
    """The replica that the request asks for."""
    stream: bool = False
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    first_token_time: float | None = None
    trace_context: Any = None
    """The trace that the client's request belongs to, if spans are made."""

    def choose_rank(self, data_parallel_rank: int | None) -> None:
        """A field in the body goes before the header."""
        if data_parallel_rank is not None:
            self.data_parallel_rank = data_parallel_rank

    def fields(self) -> dict[str, object]:
        """For a log line."""
        now = time.monotonic()
        values: dict[str, object] = {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "seconds": round(now - self.started, 4),
        }
        if self.code is not None:
            values["code"] = self.code
        if self.num_prompt_tokens:
            values["prompt_tokens"] = self.num_prompt_tokens
            values["output_tokens"] = self.num_output_tokens
            values["stream"] = self.stream
        if self.first_token_time is not None:
            values["first_token_seconds"] = round(self.first_token_time - self.started, 4)
        return values


def data_parallel_rank_of(headers: Headers) -> int | None:
    """What `X-data-parallel-rank` says, if it is there. Raises `InvalidRequestError`."""
    for name, value in headers:
        if name == b"x-data-parallel-rank":
            if not (value.isdigit() and len(value) <= _MAX_RANK_DIGITS):
                raise InvalidRequestError(
                    f"x-data-parallel-rank={shown(value.decode('latin-1'))} must be the number of a"
                    f" replica, from 0 on.",
                    parameter="data_parallel_rank",
                )
            return int(value)
    return None


def request_id_of(headers: Headers) -> str:
    """The client's id if it is harmless, else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value.decode("ascii")
    return uuid.uuid4().hex
