"""POST /v1/messages, POST /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from tokenmill.engine.prompts import Prompt
from tokenmill.entrypoints.http.blocks import BlockEvent, BlockReader
from tokenmill.entrypoints.http.body import read_request
from tokenmill.entrypoints.http.chat import ChatJob
from tokenmill.entrypoints.http.generation import Generation
from tokenmill.entrypoints.http.generation_job import Pieces
from tokenmill.entrypoints.http.json_response import json_response
from tokenmill.entrypoints.http.messages.frames import MessageEvents, MessagesWire, block_of
from tokenmill.entrypoints.http.messages.protocol import (
    CountTokensReply,
    CountTokensRequest,
    MessageReply,
    MessagesErrorReply,
    MessagesRequest,
    MessageUsage,
    ThinkingDetails,
)
from tokenmill.entrypoints.http.messages.translation import chat_of
from tokenmill.entrypoints.http.openapi import json_body, replies
from tokenmill.entrypoints.http.prompts import chat_prompt
from tokenmill.entrypoints.http.record import RequestRecord
from tokenmill.entrypoints.http.sse import Write
from tokenmill.entrypoints.http.state import ServerState, record_of, state_of
from tokenmill.entrypoints.http.tools import AnswerPlan
from tokenmill.outputs import CompletionOutput, RequestOutput

router = APIRouter(default_response_class=Response)


@router.post(
    "/v1/messages",
    responses=replies(MessageReply, stream=True, errors=MessagesErrorReply),
    openapi_extra=json_body(MessagesRequest),
)
async def create_message(request: Request) -> Response:
    """Answer a conversation, in Anthropic's protocol."""
    state, record = state_of(request), record_of(request)
    state.check_open()
    fields = await read_request(request, MessagesRequest)
    return MessagesJob(state, record, fields).response()


@router.post(
    "/v1/messages/count_tokens",
    responses=replies(CountTokensReply, 400, 404, 408, 413, 415, errors=MessagesErrorReply),
    openapi_extra=json_body(CountTokensRequest),
)
async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of such a conversation has."""
    state = state_of(request)
    fields = await read_request(request, CountTokensRequest)
    state.model_name(fields.model)
    chat, renames = chat_of(fields, state.answers)
    with renames.applied():
        AnswerPlan(state, chat)  # which leaves out the tools that the choice rules out
        rendered = await chat_prompt(state, chat)
    return json_response(CountTokensReply(input_tokens=len(rendered.token_ids)))


class MessagesJob(ChatJob):
    """A request for a message."""

    def __init__(self, state: ServerState, record: RequestRecord, request: MessagesRequest) -> None:
        chat, self._renames = chat_of(request, state.answers)
        with self._renames.applied():
            super().__init__(state, record, chat)
        self._id = f"msg_{state.new_name()}"
        self._wire = MessagesWire(record.request_id)
        self._max_tokens = request.max_tokens
        self._hides_output = request.max_tokens == 0

    async def answer(self) -> msgspec.Struct:
        """The whole answer."""
        with self._renames.applied():
            return await super().answer()

    async def write_stream(self, write: Write) -> None:
        """All events."""
        with self._renames.applied():
            await super().write_stream(write)

    def _generate(self, prompts: Sequence[Prompt], *, hides_output: bool = False) -> Generation:
        return super()._generate(prompts, hides_output=self._hides_output)

    def _reply(self, generation: Generation, outputs: Sequence[RequestOutput]) -> MessageReply:
        (sequence,) = outputs[0].outputs
        reader = BlockReader(self.plan)
        self.read(reader, sequence)
        reply = self.message(generation)
        reply.content = [block_of(block) for block in reader.blocks]
        reply.stop_reason, reply.stop_sequence = self.why_it_ended(reader, sequence, generation)
        return reply

    def _pieces(self, generation: Generation) -> Pieces:
        return _Pieces(self, generation)

    def read(self, reader: BlockReader, sequence: CompletionOutput) -> list[BlockEvent]:
        """What an output brings."""
        if self._hides_output:
            return []
        events = reader.push(sequence.text)
        if sequence.finish_reason is not None:
            events += reader.finish(stopped=sequence.finish_reason == "stop")
        return events

    def message(self, generation: Generation) -> MessageReply:
        """The message without its content."""
        return MessageReply(
            id=self._id,
            model=self._model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=self.message_usage(generation),
        )

    def message_usage(self, generation: Generation) -> MessageUsage:
        """Counts so far."""
        usage = self._usage(generation)
        prompt, output = usage.prompt_tokens_details, usage.completion_tokens_details
        num_cached = 0 if prompt is UNSET else prompt.cached_tokens
        return MessageUsage(
            input_tokens=usage.prompt_tokens - num_cached,
            cache_read_input_tokens=num_cached,
            output_tokens=usage.completion_tokens,
            output_tokens_details=None
            if output is UNSET
            else ThinkingDetails(output.reasoning_tokens),
        )

    def why_it_ended(
        self, reader: BlockReader, sequence: CompletionOutput, generation: Generation
    ) -> tuple[str, str | None]:
        """(stop reason, stop sequence)"""
        if sequence.finish_reason == "length":
            (progress,) = generation.progress
            num_tokens = progress.num_prompt_tokens + progress.num_output_tokens
            is_full = num_tokens >= self._state.engine.config.model.max_model_len
            has_room = progress.num_output_tokens < self._max_tokens
            return ("model_context_window_exceeded" if is_full and has_room else "max_tokens"), None
        if reader.num_calls:
            return "tool_use", None
        if isinstance(sequence.stop_reason, str):
            return "stop_sequence", sequence.stop_reason
        return "end_turn", None


class _Pieces:
    """The events of one message."""

    def __init__(self, job: MessagesJob, generation: Generation) -> None:
        self._job = job
        self._generation = generation
        self._events = MessageEvents()
        self._reader: BlockReader | None = None

    def write(self, number: int, output: RequestOutput) -> bytes:
        """What an output brings; nothing while its text is held back."""
        job, events, generation = self._job, self._events, self._generation
        (sequence,) = output.outputs
        written: list[bytes] = []
        if self._reader is None:
            self._reader = BlockReader(job.plan)
            written.append(events.start(job.message(generation)))
        written += [events.block(each) for each in job.read(self._reader, sequence)]
        if sequence.finish_reason is not None:
            reason, stop = job.why_it_ended(self._reader, sequence, generation)
            written.append(events.end(reason, stop, job.message_usage(generation)))
        return b"".join(written)

    def end(self) -> bytes:
        """Nothing: the last output has brought the end."""
        return b""
