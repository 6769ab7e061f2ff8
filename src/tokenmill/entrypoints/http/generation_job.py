"""One HTTP request that generates: what completions and chats have in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from typing import Generic, Protocol, TypeVar

import msgspec
from fastapi import Response
from msgspec import UNSET, UnsetType

from tokenmill.engine.prompts import Prompt
from tokenmill.entrypoints.beam_search import BeamSearchParams
from tokenmill.entrypoints.http.errors import blamed_on_fields
from tokenmill.entrypoints.http.generation import Generation
from tokenmill.entrypoints.http.progress import timings_of, usage_of
from tokenmill.entrypoints.http.protocol import SamplingFields
from tokenmill.entrypoints.http.record import RequestRecord
from tokenmill.entrypoints.http.replies import Timings, Usage
from tokenmill.entrypoints.http.response_format import form_of
from tokenmill.entrypoints.http.sampling import check_stream, deadline_of, salt_of
from tokenmill.entrypoints.http.sse import EventStream, JsonAnswer, Wire, Write
from tokenmill.entrypoints.http.state import ServerState
from tokenmill.entrypoints.http.stream import Chunks
from tokenmill.outputs import RequestOutput
from tokenmill.sampling_params import SamplingParams

_Fields = TypeVar("_Fields", bound=SamplingFields)
_Chunks = TypeVar("_Chunks", bound=Chunks)


class Pieces(Protocol):
    """What a stream writes."""

    def write(self, number: int, output: RequestOutput) -> bytes:
        """What an output of prompt `number` brings; nothing while its text is held back."""
        ...

    def end(self) -> bytes:
        """What comes behind all outputs, if anything."""
        ...


class GenerationJob(ABC, Generic[_Fields]):
    """One request, checked; raises `InvalidRequestError` or `ModelNotFoundError` when made.

    A subclass reads the fields that the other endpoint lacks, and writes outputs as its clients
    expect them.
    """

    _params: SamplingParams
    _beams: BeamSearchParams | None
    _names: Mapping[str, str]
    """The client's names of the engine's parameters, where they differ."""
    _num_prompts = 1
    _wire: Wire = Wire()

    def __init__(
        self, state: ServerState, record: RequestRecord, fields: _Fields, prefix: str
    ) -> None:
        """`prefix` begins the answer's id."""
        self._state, self._record, self._fields = state, record, fields
        record.choose_rank(fields.data_parallel_rank)
        self._model = state.model_name(fields.model)
        self._adapter = state.adapter(self._model)
        self._id = f"{prefix}-{state.new_name()}"
        self._created = int(time.time())
        self.tells_ids = bool(fields.return_token_ids)
        check_stream(fields)
        self._form = form_of(fields)
        self._deadline = deadline_of(fields, state.args)
        self._salt = salt_of(fields, record.key_name, state.args)

    def response(self) -> Response:
        """The answer, in one piece or as a stream."""
        self._record.stream = bool(self._fields.stream)
        if self._record.stream:
            return EventStream(self._state, self._record, self.write_stream, self._wire)
        return JsonAnswer(self._state, self._record, self.reply)

    async def reply(self) -> bytes:
        """The whole answer as JSON."""
        return msgspec.json.encode(await self.answer())

    async def answer(self) -> msgspec.Struct:
        """The whole answer."""
        with self._admitted(), blamed_on_fields(self._names):
            generation = await self._generation()
            outputs = await generation.outputs()
        return self._reply(generation, outputs)

    async def write_stream(self, write: Write) -> None:
        """All chunks."""
        with self._admitted(), blamed_on_fields(self._names):
            generation = await self._generation()
            pieces = self._pieces(generation)
            async with aclosing(generation.stream()) as outputs:
                async for number, output in outputs:
                    if data := pieces.write(number, output):
                        await write(data)
            if data := pieces.end():
                await write(data)

    @abstractmethod
    async def _generation(self) -> Generation:
        """The request, rendered and tokenized; `_generate` makes it."""

    @abstractmethod
    def _reply(self, generation: Generation, outputs: Sequence[RequestOutput]) -> msgspec.Struct:
        """The answer in one piece, of the final output of each prompt."""

    @abstractmethod
    def _pieces(self, generation: Generation) -> Pieces:
        """What writes the answer as a stream."""

    def _generate(self, prompts: Sequence[Prompt], *, hides_output: bool = False) -> Generation:
        return Generation(
            self._state,
            self._record,
            list(prompts),
            self._params,
            priority=self._fields.priority or 0,
            cache_salt=self._salt,
            adapter=self._adapter,
            deadline=self._deadline,
            beams=self._beams,
            hides_output=hides_output,
        )

    def _usage(self, generation: Generation) -> Usage:
        details = self._state.args.enable_prompt_tokens_details
        return usage_of(generation.progress, details=details)

    def _timings(self, generation: Generation) -> Timings | UnsetType:
        if not (self._fields.timings or self._fields.timings_per_token):
            return UNSET
        details = self._state.args.enable_prompt_tokens_details
        return timings_of(generation.progress, details=details)

    def _chunks(self, kind: type[_Chunks], name: str, generation: Generation) -> _Chunks:
        """A writer of chunks that call themselves `name`."""
        return kind(
            id=self._id,
            object=name,
            created=self._created,
            model=self._model,
            fields=self._fields,
            args=self._state.args,
            progress=generation.progress,
        )

    def _admitted(self) -> AbstractContextManager[None]:
        """Counted among the server's sequences."""
        name = "n" if self._num_prompts == 1 else "prompt"
        return self._state.admission.entered(self._num_prompts * self._params.n, name)
