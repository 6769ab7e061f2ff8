"""Core outputs to request outputs: text, stop strings, log-probabilities, the `n` sequences."""

from __future__ import annotations

import time
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.contracts.request import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from tokenmill.engine.detokenizer import Detokenizer, make_detokenizer
from tokenmill.engine.input_processor import ProcessedInput
from tokenmill.engine.logprobs import LogprobsProcessor
from tokenmill.lora_request import LoRARequest
from tokenmill.outputs import CompletionOutput, RequestMetrics, RequestOutput
from tokenmill.sampling_params import RequestOutputKind
from tokenmill.tokenizer.tokenizer import Tokenizer


@dataclass(slots=True)
class _UserRequest:
    """What the user sent: one prompt, `n` sequences."""

    source: ProcessedInput
    unfinished: set[str]
    """Core ids of the sequences that still run."""
    lora_request: LoRARequest | None
    """What its outputs say of its adapter."""
    sequences: list[_Sequence] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return not self.unfinished


class _Sequence:
    """One sequence: its text so far, and how much of it the user has."""

    def __init__(
        self,
        request: EngineCoreRequest,
        index: int,
        user: _UserRequest,
        tokenizer: Tokenizer | None,
        stream_interval: int,
    ) -> None:
        params = user.source.params
        self.core_id = request.request_id
        self.index = index
        self.adapter = None if request.adapter is None else request.adapter.name
        self.user = user
        self.kind = params.output_kind
        self._interval = max(stream_interval, params.stream_interval or 1)
        self.detokenizer: Detokenizer = make_detokenizer(
            tokenizer, request.prompt_token_ids, params
        )
        self.logprobs = LogprobsProcessor(tokenizer, params)
        self.metrics = RequestMetrics(arrival_time=request.arrival_time)
        self._has_form = params.structured_outputs is not None
        self._end_ids = frozenset((request.eos_token_id, *request.stop_token_ids))
        self.num_cached_tokens = self.num_external_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.pooled: npt.NDArray[np.float32] | None = None
        self.kv_transfer_params: dict[str, Any] | None = None
        self._num_tokens_sent = 0
        self._before = copy(self.metrics)
        """As of the core before this one."""
        self._prompt_logprobs_sent = False

    def update(self, output: EngineCoreOutput) -> bool:
        """Take in one step's output; True if a stop string ended the sequence before the core
        knew.
        """
        now = time.monotonic()
        if output.new_token_ids:
            self.metrics.first_token_time = self.metrics.first_token_time or now
            self.metrics.last_token_time = now
        if self.metrics.first_scheduled_time is None:  # in another core it is scheduled anew
            self.metrics.first_scheduled_time = output.first_scheduled_time
            self.num_cached_tokens = output.num_cached_tokens
            self.num_external_tokens = output.num_external_tokens
        self.metrics.num_preemptions = self._before.num_preemptions + output.num_preemptions
        if output.num_draft_tokens:
            self.metrics.num_draft_tokens = self._before.num_draft_tokens + output.num_draft_tokens
            self.metrics.num_accepted_tokens = (
                self._before.num_accepted_tokens + output.num_accepted_tokens
            )
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason
        self.error = output.error
        self.kv_transfer_params = output.kv_transfer_params
        if output.pooled is not None:
            self.pooled = np.frombuffer(output.pooled.data, "<f4").reshape(output.pooled.shape)
        stop_string = self.detokenizer.update(
            output.new_token_ids, stop_token=self._ends_with_stop_token(output)
        )
        if output.prompt_logprobs is not None:
            self.logprobs.set_prompt(output.prompt_logprobs, self.user.source.prompt_token_ids)
        if output.new_logprobs is not None:
            kept = len(self.detokenizer.token_ids) - len(self.logprobs.positions or ())
            self.logprobs.update(output.new_logprobs[:kept], self.detokenizer.token_ids)
        if stop_string is None:
            return False
        stopped_early = self.finish_reason is None
        self.finish_reason, self.stop_reason = FinishReason.STOP, stop_string
        return stopped_early

    def _ends_with_stop_token(self, output: EngineCoreOutput) -> bool:
        """Whether the last token only says that the text has ended; a text that has the form it was
        to have ends with its own last token.
        """
        if output.finish_reason is not FinishReason.STOP:
            return False
        return not self._has_form or output.new_token_ids[-1] in self._end_ids

    def taken_up(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """The request as another core is to take it up: going on after the tokens so far, and
        without prompt log-probabilities that are there already.
        """
        self._before = copy(self.metrics)
        params = request.sampling_params
        if self.logprobs.prompt_positions is not None:
            params = params.replace(prompt_logprobs=None)
        return msgspec.structs.replace(
            request, sampling_params=params, initial_output_ids=self.detokenizer.token_ids.copy()
        )

    def snapshot(self) -> CompletionOutput:
        """The sequence as the user is to see it now."""
        delta = self.kind is RequestOutputKind.DELTA
        token_ids = self.detokenizer.token_ids
        first = self._num_tokens_sent if delta else 0
        self._num_tokens_sent = len(token_ids)
        positions = self.logprobs.positions
        return CompletionOutput(
            index=self.index,
            text=self.detokenizer.next_text(finished=self.finish_reason is not None, delta=delta),
            token_ids=token_ids[first:],
            cumulative_logprob=self.logprobs.cumulative_logprob,
            logprobs=None if positions is None else positions[first:],
            finish_reason=None if self.finish_reason is None else str(self.finish_reason),
            stop_reason=self.stop_reason,
            error=self.error,
        )

    def has_news(self) -> bool:
        """Whether there is enough to tell since the last snapshot; a first token is."""
        num_new = len(self.detokenizer.token_ids) - self._num_tokens_sent
        return num_new >= (self._interval if self._num_tokens_sent else 1)

    def prompt_logprobs_news(self) -> bool:
        """Whether the prompt's log-probabilities are due: always, but in deltas only once."""
        due = self.kind is not RequestOutputKind.DELTA or not self._prompt_logprobs_sent
        self._prompt_logprobs_sent = True
        return due


class OutputProcessor:
    """Keeps the state of every request that the user still waits for."""

    def __init__(self, tokenizer: Tokenizer | None, stream_interval: int = 1) -> None:
        """`stream_interval` is the least number of tokens between two outputs of a stream."""
        self._tokenizer = tokenizer
        self._stream_interval = stream_interval
        self._sequences: dict[str, _Sequence] = {}
        self._by_user_id: dict[str, list[_UserRequest]] = {}

    @property
    def num_unfinished(self) -> int:
        """Sequences that still run."""
        return len(self._sequences)

    @property
    def request_ids(self) -> list[str]:
        """Of the users' requests that still run."""
        return list(self._by_user_id)

    def adapters(self) -> tuple[list[str], list[str]]:
        """Names of the adapters of unfinished sequences that have tokens, and those of others."""
        times = [(each.adapter, each.metrics.first_token_time) for each in self._sequences.values()]
        begun = {name for name, time in times if name and time is not None}
        return sorted(begun), sorted({name for name, _ in times if name} - begun)

    def add_request(self, source: ProcessedInput) -> None:
        """Expect outputs for every sequence of a request."""
        adapter = source.children[0].adapter
        lora_request = None if adapter is None else LoRARequest(adapter.name, adapter.path)
        user = _UserRequest(source, {each.request_id for each in source.children}, lora_request)
        for index, child in enumerate(source.children):
            sequence = _Sequence(child, index, user, self._tokenizer, self._stream_interval)
            user.sequences.append(sequence)
            self._sequences[child.request_id] = sequence
        self._by_user_id.setdefault(source.request_id, []).append(user)

    def process_outputs(self, outputs: EngineCoreOutputs) -> tuple[list[RequestOutput], list[str]]:
        """One step's outputs for the users, and the core ids that a stop string has ended."""
        results: list[RequestOutput] = []
        stopped: list[str] = []
        for output in outputs.outputs:
            result, has_stopped = self.process_output(output)
            if has_stopped:
                stopped.append(output.request_id)
            if result is not None:
                results.append(result)
        return results, stopped

    def process_output(self, output: EngineCoreOutput) -> tuple[RequestOutput | None, bool]:
        """One request's output: what its user gets to see, if anything, and whether a stop string
        has ended it before the core knew.
        """
        sequence = self._sequences.get(output.request_id)
        if sequence is None:  # aborted meanwhile
            return None, False
        has_stopped = sequence.update(output)
        return self._result_of(sequence), has_stopped

    def take_up(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """An unfinished request as it is to be given to another core than the one before."""
        return self._sequences[request.request_id].taken_up(request)

    def abort(self, request_ids: Iterable[str]) -> tuple[list[RequestOutput], list[str]]:
        """Forget the users' requests of these ids: their last outputs, and their core ids."""
        results: list[RequestOutput] = []
        core_ids: list[str] = []
        for request_id in request_ids:
            for user in self._by_user_id.get(request_id, [])[:]:
                running = [s for s in user.sequences if s.core_id in user.unfinished]
                core_ids += [sequence.core_id for sequence in running]
                for sequence in running:
                    sequence.finish_reason = FinishReason.ABORT
                    result = self._result_of(sequence)
                    if result is not None:
                        results.append(result)
        return results, core_ids

    def forget(self, request_id: str) -> list[str]:
        """Drop the user's requests of this id without a last output; their core ids."""
        core_ids: list[str] = []
        for user in self._by_user_id.pop(request_id, []):
            core_ids += user.unfinished
        for core_id in core_ids:
            del self._sequences[core_id]
        return core_ids

    def _result_of(self, sequence: _Sequence) -> RequestOutput | None:
        """What the user gets to see after `sequence` has changed."""
        user = sequence.user
        if sequence.finish_reason is not None:
            user.unfinished.discard(sequence.core_id)
            del self._sequences[sequence.core_id]
            if user.finished:
                self._forget(user)
        if sequence.kind is RequestOutputKind.FINAL_ONLY:
            return self._request_output(user, user.sequences) if user.finished else None
        if sequence.finish_reason is None and not sequence.has_news():
            return None
        return self._request_output(user, [sequence])

    def _request_output(self, user: _UserRequest, shown: list[_Sequence]) -> RequestOutput:
        first = user.sequences[0]
        return RequestOutput(
            request_id=user.source.request_id,
            prompt=user.source.prompt,
            prompt_token_ids=user.source.prompt_token_ids,
            outputs=[sequence.snapshot() for sequence in shown],
            finished=user.finished,
            prompt_logprobs=(
                shown[0].logprobs.prompt_positions if shown[0].prompt_logprobs_news() else None
            ),
            num_cached_tokens=first.num_cached_tokens,
            num_external_tokens=first.num_external_tokens,
            metrics=_merged([sequence.metrics for sequence in shown]),
            lora_request=user.lora_request,
            pooled=first.pooled,
            kv_transfer_params=first.kv_transfer_params,
        )

    def _forget(self, user: _UserRequest) -> None:
        same_id = self._by_user_id[user.source.request_id]
        same_id.remove(user)
        if not same_id:
            del self._by_user_id[user.source.request_id]


def _merged(parts: list[RequestMetrics]) -> RequestMetrics:
    """The times of several sequences as those of one request: the first, and the last."""
    if len(parts) == 1:  # field by field: `replace` takes longer than all else of an output
        only = parts[0]
        return RequestMetrics(
            only.arrival_time,
            only.first_scheduled_time,
            only.first_token_time,
            only.last_token_time,
            only.num_preemptions,
            only.num_draft_tokens,
            only.num_accepted_tokens,
        )

    def known(name: str) -> list[float]:
        return [value for part in parts if (value := getattr(part, name)) is not None]

    return RequestMetrics(
        arrival_time=parts[0].arrival_time,
        first_scheduled_time=min(known("first_scheduled_time"), default=None),
        first_token_time=min(known("first_token_time"), default=None),
        last_token_time=max(known("last_token_time"), default=None),
        num_preemptions=sum(part.num_preemptions for part in parts),
        num_draft_tokens=sum(part.num_draft_tokens for part in parts),
        num_accepted_tokens=sum(part.num_accepted_tokens for part in parts),
    )
