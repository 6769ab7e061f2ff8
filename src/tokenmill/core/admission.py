"""What may be queued, and what may start: short lists of rules.

An `AcceptanceRule` refuses a request that could never be served, before it is queued. A
`ReadinessRule` holds a queued request back for a while; the requests behind it are not affected.
Features add rules of their own in `build.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tokenmill.contracts.request import EngineCoreRequest
from tokenmill.core.request import Request
from tokenmill.errors import ContextLengthExceededError, InvalidRequestError


class AcceptanceRule(Protocol):
    """Refuses what can never be served."""

    def check(self, request: EngineCoreRequest) -> None:
        """Raise `InvalidRequestError` if the request is impossible."""
        ...


class ReadinessRule(Protocol):
    """Holds back what cannot start yet."""

    def begin_pass(self, running: Mapping[str, Request]) -> None:
        """Waiting requests will be asked for, in their order, beside those that run, by id."""
        ...

    def wait_reason(self, request: Request) -> str | None:
        """Why the request may not start now, in a few words; None if it may."""
        ...


class ReadinessRules:
    """Several rules; the first that holds a request back says why."""

    def __init__(self, *rules: ReadinessRule) -> None:
        self._rules = rules
        self.is_closed = False
        """Whether nobody may start who has not before."""

    def begin_pass(self, running: Mapping[str, Request]) -> None:
        for rule in self._rules:
            rule.begin_pass(running)

    def wait_reason(self, request: Request) -> str | None:
        if self.is_closed and request.first_scheduled_time is None:
            return "paused"
        reasons = (rule.wait_reason(request) for rule in self._rules)
        return next(filter(None, reasons), None)


@dataclass(frozen=True, slots=True)
class FitsContext:
    """Prompt and earlier output leave room for a token in the model's context."""

    max_model_len: int

    def check(self, request: EngineCoreRequest) -> None:
        num_tokens = _num_tokens(request)
        if request.pooling is not None and num_tokens == self.max_model_len:
            return  # nothing follows
        if num_tokens >= self.max_model_len:
            raise ContextLengthExceededError(
                f"prompt has {num_tokens} tokens, which leaves no room for output:"
                f" max_model_len={self.max_model_len}. Shorten the prompt to at most"
                f" {self.max_model_len - 1} tokens.",
                parameter="prompt",
            )


@dataclass(frozen=True, slots=True)
class FitsPool:
    """The prompt fits the KV cache when nothing else is in it."""

    num_usable_tokens: int

    def check(self, request: EngineCoreRequest) -> None:
        num_tokens = _num_tokens(request)
        if num_tokens > self.num_usable_tokens:
            raise InvalidRequestError(
                f"prompt has {num_tokens} tokens, but the whole KV cache holds"
                f" {self.num_usable_tokens}. Shorten the prompt, or raise num_kv_blocks.",
                parameter="prompt",
            )


class HasTokensToGenerate:
    """The prompt has a token to start from, and `max_tokens` is not used up."""

    def check(self, request: EngineCoreRequest) -> None:
        if not request.prompt_token_ids:
            raise InvalidRequestError("prompt has 0 tokens; give at least one.", parameter="prompt")
        num_generated = len(request.initial_output_ids)
        if num_generated >= request.max_tokens:
            raise InvalidRequestError(
                f"max_tokens={request.max_tokens}: {num_generated} tokens are generated already"
                " (initial_output_ids), so nothing is left to do. Raise max_tokens.",
                parameter="max_tokens",
            )


class OutputSettled:
    """A preempted request resumes once the tokens it has in flight are known."""

    def begin_pass(self, running: Mapping[str, Request]) -> None:
        """It is the same in every pass."""

    def wait_reason(self, request: Request) -> str | None:
        return "output in flight" if request.num_steps_in_flight else None


def _num_tokens(request: EngineCoreRequest) -> int:
    return len(request.prompt_token_ids) + len(request.initial_output_ids)


def acceptance_rules(max_model_len: int, num_usable_tokens: int) -> tuple[AcceptanceRule, ...]:
    """What every request is asked when it comes, for this context and this pool (tokens)."""
    return HasTokensToGenerate(), FitsContext(max_model_len), FitsPool(num_usable_tokens)
