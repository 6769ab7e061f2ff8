"""The outputs of one request on their way to whoever iterates over them."""

from __future__ import annotations

import asyncio
import dataclasses

from tokenmill.errors import TokenmillError
from tokenmill.outputs import CompletionOutput, RequestMetrics, RequestOutput


class OutputStream:
    """Holds what its reader has not fetched yet: one output, into which later ones are merged.

    One reader, in the event loop that also writes, and in which the stream is made.
    """

    def __init__(self, *, delta: bool) -> None:
        self._delta = delta
        self._pending: RequestOutput | None = None
        self._error: TokenmillError | None = None
        self._loop = asyncio.get_running_loop()
        self._reader: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        """Add an output; the stream owns it from here on."""
        if self._pending is None:
            self._pending = output
        else:
            merge(self._pending, output, delta=self._delta)
        self._wake()

    def fail(self, error: TokenmillError) -> None:
        """End the stream with an error, once what is there has been read."""
        self._error = error
        self._wake()

    async def get(self) -> RequestOutput:
        """The next output. Raises the error that ended the stream."""
        while self._pending is None:
            if self._error is not None:
                raise self._error
            self._reader = self._loop.create_future()
            await self._reader
        output, self._pending = self._pending, None
        return output

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def merge(first: RequestOutput, then: RequestOutput, *, delta: bool) -> None:
    """Change `first` into what tells as much as it and `then`, one after the other."""
    by_index = {sequence.index: sequence for sequence in first.outputs}
    for news in then.outputs:
        earlier = by_index.get(news.index)
        if earlier is None:
            first.outputs.append(news)
        elif delta:
            _append(earlier, news)
        else:
            first.outputs[first.outputs.index(earlier)] = news
    first.finished = then.finished
    first.prompt_logprobs = first.prompt_logprobs or then.prompt_logprobs
    first.num_cached_tokens = then.num_cached_tokens
    first.num_external_tokens = then.num_external_tokens
    first.kv_transfer_params = then.kv_transfer_params
    # Of one sequence the later times say all; of several, each output has those of its own.
    one = len(first.outputs) == 1
    first.metrics = then.metrics if one else _merged_metrics(first.metrics, then.metrics)


def _append(earlier: CompletionOutput, news: CompletionOutput) -> None:
    """Add one sequence's delta to the one before."""
    earlier.text += news.text
    earlier.token_ids += news.token_ids
    if earlier.logprobs is not None and news.logprobs is not None:
        earlier.logprobs.extend(news.logprobs)
    earlier.cumulative_logprob = news.cumulative_logprob
    earlier.finish_reason = news.finish_reason
    earlier.stop_reason = news.stop_reason
    earlier.error = news.error


def _merged_metrics(first: RequestMetrics, then: RequestMetrics) -> RequestMetrics:
    """The earlier times of what comes first, the later of what comes last."""

    def known(*values: float | None) -> list[float]:
        return [value for value in values if value is not None]

    return dataclasses.replace(
        then,
        first_scheduled_time=min(
            known(first.first_scheduled_time, then.first_scheduled_time), default=None
        ),
        first_token_time=min(known(first.first_token_time, then.first_token_time), default=None),
        last_token_time=max(known(first.last_token_time, then.last_token_time), default=None),
        num_preemptions=max(first.num_preemptions, then.num_preemptions),
        num_draft_tokens=max(first.num_draft_tokens, then.num_draft_tokens),
        num_accepted_tokens=max(first.num_accepted_tokens, then.num_accepted_tokens),
    )
