"""All requests that have a grammar, and the masks of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import numpy as np

from tokenmill.config.structured_outputs import StructuredOutputsConfig
from tokenmill.contracts.plan import GrammarOutput, SchedulerOutput
from tokenmill.contracts.request import EngineCoreRequest
from tokenmill.contracts.seams import GrammarProgress
from tokenmill.errors import InvalidRequestError
from tokenmill.structured_output.backend import Bitmask, GrammarBackend
from tokenmill.structured_output.compiler import GrammarCompiler, Job
from tokenmill.structured_output.request_grammar import RequestGrammar
from tokenmill.structured_outputs import StructuredOutputsParams

_POLL_SECONDS = 0.01


@dataclass(slots=True)
class _Entry:
    """A request from its arrival to its end."""

    request: EngineCoreRequest
    job: Job[RequestGrammar]
    grammar: RequestGrammar | None = None
    """Once it is ready."""


@dataclass(frozen=True, slots=True)
class _Row:
    """The mask rows of one request in a step: one, and one more for each draft."""

    req_id: str
    grammar: RequestGrammar
    draft_ids: Sequence[int]


class StructuredOutputManager:
    """A `GrammarManager`. Used by the engine core's thread; masks are filled in another one.

    Args:
        config: how grammars are enforced.
        make_backend: builds the backend when the first request needs it.
        vocab_size: width of the logits.
    """

    def __init__(
        self,
        config: StructuredOutputsConfig,
        make_backend: Callable[[], GrammarBackend],
        *,
        vocab_size: int,
    ) -> None:
        self._config = config
        self._compiler = GrammarCompiler(make_backend, timeout=config.compile_timeout)
        self._num_words = -(-vocab_size // 32)
        self._entries: dict[str, _Entry] = {}
        self._unready: dict[str, _Entry] = {}
        self._backend: GrammarBackend | None = None
        self._filler = ThreadPoolExecutor(1, thread_name_prefix="tokenmill-masks")
        self._filling: tuple[int, Future[GrammarOutput | None]] | None = None

    # ---- requests come and go ---------------------------------------------------------------

    def add(self, request: EngineCoreRequest) -> None:
        """Begin to compile the grammar of a request that has one."""
        params = request.sampling_params.structured_outputs
        assert params is not None
        config = self._config
        params = _with_defaults(params, config)

        def prepare(backend: GrammarBackend) -> RequestGrammar:
            self._backend = backend
            grammar = RequestGrammar(
                request,
                self._compiler.compile(backend, params).make_matcher(),
                eos_token_ids=backend.eos_token_ids,
                enable_in_reasoning=config.enable_in_reasoning,
            )
            refused = grammar.accept(request.initial_output_ids)
            if refused is not None:
                raise InvalidRequestError(
                    f"structured_outputs: the output so far does not fit: {refused}.",
                    parameter="structured_outputs",
                )
            return grammar

        entry = _Entry(request, self._compiler.submit(prepare))
        self._entries[request.request_id] = self._unready[request.request_id] = entry

    def remove(self, request_id: str) -> None:
        """Forget a request that has ended; others are passed over."""
        self._entries.pop(request_id, None)
        self._unready.pop(request_id, None)

    def is_ready(self, request_id: str) -> bool:
        """Whether the request may start: its grammar was compiled when `take_failures` was last
        asked, or it has none.
        """
        entry = self._entries.get(request_id)
        return entry is None or entry.grammar is not None

    def compiling(self) -> list[str]:
        """Requests whose grammar is not ready yet, in their order."""
        return list(self._unready)

    def take_failures(self) -> list[tuple[str, InvalidRequestError]]:
        """Requests whose grammar could not be compiled, and why; each once."""
        if not self._unready:
            return []
        failures = []
        for request_id, entry in list(self._unready.items()):
            self._compiler.give_up_if_overdue(entry.job)
            if entry.job.is_done:
                error = self._settle(entry)
                if error is not None:
                    failures.append((request_id, error))
        return failures

    def wait(self, request_id: str) -> None:
        """Wait until a request's grammar is compiled, or has failed; `take_failures` tells."""
        entry = self._entries.get(request_id)
        while entry is not None and not entry.job.wait(_POLL_SECONDS):
            self._compiler.give_up_if_overdue(entry.job)

    # ---- a request goes on ------------------------------------------------------------------

    def start(self, request_id: str, max_forced: int) -> list[int]:
        """Tokens that are forced before anything is sampled, at most so many, and never the whole
        text; they count as accepted.
        """
        grammar = self._grammar(request_id)
        return grammar.take_forced_start(max_forced) if self._may_force(grammar) else []

    def advance(
        self, request_id: str, token_ids: Sequence[int], max_forced: int
    ) -> GrammarProgress:
        """Go on over a request's new tokens, and over at most `max_forced` forced ones."""
        grammar = self._grammar(request_id)
        error = grammar.accept(token_ids)
        if error is not None:
            return GrammarProgress(error=error)
        forced = self._take_forced(grammar, max_forced)
        return GrammarProgress(
            forced_token_ids=forced,
            is_terminated=grammar.is_terminated,
            num_forced_left=grammar.num_forced if self._may_force(grammar) else 0,
        )

    def cut_drafts(self, request_id: str, draft_ids: Sequence[int]) -> list[int]:
        """The drafts up to the first one that the grammar would refuse."""
        return self._grammar(request_id).cut_drafts(draft_ids)

    # ---- masks ------------------------------------------------------------------------------

    def begin(self, plan: SchedulerOutput) -> None:
        """Begin to fill the masks of a plan, beside whatever the caller does next."""
        rows = self._rows(plan)
        if rows:
            self._filling = plan.step_id, self._filler.submit(self._fill, rows)

    def get_grammar_bitmask(self, plan: SchedulerOutput) -> GrammarOutput | None:
        """The masks of a plan; None if nothing is restricted in it."""
        filling, self._filling = self._filling, None
        if filling is not None and filling[0] == plan.step_id:
            return filling[1].result()
        rows = self._rows(plan)
        return self._fill(rows) if rows else None

    def failure(self, request_id: str) -> str | None:
        """Why the request's grammar cannot go on, if it cannot."""
        entry = self._entries.get(request_id)
        error = "" if entry is None or entry.grammar is None else entry.grammar.matcher.error()
        return f"The request's grammar cannot go on: {error}." if error else None

    def shutdown(self) -> None:
        """End the threads."""
        self._filler.shutdown()
        self._compiler.shutdown()

    # ---- inside -----------------------------------------------------------------------------

    def _settle(self, entry: _Entry) -> InvalidRequestError | None:
        """Take in a job that is done; the error, if it has failed."""
        self._unready.pop(entry.request.request_id, None)
        try:
            entry.grammar = entry.job.result()
        except InvalidRequestError as error:
            return error
        return None

    def _grammar(self, request_id: str) -> RequestGrammar:
        grammar = self._entries[request_id].grammar
        assert grammar is not None, f"the grammar of {request_id} is not ready"
        return grammar

    def _may_force(self, grammar: RequestGrammar) -> bool:
        return self._config.enable_forced_tokens and grammar.may_append_forced

    def _take_forced(self, grammar: RequestGrammar, max_count: int) -> list[int]:
        return grammar.take_forced(max_count) if self._may_force(grammar) else []

    def _rows(self, plan: SchedulerOutput) -> list[_Row]:
        """The requests of a plan that are restricted; who has ended meanwhile is not."""
        rows = []
        for req_id in plan.structured_req_ids:
            entry = self._entries.get(req_id)
            if entry is not None and entry.grammar is not None and entry.grammar.is_active:
                drafts = plan.draft_token_ids.get(req_id, ())
                rows.append(_Row(req_id, entry.grammar, drafts))
        return rows

    def _fill(self, rows: list[_Row]) -> GrammarOutput:
        """The masks; a request whose matcher is lost gets one that allows nothing, which ends it
        with an error.
        """
        assert self._backend is not None
        bitmask = np.zeros((sum(1 + len(row.draft_ids) for row in rows), self._num_words), np.int32)
        plain = [row.grammar.matcher for row in rows if not row.draft_ids]
        if len(plain) == len(rows):
            self._backend.fill_bitmasks(plain, bitmask)
            for row, words in zip(rows, bitmask, strict=True):
                _finish_row(row.grammar, words)
        else:
            first = 0
            for row in rows:
                self._fill_drafts(row, bitmask[first : first + 1 + len(row.draft_ids)])
                first += 1 + len(row.draft_ids)
        return GrammarOutput([row.req_id for row in rows], bitmask.tobytes())

    def _fill_drafts(self, row: _Row, bitmask: Bitmask) -> None:
        """The masks of a request with drafts: one after the other, as the text would go on."""
        assert self._backend is not None
        grammar = row.grammar
        for place in grammar.walk(row.draft_ids):
            self._backend.fill_bitmasks([grammar.matcher], bitmask[place : place + 1])
            _finish_row(grammar, bitmask[place])


def _finish_row(grammar: RequestGrammar, words: Bitmask) -> None:
    if grammar.matcher.error():
        words[:] = 0
    else:
        grammar.edit_mask(words)


def _with_defaults(
    params: StructuredOutputsParams, config: StructuredOutputsConfig
) -> StructuredOutputsParams:
    """The form with what the engine says where the request says nothing."""
    changes = {}
    if config.disable_any_whitespace and params.kind in ("json", "json_object"):
        changes["disable_any_whitespace"] = params.whitespace_pattern is None
    if config.disable_additional_properties and params.kind == "json":
        changes["disable_additional_properties"] = True
    return msgspec.structs.replace(params, **changes) if changes else params
