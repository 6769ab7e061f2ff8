"""Errors of the server itself, and how every error looks to a client.

The body is OpenAI's: `{"error": {"message", "type", "param", "code"}}`, `code` a string or null.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from tokenmill.entrypoints.http.admission import MAX_RETRY_SECONDS
from tokenmill.errors import (
    EngineDeadError,
    EngineDrainingError,
    InvalidRequestError,
    ModelNotFoundError,
    QueueFullError,
    TokenmillError,
)

RETRY_SECONDS = 1
"""`Retry-After` where nothing better is known."""


class UnavailableError(TokenmillError):
    """The server is about to stop, or its engine to start again."""

    http_status = 503
    code = "unavailable"


class DeadlineExceededError(TokenmillError):
    """The request did not finish within its time."""

    http_status = 504
    code = "deadline_exceeded"


class AuthenticationError(TokenmillError):
    """No API key, or a wrong one."""

    http_status = 401
    code = "invalid_api_key"


class AdminDisabledError(TokenmillError):
    """An administrative endpoint that is not switched on."""

    http_status = 403
    code = "admin_disabled"


class NotFoundError(TokenmillError):
    """No such path."""

    http_status = 404
    code = "not_found"


class ResponseNotFoundError(TokenmillError):
    """No response with this id is kept for this client."""

    http_status = 404
    code = "response_not_found"


class PreviousResponseNotFoundError(InvalidRequestError):
    """The response that a request continues is not kept, or no longer."""

    code = "previous_response_not_found"


class MethodNotAllowedError(TokenmillError):
    """The path exists, but not for this method."""

    http_status = 405
    code = "method_not_allowed"


class CacheBusyError(TokenmillError):
    """The prefix cache cannot be reset while requests run."""

    http_status = 409
    code = "cache_busy"


class SlowBodyError(TokenmillError):
    """The body did not arrive in time."""

    http_status = 408
    code = "request_timeout"


class BodyTooLargeError(TokenmillError):
    """The body exceeds the server's limit."""

    http_status = 413
    code = "body_too_large"


class UnsupportedMediaTypeError(TokenmillError):
    """The body is said to be something else than JSON."""

    http_status = 415
    code = "unsupported_media_type"


class ClientDisconnectedError(Exception):
    """The client went away; there is nobody to answer."""


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
STATUS_TEXT = {
    400: "The request is wrong; the body says what and why.",
    401: "No API key, or a wrong one.",
    403: "The endpoint is switched off.",
    404: "No such model or path.",
    405: "The path exists, but not for this method.",
    409: "Requests are running; try again later.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is said to be something else than JSON.",
    429: "The queue is full; try again after `Retry-After` seconds.",
    500: "The request failed in the engine, or the server has a fault.",
    503: "The server is stopping, or its engine is starting.",
    504: "The request did not finish within its time.",
}


def error_object(error: Exception) -> dict[str, Any]:
    """`{"error": {...}}` for any exception; of an unforeseen one only that it happened."""
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    if not isinstance(error, TokenmillError):
        detail = {"message": "The server failed on this request; its log says more."}
        return {"error": {**detail, "type": kind, "param": None, "code": "internal_error"}}
    parameter = error.parameter if isinstance(error, InvalidRequestError) else None
    if isinstance(error, ModelNotFoundError):
        parameter = "model"
    return {"error": {"message": str(error), "type": kind, "param": parameter, "code": error.code}}


@contextmanager
def blamed_on_fields(names: Mapping[str, str]) -> Iterator[None]:
    """What the engine has against one of its parameters, the client gets to hear about the field
    that it sent: `names` has the field for each parameter that is called otherwise.
    """
    try:
        yield
    except InvalidRequestError as error:
        parameter = error.parameter or ""
        if parameter not in names:
            raise
        name = names[parameter]
        message = re.sub(rf"^{re.escape(parameter)}\b", lambda _: name, str(error))
        raise type(error)(message, parameter=name) from error


def error_body(error: Exception) -> bytes:
    """`error_object` as JSON."""
    return msgspec.json.encode(error_object(error))


def status_of(error: Exception) -> int:
    return error.http_status if isinstance(error, TokenmillError) else 500


def error_headers(error: Exception) -> dict[str, str]:
    """Headers that tell a client whether and when to try again."""
    if isinstance(error, QueueFullError):
        seconds = min(max(math.ceil(error.retry_after), 1), MAX_RETRY_SECONDS)
        return {"retry-after": str(seconds)}
    if isinstance(error, UnavailableError | EngineDeadError | EngineDrainingError):
        return {"retry-after": str(RETRY_SECONDS), "connection": "close"}
    if isinstance(error, AuthenticationError):
        return {"www-authenticate": "Bearer"}
    if isinstance(error, DeadlineExceededError):  # it would only take as long again
        return {"x-should-retry": "false"}
    if isinstance(error, BodyTooLargeError | SlowBodyError):
        return {"connection": "close"}
    return {}
