"""Protocols at which parts meet. Each has a trivial implementation, so that "off" is an object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from tokenmill.contracts.kv_transfer import BlockCopy, RemoteOrigin, Transferred
from tokenmill.contracts.plan import GrammarOutput, SchedulerOutput
from tokenmill.contracts.request import AdapterInfo, EngineCoreRequest
from tokenmill.contracts.result import ModelRunnerOutput
from tokenmill.errors import InvalidRequestError


class StepFuture(Protocol):
    """A step under way."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step and return its result."""
        ...


class Executor(Protocol):
    """Carries plans to the workers. Calls return at once; steps run in the order of the calls."""

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Start the forward pass of a plan."""
        ...

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> StepFuture:
        """Sample after the forward pass that was started last."""
        ...

    def load_adapter(self, directory: str) -> Future[AdapterInfo]:
        """Have the workers read an adapter and check it, beside the steps. The result raises
        `AdapterError` for one that is not good.
        """
        ...

    def shutdown(self) -> None:
        """Stop the workers and free what they hold; may be called twice."""
        ...


@dataclass(slots=True)
class GrammarProgress:
    """What has become of a request's grammar by new tokens."""

    error: str | None = None
    """Why the request cannot go on."""
    is_terminated: bool = False
    """Whether the text is complete and nothing can follow."""
    forced_token_ids: list[int] = field(default_factory=list)
    """Tokens that come next without a choice; the grammar has gone on over them."""
    num_forced_left: int = 0
    """Forced tokens that were not taken, since there was no room for them."""


class GrammarManager(Protocol):
    """Follows every request whose text must have a form, and makes the masks of a step.

    A request is in here from `add` to `remove`; its grammar is compiled beside the engine's loop.
    """

    def add(self, request: EngineCoreRequest) -> None:
        """A request with `structured_outputs` has been queued.

        Raises `InvalidRequestError` if there are no grammars here.
        """
        ...

    def remove(self, request_id: str) -> None:
        """A request has ended, whether or not it is in here."""
        ...

    def is_ready(self, request_id: str) -> bool:
        """Whether the request may start; a request that is not in here may."""
        ...

    def compiling(self) -> list[str]:
        """Requests that are not ready yet, in their order."""
        ...

    def take_failures(self) -> list[tuple[str, InvalidRequestError]]:
        """Requests whose grammar cannot be had, each told once; they never become ready."""
        ...

    def wait(self, request_id: str) -> None:
        """Wait until `take_failures` has its answer about a request."""
        ...

    def start(self, request_id: str, max_forced: int) -> list[int]:
        """Tokens that come before anything is sampled, at most so many, and never the whole text:
        something is left to sample.
        """
        ...

    def advance(
        self, request_id: str, token_ids: Sequence[int], max_forced: int
    ) -> GrammarProgress:
        """Go on over new tokens of a request, and over at most `max_forced` forced ones."""
        ...

    def cut_drafts(self, request_id: str, draft_ids: Sequence[int]) -> list[int]:
        """The drafts up to the first one that the grammar would refuse, or that would complete the
        text.
        """
        ...

    def begin(self, plan: SchedulerOutput) -> None:
        """Begin to fill the masks of a plan, while its forward pass runs."""
        ...

    def get_grammar_bitmask(self, plan: SchedulerOutput) -> GrammarOutput | None:
        """Masks for the plan's structured requests; None if there are none."""
        ...

    def failure(self, request_id: str) -> str | None:
        """Why the masks of a request allow nothing any more; None if they do, or for another."""
        ...

    def shutdown(self) -> None:
        """End what runs beside the loop; may be called twice."""
        ...


class NoGrammars:
    """No request is restricted by a grammar."""

    def add(self, request: EngineCoreRequest) -> None:
        raise InvalidRequestError(
            "structured_outputs needs a tokenizer, and the engine has none (skip_tokenizer_init).",
            parameter="structured_outputs",
        )

    def remove(self, request_id: str) -> None:
        """It is not in here."""

    def is_ready(self, request_id: str) -> bool:
        return True

    def compiling(self) -> list[str]:
        return []

    def take_failures(self) -> list[tuple[str, InvalidRequestError]]:
        return []

    def wait(self, request_id: str) -> None:
        """There is nothing to wait for."""

    def start(self, request_id: str, max_forced: int) -> list[int]:
        return []

    def advance(
        self, request_id: str, token_ids: Sequence[int], max_forced: int
    ) -> GrammarProgress:
        return GrammarProgress()

    def cut_drafts(self, request_id: str, draft_ids: Sequence[int]) -> list[int]:
        return list(draft_ids)

    def begin(self, plan: SchedulerOutput) -> None:
        """Nothing is to be filled."""

    def get_grammar_bitmask(self, plan: SchedulerOutput) -> GrammarOutput | None:
        return None

    def failure(self, request_id: str) -> str | None:
        return None

    def shutdown(self) -> None:
        """Nothing runs."""


class KVTransfer(Protocol):
    """Keeps KV outside the pool, and copies blocks to there and from there beside the steps.

    Called by the engine's thread only. What `load` and `save` name belongs to the job until it is
    told as finished: no step writes to it, nor, in a load, reads it.
    """

    @property
    def root(self) -> bytes:
        """Parent hash of every first block, 32 bytes: equal in engines whose KV of equal tokens has
        equal bytes.
        """
        ...

    @property
    def fails_requests(self) -> bool:
        """Whether a request ends with an error if its KV could not be loaded."""
        ...

    @property
    def keeps_blocks(self) -> bool:
        """Whether `save` has a place to keep them."""
        ...

    def has(self, key: bytes) -> bool:
        """Whether a block is kept here, for all that is known."""
        ...

    def load(self, job_id: int, blocks: Sequence[BlockCopy], origin: RemoteOrigin | None) -> None:
        """Begin to fill blocks of the pool, with what is kept here or else at `origin`."""
        ...

    def save(self, job_id: int, blocks: Sequence[BlockCopy]) -> None:
        """Begin to keep what blocks of the pool hold."""
        ...

    def hold(self, job_id: int, request_id: str, blocks: Sequence[BlockCopy]) -> Mapping[str, Any]:
        """Let another engine fetch blocks for a while; where and how is what it must be told
        (`kv_transfer_params`, but for the block ids). Finished when it has, or the time is over.
        """
        ...

    def release(self, origin: RemoteOrigin) -> None:
        """What another engine holds is not needed."""
        ...

    def take_finished(self) -> list[Transferred]:
        """Jobs that have finished since the last call."""
        ...

    def has_finished(self) -> bool:
        """Whether `take_finished` has something to tell."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until it has, at most so long."""
        ...

    def shutdown(self) -> None:
        """End the jobs, and all that runs beside the loop; may be called twice."""
        ...
