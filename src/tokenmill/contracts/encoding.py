"""How what msgspec knows nothing of is sent to another process: exceptions, log records, classes,
mappings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import msgspec

import tokenmill.errors
from tokenmill.errors import EngineDeadError, InvalidRequestError, TokenmillError


class ErrorInfo(msgspec.Struct, array_like=True):
    """One of our exceptions, on its way to another process."""

    kind: str
    """Its class in `errors.py`; others count as `EngineDeadError`."""
    message: str
    parameter: str | None = None


class LogRecord(msgspec.Struct, array_like=True, tag=0):
    """A log record of a process whose starter has the handlers."""

    name: str
    level: int
    message: str
    """With the traceback of an exception, if there is one."""
    created: float
    """Seconds since the epoch."""

    def hand_on(self) -> None:
        """Give it to this process's handlers."""
        logger = logging.getLogger(self.name)
        made = logger.makeRecord(self.name, self.level, "", 0, "%s", (self.message,), None)
        made.created = self.created
        logger.handle(made)


class LogSender(logging.Handler):
    """Gives the records of a process to its starter, whose handlers decide how they look."""

    def __init__(self, send: Callable[[LogRecord], object], prefix: str = "") -> None:
        """`send` is called with each record, behind `prefix`, from any thread."""
        super().__init__()
        self._send = send
        self._prefix = prefix

    def emit(self, record: logging.LogRecord) -> None:
        # The formatter's text has the traceback of an exception, if there is one.
        text = self._prefix + self.format(record)
        self._send(LogRecord(record.name, record.levelno, text, record.created))


def describe(error: BaseException) -> ErrorInfo:
    """An exception in a form that can be sent."""
    if not isinstance(error, TokenmillError):
        return ErrorInfo(EngineDeadError.__name__, f"{type(error).__name__}: {error}")
    return ErrorInfo(type(error).__name__, str(error), getattr(error, "parameter", None))


def rebuild(info: ErrorInfo) -> TokenmillError:
    """The exception that `describe` took apart."""
    kind = getattr(tokenmill.errors, info.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, TokenmillError)):
        return EngineDeadError(info.message)
    if issubclass(kind, InvalidRequestError):
        return kind(info.message, parameter=info.parameter)
    return kind(info.message)


def plain(value: Any) -> Any:
    """What msgspec knows no encoding for: read-only mappings in a model's config, and classes of
    logits processors, which the other process finds by name.
    """
    if isinstance(value, MappingProxyType):
        return dict(value)
    if isinstance(value, type):
        return f"{value.__module__}:{value.__qualname__}"
    raise NotImplementedError(f"a {type(value).__name__} cannot be sent to another process")
