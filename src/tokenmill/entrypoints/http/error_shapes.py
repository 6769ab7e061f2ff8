"""How an error looks to a client: by the dialect of the path that it asked for."""

from __future__ import annotations

from typing import Any

import msgspec

from tokenmill.entrypoints.http.errors import error_object, status_of

OVERLOADED = 529
"""Anthropic's status of a server that cannot take requests now; its clients try again."""
_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


class ErrorShape:
    """OpenAI's: `{"error": {"message", "type", "param", "code"}}`."""

    id_headers: tuple[bytes, ...] = (b"x-request-id",)
    """Names under which every answer has its request's id."""

    def status(self, error: Exception) -> int:
        """HTTP status."""
        return status_of(error)

    def body(self, error: Exception, request_id: str) -> bytes:
        """JSON; `request_id` is the one that the headers have."""
        return msgspec.json.encode(error_object(error))


class AnthropicErrorShape(ErrorShape):
    """`{"type": "error", "error": {"type", "message", "details"}, "request_id"}`.

    `details` has our code and the field at fault, under the names that the client's library reads.
    """

    id_headers = (b"x-request-id", b"request-id")

    def status(self, error: Exception) -> int:
        """As in OpenAI's shape, but for a server that is about to stop or to start again."""
        status = status_of(error)
        return OVERLOADED if status == 503 else status

    def body(self, error: Exception, request_id: str) -> bytes:
        """JSON."""
        ours = error_object(error)["error"]
        status = self.status(error)
        kind = _ANTHROPIC_TYPES.get(
            status, "invalid_request_error" if status < 500 else "api_error"
        )
        details: dict[str, Any] = {"error_code": ours["code"]}
        if ours["param"] is not None:
            details["param"] = ours["param"]
        theirs = {"type": kind, "message": ours["message"], "details": details}
        return msgspec.json.encode({"type": "error", "error": theirs, "request_id": request_id})


OPENAI_ERRORS = ErrorShape()
ANTHROPIC_ERRORS = AnthropicErrorShape()


def error_shape(path: str) -> ErrorShape:
    """The shape for a path, which need not exist."""
    is_theirs = path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")
    return ANTHROPIC_ERRORS if is_theirs else OPENAI_ERRORS
