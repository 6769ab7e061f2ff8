"""Ids to text, token by token: what a user sees of a sequence, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tokenmill.engine.stop_strings import StopMatch, StopStringChecker
from tokenmill.sampling_params import SamplingParams
from tokenmill.tokenizer.tokenizer import Tokenizer


class Detokenizer(Protocol):
    """One sequence's output as ids and text."""

    token_ids: list[int]
    """Every sampled token so far, the one that stopped the sequence included."""

    @property
    def text(self) -> str:
        """All text so far, whether a stream has shown it or not."""
        ...

    def update(self, new_token_ids: Sequence[int], *, stop_token: bool) -> str | None:
        """Take in sampled tokens; the stop string that is now complete, if any.

        Tokens behind the one that completes it are dropped: they exist only because several were
        sampled at once. `stop_token` says that the last id ended the sequence by itself.
        """
        ...

    def next_text(self, *, finished: bool, delta: bool) -> str:
        """Text to show: all of it, or in a `delta` what has come since the last one.

        Until the sequence has finished, what may yet become a stop string is held back, and so are
        the first bytes of a character. At the end the rest is given as a full decode has it.
        """
        ...


def make_detokenizer(
    tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int], params: SamplingParams
) -> Detokenizer:
    """The detokenizer that a request asks for; one that keeps ids only if it wants no text."""
    if tokenizer is None or not params.detokenize:
        return IdsOnly()
    return IncrementalDetokenizer(tokenizer, prompt_token_ids, params)


class IdsOnly:
    """The detokenizer of a request without text."""

    text = ""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    def update(self, new_token_ids: Sequence[int], *, stop_token: bool) -> str | None:
        self.token_ids.extend(new_token_ids)
        return None

    def next_text(self, *, finished: bool, delta: bool) -> str:
        return ""


class IncrementalDetokenizer:
    """Text that continues the prompt's, at a constant average cost per token."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self.token_ids: list[int] = []
        self._stream = tokenizer.stream(
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._checker = StopStringChecker(params.stop or ())
        self._has_stops = bool(params.stop)
        self._includes_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._closed = False
        # The text in two parts, each a list of pieces that is joined when somebody looks: pieces
        # are many, and joining at each token would cost more with each.
        self._shown: list[str] = []
        self._unshown: list[str] = []

    @property
    def text(self) -> str:
        return "".join([*self._shown, *self._unshown])

    def update(self, new_token_ids: Sequence[int], *, stop_token: bool) -> str | None:
        last = len(new_token_ids) - 1
        for i, token_id in enumerate(new_token_ids):
            self.token_ids.append(token_id)
            if stop_token and i == last and not self._includes_stop:
                return None
            text = self._stream.push(token_id)
            self._unshown.append(text)
            match = self._checker.feed(text, honour=len(self.token_ids) > self._min_tokens)
            if match is not None:
                self._cut(match)
                return match.stop
        return None

    def next_text(self, *, finished: bool, delta: bool) -> str:
        if finished:
            self._close()
        held = self._has_stops and not (finished or self._includes_stop)
        self._show(self._checker.num_held if held else 0)
        if not delta:
            self._shown = ["".join(self._shown)]
        return self._shown[-1]

    def _cut(self, match: StopMatch) -> None:
        """End the text at the match; nothing that was still held back belongs to it."""
        kept = self.text[: match.end if self._includes_stop else match.start]
        num_shown = sum(map(len, self._shown))
        self._unshown = [kept[num_shown:]]
        self._closed = True

    def _close(self) -> None:
        """Add what the stream holds back, once."""
        if not self._closed:
            self._unshown.append(self._stream.finish())
            self._closed = True

    def _show(self, num_held: int) -> None:
        """Move all but the last `num_held` characters to the shown text, as one piece."""
        unshown = "".join(self._unshown)
        if num_held:
            border = len(unshown) - num_held
            self._unshown = [unshown[border:]]
            unshown = unshown[:border]
        else:
            self._unshown.clear()
        self._shown.append(unshown)
