"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from tokenmill.engine.prompts import TokensPrompt
from tokenmill.entrypoints.http.body import Body, read_request
from tokenmill.entrypoints.http.errors import blamed_on_fields
from tokenmill.entrypoints.http.generation import Generation
from tokenmill.entrypoints.http.logprobs import (
    chat_logprobs,
    positions_of,
    prompt_logprobs_reply,
)
from tokenmill.entrypoints.http.openapi import json_body, replies
from tokenmill.entrypoints.http.progress import timings_of, usage_of
from tokenmill.entrypoints.http.prompts import chat_prompt, check_length, num_message_chars
from tokenmill.entrypoints.http.protocol import ChatCompletionRequest
from tokenmill.entrypoints.http.record import RequestRecord
from tokenmill.entrypoints.http.replies import ChatChoice, ChatLogprobs, ChatMessage, ChatReply
from tokenmill.entrypoints.http.sampling import (
    check_stream,
    deadline_of,
    num_listed,
    salt_of,
    sampling_params,
)
from tokenmill.entrypoints.http.sse import EventStream, JsonAnswer, Write
from tokenmill.entrypoints.http.state import ServerState, record_of, state_of
from tokenmill.entrypoints.http.stream import ChatChunks
from tokenmill.errors import InvalidRequestError
from tokenmill.outputs import CompletionOutput, RequestOutput
from tokenmill.sampling_params import SamplingParams

router = APIRouter(default_response_class=Response)

_FIELDS = {"prompt": "messages", "prompt_token_ids": "messages", "logprobs": "top_logprobs"}
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
    body = await read_request(request, ChatCompletionRequest)
    job = ChatJob(state, record, body)
    record.stream = job.stream
    if job.stream:
        return EventStream(state, record, job.write_stream)
    return JsonAnswer(state, record, job.reply)


class ChatJob:
    """One request, checked; raises `InvalidRequestError` or `ModelNotFoundError` when made."""

    def __init__(
        self, state: ServerState, record: RequestRecord, body: Body[ChatCompletionRequest]
    ) -> None:
        fields = body.fields
        self._state, self._record, self._fields = state, record, fields
        self._model = state.model_name(fields.model)
        self._id = f"chatcmpl-{state.new_name()}"
        self._created = int(time.time())
        self.stream = bool(fields.stream)
        self.tells_ids = bool(fields.return_token_ids)
        check_stream(fields)
        _check_tools(fields)
        self._params = chat_params(state, body)
        self._deadline = deadline_of(fields, state.args)
        self._salt = salt_of(fields, record.key_name, state.args)
        self._num_best = num_listed(fields.top_logprobs or 0, state)
        check_length(
            state, num_message_chars(fields.messages), fields.truncate_prompt_tokens, "messages"
        )

    async def reply(self) -> bytes:
        """The whole answer as JSON."""
        ticket = self._state.admission.enter(self._params.n, "n")
        try:
            with blamed_on_fields(_FIELDS):
                generation = await self._generation()
                (output,) = await generation.outputs()
        finally:
            ticket.release()
        fields = self._fields
        details = self._state.args.enable_prompt_tokens_details
        wants_timings = fields.timings or fields.timings_per_token
        wants_prompt = fields.prompt_logprobs is not None and output.prompt_logprobs is not None
        return msgspec.json.encode(
            ChatReply(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[self._choice(sequence) for sequence in output.outputs],
                usage=usage_of(generation.progress, details=details),
                prompt_token_ids=output.prompt_token_ids if self.tells_ids else UNSET,
                prompt_logprobs=prompt_logprobs_reply(output.prompt_logprobs or [])
                if wants_prompt
                else UNSET,
                timings=timings_of(generation.progress, details=details)
                if wants_timings
                else UNSET,
            )
        )

    async def write_stream(self, write: Write) -> None:
        """All chunks."""
        ticket = self._state.admission.enter(self._params.n, "n")
        try:
            with blamed_on_fields(_FIELDS):
                generation = await self._generation()
                pieces = _Pieces(self, self._chunks(generation))
                async with aclosing(generation.stream()) as outputs:
                    async for _, output in outputs:
                        if data := pieces.write(output):
                            await write(data)
            if usage := pieces.chunks.usage():
                await write(usage)
        finally:
            ticket.release()

    def _chunks(self, generation: Generation) -> ChatChunks:
        return ChatChunks(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model,
            fields=self._fields,
            args=self._state.args,
            progress=generation.progress,
        )

    async def _generation(self) -> Generation:
        rendered = await chat_prompt(self._state, self._fields)
        prompt = TokensPrompt(prompt=rendered.text, prompt_token_ids=rendered.token_ids)
        return Generation(
            self._state,
            self._record,
            [prompt],
            self._params,
            priority=self._fields.priority or 0,
            cache_salt=self._salt,
            deadline=self._deadline,
        )

    def _choice(self, sequence: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            index=sequence.index,
            message=ChatMessage(role="assistant", content=self.echoed() + sequence.text),
            logprobs=self.logprobs(sequence),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            token_ids=sequence.token_ids if self.tells_ids else UNSET,
        )

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
        self.chunks = chunks
        self._job = job
        self._begun: set[int] = set()

    def write(self, output: RequestOutput) -> bytes:
        """What an output brings; nothing while its text is held back."""
        return b"".join(self._write(output, sequence) for sequence in output.outputs)

    def _write(self, output: RequestOutput, sequence: CompletionOutput) -> bytes:
        job, chunks, index = self._job, self.chunks, sequence.index
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


def chat_params(state: ServerState, body: Body[ChatCompletionRequest]) -> SamplingParams:
    """Raises `InvalidRequestError` that names the field."""
    fields, defaults = body.fields, state.engine.default_params
    more: dict[str, Any] = {}
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
    if fields.logprobs:
        more["logprobs"] = fields.top_logprobs or 0
    with blamed_on_fields({"max_tokens": name, "logprobs": "top_logprobs"}):
        return sampling_params(fields, body.others, defaults, state.args, **more)


def _check_tools(fields: ChatCompletionRequest) -> None:
    """Calls are not parsed here, so tools may be shown to a model, but not called."""
    choice = fields.tool_choice
    if not fields.tools and choice in (None, "none", "auto"):
        return
    if choice == "none":
        return
    name = "tools" if fields.tools else "tool_choice"
    raise InvalidRequestError(
        f"{name} is not supported by this server: calls are not parsed. Set tool_choice='none' to"
        f" show tools to the model and get text.",
        parameter=name,
    )
