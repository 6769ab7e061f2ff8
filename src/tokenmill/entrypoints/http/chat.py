"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from tokenmill.entrypoints.http.beams import beam_search_params
from tokenmill.entrypoints.http.body import read_request
from tokenmill.entrypoints.http.deltas import delta_of, message_of
from tokenmill.entrypoints.http.errors import blamed_on_fields
from tokenmill.entrypoints.http.generation import Generation
from tokenmill.entrypoints.http.generation_job import GenerationJob, Pieces
from tokenmill.entrypoints.http.logprobs import (
    chat_logprobs,
    positions_of,
    prompt_logprobs_reply,
)
from tokenmill.entrypoints.http.openapi import json_body, replies
from tokenmill.entrypoints.http.prompts import chat_prompt, check_length, num_message_chars
from tokenmill.entrypoints.http.protocol import ChatCompletionRequest
from tokenmill.entrypoints.http.record import RequestRecord
from tokenmill.entrypoints.http.replies import ChatChoice, ChatLogprobs, ChatMessage, ChatReply
from tokenmill.entrypoints.http.sampling import num_listed, sampling_params
from tokenmill.entrypoints.http.state import ServerState, record_of, state_of
from tokenmill.entrypoints.http.stream import ChatChunks
from tokenmill.entrypoints.http.tools import AnswerPlan
from tokenmill.entrypoints.parsers.answer import AnswerParser
from tokenmill.entrypoints.parsers.events import ContentPiece, Event
from tokenmill.errors import InvalidRequestError
from tokenmill.outputs import CompletionOutput, RequestOutput
from tokenmill.sampling_params import SamplingParams

router = APIRouter(default_response_class=Response)

_FIELDS = {
    "prompt": "messages",
    "prompt_token_ids": "messages",
    "logprobs": "top_logprobs",
    "extra_args": "vllm_xargs",
}
"""Parameters of the engine that a chat has under other names."""


@router.post(
    "/v1/chat/completions",
    responses=replies(ChatReply, stream=True),
    openapi_extra=json_body(ChatCompletionRequest),
)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    state, record = state_of(request), record_of(request)
    state.check_open()
    fields = await read_request(request, ChatCompletionRequest)
    return ChatJob(state, record, fields).response()


class ChatJob(GenerationJob[ChatCompletionRequest]):
    """A request to answer a conversation."""

    def __init__(
        self, state: ServerState, record: RequestRecord, fields: ChatCompletionRequest
    ) -> None:
        super().__init__(state, record, fields, "chatcmpl")
        self.plan = AnswerPlan(state, fields)
        self._params = chat_params(state, fields, self.plan.params(self._form))
        own_names = self._form.fields if self._form else {}
        self._names = {**_FIELDS, **own_names, **self.plan.names}
        self._beams = beam_search_params(fields, self._params)
        self._num_best = num_listed(self._params.logprobs or 0, state)
        check_length(
            state, num_message_chars(fields.messages), fields.truncate_prompt_tokens, "messages"
        )

    async def _generation(self) -> Generation:
        rendered = await chat_prompt(self._state, self._fields)
        self.plan.begin(rendered.text, self._fields)
        generation = self._generate([rendered.prompt])
        generation.progress[0].reasoning = self.plan.tally()
        return generation

    def _reply(self, generation: Generation, outputs: Sequence[RequestOutput]) -> msgspec.Struct:
        (output,) = outputs
        wants_prompt = (
            self._fields.prompt_logprobs is not None and output.prompt_logprobs is not None
        )
        return ChatReply(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._choice(sequence) for sequence in output.outputs],
            usage=self._usage(generation),
            prompt_token_ids=output.prompt_token_ids if self.tells_ids else UNSET,
            prompt_logprobs=prompt_logprobs_reply(output.prompt_logprobs or [])
            if wants_prompt
            else UNSET,
            timings=self._timings(generation),
            kv_transfer_params=output.kv_transfer_params or UNSET,
        )

    def _pieces(self, generation: Generation) -> Pieces:
        return _Pieces(self, self._chunks(ChatChunks, "chat.completion.chunk", generation))

    def _choice(self, sequence: CompletionOutput) -> ChatChoice:
        message, finish_reason = self._message(sequence)
        return ChatChoice(
            index=sequence.index,
            message=message,
            logprobs=self.logprobs(sequence),
            finish_reason=finish_reason,
            stop_reason=sequence.stop_reason,
            token_ids=sequence.token_ids if self.tells_ids else UNSET,
        )

    def _message(self, sequence: CompletionOutput) -> tuple[ChatMessage, str | None]:
        """A whole answer, and why it ended."""
        plan, echoed, reason = self.plan, self.echoed(), sequence.finish_reason
        if not plan.takes_apart:
            return ChatMessage(role="assistant", content=echoed + sequence.text), reason
        parser = plan.parser()
        events: list[Event] = [ContentPiece(echoed)] if echoed else []
        events += plan.shown(parser.push(sequence.text) + parser.finish())
        message = message_of(events, plan.reasoning_fields)
        return message, plan.finish_reason(reason, parser.num_calls)

    def echoed(self) -> str:
        """The last message, if it is the assistant's and the answer is to begin with it."""
        last = self._fields.messages[-1]
        content = last.get("content")
        wanted = self._fields.echo and last.get("role") == "assistant"
        return content if wanted and isinstance(content, str) else ""

    def logprobs(self, sequence: CompletionOutput) -> ChatLogprobs | None:
        """Entries of the new tokens."""
        if not self._fields.logprobs:
            return None
        positions = list(positions_of(sequence.token_ids, sequence.logprobs or []))
        as_ids = bool(self._fields.return_tokens_as_token_ids)
        return chat_logprobs(positions, self._num_best, as_ids=as_ids)


class _Pieces:
    """The deltas of each choice as chunks."""

    def __init__(self, job: ChatJob, chunks: ChatChunks) -> None:
        self._chunks = chunks
        self._job = job
        self._begun: set[int] = set()
        self._parsers: dict[int, AnswerParser] = {}

    def write(self, number: int, output: RequestOutput) -> bytes:
        """What an output brings; nothing while its text is held back."""
        return b"".join(self._write(output, sequence) for sequence in output.outputs)

    def end(self) -> bytes:
        """The usage, if it was asked for."""
        return self._chunks.usage()

    def _write(self, output: RequestOutput, sequence: CompletionOutput) -> bytes:
        if self._job.plan.takes_apart:
            return self._take_apart(output, sequence)
        job, chunks, index = self._job, self._chunks, sequence.index
        text, before, after = sequence.text, b"", b""
        if index not in self._begun:
            self._begun.add(index)
            before = chunks.role(index, output.prompt_token_ids)
            text = job.echoed() + text
        logprobs = job.logprobs(sequence)
        if sequence.finish_reason is not None:
            after = chunks.end(index, sequence.finish_reason, sequence.stop_reason)
        if not (text or (logprobs and logprobs.content) or (job.tells_ids and sequence.token_ids)):
            return before + after
        encoded = None if logprobs is None else msgspec.json.encode(logprobs)
        return (
            before
            + chunks.text(index, text, logprobs=encoded, token_ids=sequence.token_ids)
            + after
        )

    def _take_apart(self, output: RequestOutput, sequence: CompletionOutput) -> bytes:
        """The same, where an answer may hold reasoning and calls."""
        job, chunks, index, plan = self._job, self._chunks, sequence.index, self._job.plan
        written: list[bytes] = []
        events: list[Event] = []
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = plan.parser()
            written.append(chunks.role(index, output.prompt_token_ids, may_lack_content=True))
            events += [ContentPiece(echoed)] if (echoed := job.echoed()) else []
        events += plan.shown(parser.push(sequence.text))
        finished = sequence.finish_reason is not None
        if finished:
            events += plan.shown(parser.finish())
        logprobs = job.logprobs(sequence)
        deltas = [delta_of(event, plan.reasoning_fields) for event in events]
        has_tokens = (logprobs and logprobs.content) or (job.tells_ids and sequence.token_ids)
        if has_tokens and not deltas:
            deltas.append(b"{}")
        encoded = None if logprobs is None else msgspec.json.encode(logprobs)
        ids = sequence.token_ids
        for delta in deltas:  # what belongs to the tokens comes with the first
            written.append(chunks.delta(index, delta, logprobs=encoded, token_ids=ids))
            encoded, ids = None, []
        if finished:
            reason = plan.finish_reason(sequence.finish_reason, parser.num_calls)
            assert reason is not None  # as it has finished
            written.append(chunks.end(index, reason, sequence.stop_reason))
        return b"".join(written)


def chat_params(
    state: ServerState, fields: ChatCompletionRequest, more: dict[str, Any] | None = None
) -> SamplingParams:
    """`more` are parameters that are no fields of the request.

    Raises `InvalidRequestError` that names the field.
    """
    defaults = state.engine.default_params
    more = dict(more or {})
    asked = fields.max_completion_tokens
    name = "max_tokens" if asked is None else "max_completion_tokens"
    asked = fields.max_tokens if asked is None else asked
    if asked is not None and asked < 1:
        raise InvalidRequestError(f"{name}={asked} must be at least 1.", parameter=name)
    if asked is not None:
        more["max_tokens"] = asked
    elif defaults.max_tokens == SamplingParams().max_tokens:
        # The model says nothing: an answer may take what is left of the context.
        more["max_tokens"] = None
    if fields.top_logprobs is not None and not fields.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs=true.", parameter="top_logprobs")
    if fields.logprob_token_ids and not fields.logprobs:
        raise InvalidRequestError(
            "logprob_token_ids needs logprobs=true.", parameter="logprob_token_ids"
        )
    if fields.logprobs and (not fields.logprob_token_ids or fields.top_logprobs is not None):
        more["logprobs"] = fields.top_logprobs or 0
    with blamed_on_fields({"max_tokens": name, "logprobs": "top_logprobs"}):
        return sampling_params(fields, defaults, state.args, **more)
