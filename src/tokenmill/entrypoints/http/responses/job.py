"""One request for a response."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from tokenmill.entrypoints.http.blocks import (
    BlockEnd,
    BlockEvent,
    BlockKind,
    BlockPiece,
    BlockReader,
    BlockStart,
)
from tokenmill.entrypoints.http.chat import ChatJob
from tokenmill.entrypoints.http.generation import Generation
from tokenmill.entrypoints.http.generation_job import Pieces
from tokenmill.entrypoints.http.prompts import chat_prompt
from tokenmill.entrypoints.http.record import RequestRecord
from tokenmill.entrypoints.http.replies import TokenLogprob
from tokenmill.entrypoints.http.responses.events import ResponseEvents
from tokenmill.entrypoints.http.responses.items import Item, new_id
from tokenmill.entrypoints.http.responses.output import (
    OutputItems,
    empty_response,
    response_error,
    response_usage,
)
from tokenmill.entrypoints.http.responses.protocol import ResponseReply, ResponsesRequest
from tokenmill.entrypoints.http.responses.store import KeptResponse
from tokenmill.entrypoints.http.responses.tools import ChatTools
from tokenmill.entrypoints.http.responses.translation import chat_of
from tokenmill.entrypoints.http.sse import DONE, Wire, Write
from tokenmill.entrypoints.http.state import ServerState
from tokenmill.outputs import CompletionOutput, RequestOutput

logger = logging.getLogger(__name__)

_LEADING = ("system", "developer")
"""Roles of messages that are never left out, at the beginning."""


@dataclass(frozen=True, slots=True)
class ResponseInput:
    """What a request is about, with everything that it refers to."""

    items: list[Item]
    """Its own; each has an id."""
    history: list[Item] = field(default_factory=list)
    """Those of the responses that it continues."""


class ResponsesJob(ChatJob):
    """A request for a response. `so_far` is what is known of it at any time."""

    def __init__(
        self,
        state: ServerState,
        record: RequestRecord,
        request: ResponsesRequest,
        given: ResponseInput,
    ) -> None:
        chat, self._renames = chat_of(request, given.items, given.history)
        if request.truncation == "auto":
            chat.truncate_prompt_tokens = _room_for_prompt(state, request.max_output_tokens)
        with self._renames.applied():
            super().__init__(state, record, chat)
        self._id = new_id("resp")
        self._wire = _ResponsesWire(self)
        self._input = given.items
        self.items = OutputItems(self._id, ChatTools(request.tools or []).namespaces)
        self.events = ResponseEvents(self.items)
        self.so_far = empty_response(
            request, self._params, id=self._id, created=self._created, model=self._model
        )
        self.begun = asyncio.Event()
        """Set when the prompt is there, and goes to the engine."""
        self._reader: BlockReader | None = None

    async def answer(self) -> ResponseReply:
        """The whole response, which is kept if it is to be."""
        if self._fields.logprobs and self.plan.takes_apart:
            # Which tokens belong to which item is seen only while they come.
            await self.write_stream(_to_nobody)
        else:
            with self._renames.applied():
                await super().answer()
            await self.keep()
        return self.so_far

    async def write_stream(self, write: Write) -> None:
        """All events."""
        with self._renames.applied():
            await super().write_stream(write)
        await self.keep()
        await write(self.events.end(self.so_far))

    async def fail(self, error: Exception) -> None:
        """The response has failed, with what it has so far."""
        if self._reader is not None:
            self._reader.finish(stopped=False)
            self.so_far.output = [self.items.finished(each) for each in self._reader.blocks]
        self.so_far.status, self.so_far.error = "failed", response_error(error)
        await self.keep()

    async def cancel(self) -> None:
        """The response was broken off."""
        self.so_far.status = "cancelled"
        await self.keep()

    async def _generation(self) -> Generation:
        room = self._fields.truncate_prompt_tokens
        if room is not None and await self._drop_oldest(room):
            # Nothing is left to be cut, which images could not be.
            self._params = self._params.replace(truncate_prompt_tokens=None)
        generation = await super()._generation()
        self.begun.set()
        return generation

    def _reply(self, generation: Generation, outputs: Sequence[RequestOutput]) -> ResponseReply:
        (sequence,) = outputs[0].outputs
        self.read(sequence, generation)
        reader = self._reader
        assert reader is not None  # as something was read
        logprobs = self.logprobs(sequence)
        if logprobs is not None and reader.blocks:
            self.items.add_logprobs(reader.blocks[-1], logprobs.content)
            self.so_far.output = [self.items.finished(each) for each in reader.blocks]
        return self.so_far

    def _pieces(self, generation: Generation) -> Pieces:
        return _Pieces(self, generation)

    def read(self, sequence: CompletionOutput, generation: Generation) -> list[BlockEvent]:
        """Take in an output; what it brings. With the last one, the response is complete."""
        if self._reader is None:
            self._reader = BlockReader(self.plan)
        reader, reason = self._reader, sequence.finish_reason
        events = reader.push(sequence.text)
        if reason is not None:
            events += reader.finish(stopped=reason != "length")
            response = self.so_far
            response.status = "completed"
            if reason == "length":
                response.status = "incomplete"
                response.incomplete_details = {"reason": "max_output_tokens"}
            response.completed_at = int(time.time())
            response.output = [self.items.finished(block) for block in reader.blocks]
            response.usage = response_usage(self._usage(generation))
        return events

    async def _drop_oldest(self, room: int) -> bool:
        """Leave out the oldest turns until the prompt fits, but never the last one; whether it
        does. What is still too long then is cut by its tokens.
        """
        fields = self._fields
        messages = fields.messages

        async def fits() -> bool:
            return len((await chat_prompt(self._state, fields)).token_ids) <= room

        if await fits():
            return True
        roles = [message["role"] for message in messages]
        first = next((i for i, role in enumerate(roles) if role not in _LEADING), len(roles))
        starts = [i for i in range(first + 1, len(roles)) if roles[i] == "user"]
        low, high = 0, len(starts) - 1
        while low < high:
            middle = (low + high) // 2
            fields.messages = [*messages[:first], *messages[starts[middle] :]]
            low, high = (low, middle) if await fits() else (middle + 1, high)
        if not starts:
            return False
        fields.messages = [*messages[:first], *messages[starts[low] :]]
        return await fits()

    async def keep(self) -> None:
        """Keep the response as it is now, if it is to be kept."""
        response = self.so_far
        if not response.store:
            return
        kept = KeptResponse(
            id=response.id,
            owner=self._record.key_name or "",
            status=response.status,
            body=msgspec.json.encode(response),
            previous=response.previous_response_id,
            input=self._input,
            output=response.output,
        )
        try:
            response.store = await self._state.responses.put(kept)
        except sqlite3.Error as error:  # the client has its answer nevertheless
            logger.error("a response could not be kept: %s", error)
            response.store = False


class _Pieces:
    """The events of a response but for the last one, which follows when it is kept."""

    def __init__(self, job: ResponsesJob, generation: Generation) -> None:
        self._job = job
        self._generation = generation
        self._has_begun = False
        self._logprobs: list[TokenLogprob] = []
        """Of tokens whose text is held back."""

    def write(self, number: int, output: RequestOutput) -> bytes:
        """What an output brings; nothing while its text is held back."""
        job, events = self._job, self._job.events
        (sequence,) = output.outputs
        written: list[bytes] = []
        if not self._has_begun:
            self._has_begun = True
            written.append(events.start(job.so_far))
        if (logprobs := job.logprobs(sequence)) is not None:
            self._logprobs += logprobs.content
        for happened in job.read(sequence, self._generation):
            match happened:
                case BlockStart():
                    written.append(events.begin_item(happened))
                case BlockPiece(block):
                    written.append(events.delta(happened, self._told(happened)))
                case BlockEnd(block):
                    if sequence.finish_reason is not None:  # tokens without a text, as at an end
                        self._told(BlockPiece(block, ""))
                    written.append(events.end_item(happened))
        return b"".join(written)

    def end(self) -> bytes:
        """Nothing yet."""
        return b""

    def _told(self, happened: BlockPiece) -> list[TokenLogprob]:
        """The tokens of a piece of text: all since the last piece, but for those of a mark between
        the text and what was before it.
        """
        entries, self._logprobs = self._logprobs, []
        block, items = happened.block, self._job.items
        if block.kind is not BlockKind.TEXT or not entries:
            return []
        if block.index > 0 and not items.logprobs(block):
            spare = sum(len(entry.token) for entry in entries) - len(happened.text)
            while spare >= len(entries[0].token) > 0:
                spare -= len(entries.pop(0).token)
        items.add_logprobs(block, entries)
        return entries


class _ResponsesWire(Wire):
    """Ended as in a chat; what fails midway is a response that has failed."""

    end = DONE

    def __init__(self, job: ResponsesJob) -> None:
        self._job = job

    async def failure(self, error: Exception) -> bytes:
        """The last event of a stream that went wrong."""
        await self._job.fail(error)
        return self._job.events.end(self._job.so_far)


def _room_for_prompt(state: ServerState, max_output: int | None) -> int:
    """Tokens that a prompt may have: an answer gets a quarter of the context at most."""
    context = state.engine.config.model.max_model_len
    return context - min(max(max_output or 1, 1), max(context // 4, 1))


async def _to_nobody(data: bytes) -> None:
    """A `Write` of a stream that nobody reads."""
