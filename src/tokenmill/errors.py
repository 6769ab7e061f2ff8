"""Every error that a user of tokenmill can meet, as one tree.

    TokenmillError
    ├── InvalidRequestError (ValueError)      the request is wrong          400
    │   ├── UnknownArgumentError (TypeError)  a keyword nobody knows        400
    │   ├── ContextLengthExceededError        prompt and model do not fit   400
    │   ├── AdapterError                      an adapter does not fit       400
    │   └── ChatTemplateError                 a template refused or failed  400
    ├── ConfigError (ValueError)              the engine cannot be built so
    │   └── MemoryBudgetError                 ... because memory is short
    ├── ModelNotFoundError (LookupError)      no such model                 404
    ├── CheckpointError                       a model file is damaged or of a kind we cannot read
    ├── GenerationError                       one request failed in the engine   500
    ├── QueueFullError                        too many requests wait        429
    ├── EngineDrainingError                   no request is taken any more  503
    └── EngineDeadError                       the engine has stopped        503

A message names the parameter, the value, the limit, and what to do about it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar

_MAX_SHOWN = 80
"""Characters of a value in a message."""


class TokenmillError(Exception):
    """Root of the tree; `http_status` and `code` say how a server reports it."""

    http_status: ClassVar[int] = 500
    code: ClassVar[str | None] = None


class InvalidRequestError(TokenmillError, ValueError):
    """A request that is refused before it is queued. `parameter` names the field at fault."""

    http_status = 400
    code = "invalid_request_error"

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class UnknownArgumentError(InvalidRequestError, TypeError):
    """A keyword argument that does not exist; the message offers the nearest name."""

    code = "unknown_argument"


class ContextLengthExceededError(InvalidRequestError):
    """Prompt (and the tokens asked for) do not fit the model's context."""

    code = "context_length_exceeded"


class ChatTemplateError(InvalidRequestError):
    """A chat template is missing, refused the messages, or broke a limit of its sandbox."""

    code = "chat_template_error"


class AdapterError(InvalidRequestError):
    """A LoRA adapter that cannot be read, or does not fit the model; nothing of it is taken in."""

    code = "invalid_adapter"


class ConfigError(TokenmillError, ValueError):
    """A setting of the engine that cannot work; the message gives the nearest one that does."""

    code = "config_error"


class MemoryBudgetError(ConfigError):
    """Weights and KV pool do not fit the memory at hand."""

    code = "memory_budget_error"


class ModelNotFoundError(TokenmillError, LookupError):
    """No model under this name, here or at the hub."""

    http_status = 404
    code = "model_not_found"


class CheckpointError(TokenmillError):
    """A model file that is damaged, incomplete, or of a kind that cannot be read."""

    code = "checkpoint_error"


class GenerationError(TokenmillError):
    """One request failed while the engine worked on it; the others are not affected."""

    code = "generation_error"


class QueueFullError(TokenmillError):
    """Too many requests wait. `retry_after` estimates in how many seconds some will have gone."""

    http_status = 429
    code = "queue_full"

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineDrainingError(TokenmillError):
    """The engine finishes what it has and takes nothing new."""

    http_status = 503
    code = "engine_draining"


class EngineDeadError(TokenmillError):
    """The engine was closed or has stopped; build a new one."""

    http_status = 503
    code = "engine_dead"


def invalid(where: str, what: str) -> InvalidRequestError:
    """That the parameter at the path `where` is not as it must be; `what` goes on after its name,
    without a full stop.
    """
    return InvalidRequestError(f"{where} {what}.", parameter=where)


def shown(value: object) -> str:
    """`repr(value)` for a message: short, whatever the value is."""
    try:
        text = repr(value)
    except ValueError:  # Python writes out no integer of more than some thousand digits
        return f"<{type(value).__name__} too large to show>"
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A half sentence such as ` Did you mean 'seed'?`, or nothing if no name is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def refuse_unknown(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise `UnknownArgumentError` for the first of `given` that is not in `known`."""
    names = list(known)
    for name in given:
        if name not in names:
            raise UnknownArgumentError(
                f"{owner} has no argument {name!r}.{did_you_mean(name, names)}"
                f" It takes: {', '.join(sorted(names))}.",
                parameter=name,
            )
