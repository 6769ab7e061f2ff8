"""One request and its grammar: where the form begins, what is forced, where the text ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tokenmill.contracts.request import EngineCoreRequest
from tokenmill.structured_output.backend import GrammarMatcher


@dataclass(slots=True)
class Reasoning:
    """Watches the output for the end of reasoning, which the form begins behind."""

    start_ids: tuple[int, ...]
    """May come first, if nothing has opened the reasoning yet."""
    end_ids: tuple[int, ...]
    is_open: bool
    """Whether the reasoning goes on; the form waits for its end."""
    may_open: bool
    """Whether the next token may begin the reasoning."""
    _last: list[int] = field(default_factory=list)

    def take(self, token_id: int) -> bool:
        """Take in an output token; False if it belongs to the form."""
        if self.is_open:
            self._last = [*self._last, token_id][-len(self.end_ids) :]
            self.is_open = tuple(self._last) != self.end_ids
            return True
        if self.may_open and token_id == self.start_ids[0]:
            self.may_open, self.is_open = False, True
            return True
        self.may_open = False
        return False


def _reasoning_of(request: EngineCoreRequest) -> Reasoning | None:
    """What there is to wait for; None if the form begins at once."""
    markers = None if request.token_rules is None else request.token_rules.reasoning
    if markers is None:
        return None
    is_open = markers.open_after(request.prompt_token_ids)
    may_open = is_open is None and len(markers.start_ids) == 1
    if not is_open and not may_open:
        return None
    return Reasoning(markers.start_ids, markers.end_ids, bool(is_open), may_open)


class RequestGrammar:
    """The matcher of one request, and what stands around it.

    A run of forced tokens is worked out once and then followed, token by token or all at once, so
    that it is the same whether tokens are appended without sampling or sampled under masks that
    allow just one.
    """

    def __init__(
        self,
        request: EngineCoreRequest,
        matcher: GrammarMatcher,
        *,
        eos_token_ids: Sequence[int] = (),
        enable_in_reasoning: bool = False,
    ) -> None:
        """`eos_token_ids` are those of the model."""
        params = request.sampling_params
        self.matcher = matcher
        self._reasoning = None if enable_in_reasoning else _reasoning_of(request)
        self._stop_ids = request.stop_token_ids
        self._ignored_ends = tuple(eos_token_ids) if params.ignore_eos else ()
        self._end_ids = frozenset(
            (request.eos_token_id, *request.stop_token_ids, *request.min_tokens_mask_ids)
        )
        self._run: list[int] = []
        self.may_append_forced = (
            params.logprobs is None
            and params.prompt_logprobs is None
            and params.allowed_token_ids is None
            and params.bad_words is None
            and params.extra_args is None
        )
        """Whether forced tokens may skip the sampler: not if somebody wants to know their
        probability, or if another rule might forbid them.
        """
        self._find_run()

    @property
    def is_active(self) -> bool:
        """Whether the next token is restricted."""
        return self._reasoning is None or not self._reasoning.is_open

    @property
    def is_terminated(self) -> bool:
        """Whether nothing can follow."""
        return self.is_active and self.matcher.is_terminated()

    @property
    def num_forced(self) -> int:
        """Length of the run of forced tokens that comes next."""
        return len(self._run) if self.is_active and not self._may_open else 0

    def accept(self, token_ids: Sequence[int]) -> str | None:
        """Go on over output tokens; returns why that cannot be, if it cannot."""
        for token_id in token_ids:
            if self._reasoning is not None and self._reasoning.take(token_id):
                continue
            if not self.matcher.accept([token_id]):
                return self.matcher.error() or f"it refuses token {token_id}"
            if self._run and self._run[0] == token_id:
                del self._run[0]
            else:
                self._run = []
            if not self._run:
                self._find_run()
        return None

    def take_forced(self, max_count: int) -> list[int]:
        """The next forced tokens, at most so many, none of them an end; they are accepted."""
        run = self._run[: max(min(self.num_forced, max_count), 0)]
        end = next((i for i, token_id in enumerate(run) if token_id in self._end_ids), None)
        forced = run[:end]
        refused = self.accept(forced)
        assert refused is None, refused
        return forced

    def take_forced_start(self, max_count: int) -> list[int]:
        """The same before anything is sampled: something is left to sample."""
        forced = self.take_forced(max_count)
        if forced and self.matcher.is_terminated():
            self.matcher.rollback(1)
            self._run = [forced.pop()]
        return forced

    def walk(self, draft_ids: Sequence[int]) -> Iterator[int]:
        """Goes over drafts that were cut: yields 0 before the first, then the number of those that
        are behind; in the end all is as before.
        """
        run, num_accepted = self._run.copy(), 0
        try:
            yield 0
            for draft_id in draft_ids:
                if self.accept([draft_id]) is not None:
                    break
                num_accepted += 1
                yield num_accepted
        finally:
            self.matcher.rollback(num_accepted)
            self._run = run

    def cut_drafts(self, draft_ids: Sequence[int]) -> list[int]:
        """The drafts up to the first one that the grammar would refuse, or that would complete the
        text: nothing may be sampled behind that one.

        The end of reasoning is not looked for in drafts: they are cut before it, and where it may
        begin there are none.
        """
        drafts = list(draft_ids)
        if self._may_open:
            return []
        if not self.is_active:
            assert self._reasoning is not None
            ends = self._reasoning.end_ids
            return drafts[: next((i for i, each in enumerate(drafts) if each in ends), None)]
        num_kept = 0
        for place in self.walk(drafts[: self.matcher.count_valid(drafts)]):
            if self.matcher.is_terminated():
                break
            num_kept = place
        return drafts[:num_kept]

    def edit_mask(self, words: npt.NDArray[np.int32]) -> None:
        """Turn what the matcher allows, words [n], into what the request may go on with."""
        if self._may_open:
            assert self._reasoning is not None
            _set(words, self._reasoning.start_ids[0])
        if self._run:
            if not self._may_open:
                words[:] = 0
                _set(words, self._run[0])
            return
        if self._ignored_ends and self.matcher.is_accepting():
            _clear_unless_alone(words, self._ignored_ends)
        if self._stop_ids and self.matcher.is_accepting():
            for token_id in self._stop_ids:
                _set(words, token_id)

    @property
    def _may_open(self) -> bool:
        return self._reasoning is not None and self._reasoning.may_open

    def _find_run(self) -> None:
        self._run = [] if self.matcher.is_terminated() else self.matcher.forced_tokens()


def _set(words: npt.NDArray[np.int32], token_id: int) -> None:
    words.view(np.uint32)[token_id >> 5] |= np.uint32(1 << (token_id & 31))


def _clear_unless_alone(words: npt.NDArray[np.int32], token_ids: Sequence[int]) -> None:
    """Forbid some tokens, if others are allowed."""
    ends = np.zeros_like(words)
    for token_id in token_ids:
        _set(ends, token_id)
    rest = words & ~ends
    if rest.any():
        words[:] = rest
