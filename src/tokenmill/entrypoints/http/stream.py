"""Chunks of a stream as bytes, written by hand: what does not change in a stream is encoded once,
a token costs the encoding of its text and one join.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenmill.config.serve_args import ServeArgs
from tokenmill.entrypoints.http.progress import Progress, timings_of, usage_of
from tokenmill.entrypoints.http.protocol import SamplingFields

_encode = msgspec.json.encode


class Chunks:
    """Writes the chunks of one request. A subclass says how a choice holds its text.

    A chunk is: head, index, text, logprobs, end of the choice, tail.
    """

    before_text: bytes
    after_text: bytes

    def __init__(
        self,
        *,
        id: str,
        object: str,
        created: int,
        model: str,
        fields: SamplingFields,
        args: ServeArgs,
        progress: Sequence[Progress],
    ) -> None:
        """`progress` is that of the request's prompts, and read whenever usage is told."""
        base = {"id": id, "object": object, "created": created, "model": model}
        self._base = b"data: " + _encode(base)[:-1]
        options = fields.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._continuous = bool(options and options.continuous_usage_stats)
        self._details = args.enable_prompt_tokens_details
        self._wants_ids = bool(fields.return_token_ids)
        self._wants_timings = bool(fields.timings or fields.timings_per_token)
        self._progress = progress
        self._num_unfinished = sum(each.params.n for each in progress)
        self._heads: dict[int, bytes] = {}
        self._plain_tail = (
            self.after_text
            + b',"logprobs":null,"finish_reason":null,"stop_reason":null}]'
            + (b',"usage":null' if self._include_usage else b"")
            + b"}\n\n"
        )
        self._always_full = self._continuous or self._wants_ids

    def text(
        self,
        index: int,
        text: str,
        *,
        logprobs: bytes | None = None,
        token_ids: Sequence[int] = (),
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
        prompt_token_ids: Sequence[int] | None = None,
    ) -> bytes:
        """A piece of a choice's text. `logprobs` is JSON; `prompt_token_ids` come with the first
        piece, and are told if ids were asked for.
        """
        head = self._heads.get(index) or self._head(index)
        if logprobs is None and finish_reason is None and not self._always_full:
            return head + _encode(text) + self._plain_tail
        finish = self._finish(logprobs, token_ids, finish_reason, stop_reason)
        if self._wants_ids and prompt_token_ids is not None:
            finish += self._prompt_ids_of_choice(prompt_token_ids)
        return b"".join(
            (head, _encode(text), self.after_text, finish, b"}]", self._tail(), b"}\n\n")
        )

    def usage(self) -> bytes:
        """The chunk at the end that tells the usage; nothing if it was not asked for."""
        if not self._include_usage:
            return b""
        usage = _encode(usage_of(self._progress, details=self._details))
        return self._base + b',"choices":[],"usage":' + usage + b"}\n\n"

    def _head(self, index: int) -> bytes:
        head = self._base + b',"choices":[{"index":%d,' % index + self.before_text
        self._heads[index] = head
        return head

    def _finish(
        self,
        logprobs: bytes | None,
        token_ids: Sequence[int],
        finish_reason: str | None,
        stop_reason: int | str | None,
    ) -> bytes:
        """What follows a choice's text."""
        parts = [
            b',"logprobs":',
            logprobs or b"null",
            b',"finish_reason":',
            _encode(finish_reason),
            b',"stop_reason":',
            _encode(stop_reason),
        ]
        if self._wants_ids:
            parts += [b',"token_ids":', _encode(token_ids)]
        if finish_reason is not None:
            self._num_unfinished -= 1
        return b"".join(parts)

    def _prompt_ids_of_choice(self, token_ids: Sequence[int]) -> bytes:
        return b',"prompt_token_ids":' + _encode(token_ids)

    def _tail(self) -> bytes:
        """What follows the choices."""
        tail = b""
        if self._continuous:
            tail = b',"usage":' + _encode(usage_of(self._progress, details=self._details))
        elif self._include_usage:
            tail = b',"usage":null'
        if self._wants_timings and self._num_unfinished == 0:
            tail += b',"timings":' + _encode(timings_of(self._progress, details=self._details))
        return tail


class CompletionChunks(Chunks):
    """`{"index", "text", ...}`"""

    before_text = b'"text":'
    after_text = b""


class ChatChunks(Chunks):
    """`{"index", "delta": {"content"}, ...}`: first the role, at the end an empty delta. Other
    deltas have reasoning, or a piece of a call.
    """

    before_text = b'"delta":{"content":'
    after_text = b"}"

    def role(
        self, index: int, prompt_token_ids: Sequence[int], *, may_lack_content: bool = False
    ) -> bytes:
        """The first chunk of a choice; its content is null if there may be none to follow."""
        content = b"null" if may_lack_content else b'""'
        delta = b'"delta":{"role":"assistant","content":' + content + b"}"
        tail = self._tail()
        if self._wants_ids:
            tail += b',"prompt_token_ids":' + _encode(prompt_token_ids)
        return self._bare(index, delta, self._finish(None, (), None, None), tail)

    def delta(
        self,
        index: int,
        delta: bytes,
        *,
        logprobs: bytes | None = None,
        token_ids: Sequence[int] = (),
    ) -> bytes:
        """A chunk with this delta, which is JSON, as is `logprobs`."""
        finish = self._finish(logprobs, token_ids, None, None)
        return self._bare(index, b'"delta":' + delta, finish, self._tail())

    def end(self, index: int, finish_reason: str, stop_reason: int | str | None) -> bytes:
        """The last chunk of a choice."""
        finish = self._finish(None, (), finish_reason, stop_reason)
        return self._bare(index, b'"delta":{}', finish, self._tail())

    def _bare(self, index: int, delta: bytes, finish: bytes, tail: bytes) -> bytes:
        choice = b',"choices":[{"index":%d,' % index + delta + finish + b"}]"
        return self._base + choice + tail + b"}\n\n"
