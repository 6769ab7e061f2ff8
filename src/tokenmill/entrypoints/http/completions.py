"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from tokenmill.entrypoints.http.beams import beam_search_params
from tokenmill.entrypoints.http.body import read_request
from tokenmill.entrypoints.http.generation import Generation
from tokenmill.entrypoints.http.generation_job import GenerationJob
from tokenmill.entrypoints.http.logprobs import (
    CompletionLogprobsWriter,
    Position,
    positions_of,
    prompt_logprobs_reply,
)
from tokenmill.entrypoints.http.openapi import json_body, replies
from tokenmill.entrypoints.http.prompts import as_engine_prompt, completion_prompts
from tokenmill.entrypoints.http.protocol import CompletionRequest
from tokenmill.entrypoints.http.record import RequestRecord
from tokenmill.entrypoints.http.replies import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
)
from tokenmill.entrypoints.http.response_format import Form
from tokenmill.entrypoints.http.sampling import num_listed, sampling_params
from tokenmill.entrypoints.http.state import ServerState, record_of, state_of
from tokenmill.entrypoints.http.stream import CompletionChunks
from tokenmill.errors import InvalidRequestError
from tokenmill.outputs import CompletionOutput, RequestOutput
from tokenmill.sampling_params import SamplingParams

router = APIRouter(default_response_class=Response)

_FIELDS = {"prompt_token_ids": "prompt", "extra_args": "vllm_xargs"}
"""Parameters of the engine that a completion has under another name."""


@router.post(
    "/v1/completions",
    responses=replies(CompletionReply, stream=True),
    openapi_extra=json_body(CompletionRequest),
)
async def create_completion(request: Request) -> Response:
    """Continue a prompt, or each of several."""
    state, record = state_of(request), record_of(request)
    state.check_open()
    fields = await read_request(request, CompletionRequest)
    return CompletionJob(state, record, fields).response()


class CompletionJob(GenerationJob[CompletionRequest]):
    """A request to continue prompts."""

    def __init__(
        self, state: ServerState, record: RequestRecord, fields: CompletionRequest
    ) -> None:
        super().__init__(state, record, fields, "cmpl")
        self._echo = bool(fields.echo)
        self._names = {**_FIELDS, **(self._form.fields if self._form else {})}
        self._params = completion_params(state, fields, self._form)
        self._beams = beam_search_params(fields, self._params)
        self.n = self._params.n
        self._given = completion_prompts(fields, state.args.max_prompts)
        self._num_prompts = len(self._given)
        if fields.kv_transfer_params and self._num_prompts > 1:
            raise InvalidRequestError(
                f"kv_transfer_params are of one prompt, and there are {self._num_prompts}; send"
                " them one by one.",
                parameter="kv_transfer_params",
            )
        self.hides_output = fields.max_tokens == 0

    async def _generation(self) -> Generation:
        is_alone = self._num_prompts == 1
        prompts = [
            await as_engine_prompt(self._state, prompt, self._fields, is_alone=is_alone)
            for prompt in self._given
        ]
        return self._generate(prompts, hides_output=self.hides_output)

    def _reply(self, generation: Generation, outputs: Sequence[RequestOutput]) -> CompletionReply:
        return CompletionReply(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[
                self._choice(number, output, sequence)
                for number, output in enumerate(outputs)
                for sequence in output.outputs
            ],
            usage=self._usage(generation),
            timings=self._timings(generation),
            kv_transfer_params=outputs[0].kv_transfer_params or UNSET,
        )

    def _pieces(self, generation: Generation) -> _Pieces:
        return _Pieces(self, self._chunks(CompletionChunks, "text_completion", generation))

    def _choice(
        self, number: int, output: RequestOutput, sequence: CompletionOutput
    ) -> CompletionChoice:
        fields = self._fields
        wants_ids = self.tells_ids
        wants_prompt = fields.prompt_logprobs is not None and output.prompt_logprobs is not None
        hidden = self.hides_output
        return CompletionChoice(
            index=number * self.n + sequence.index,
            text=self.echoed(number, output) + ("" if hidden else sequence.text),
            logprobs=self.logprobs(self.logprobs_writer(), output, sequence, first=True),
            finish_reason="length" if hidden else sequence.finish_reason,
            stop_reason=None if hidden else sequence.stop_reason,
            token_ids=([] if hidden else sequence.token_ids) if wants_ids else UNSET,
            prompt_token_ids=output.prompt_token_ids if wants_ids else UNSET,
            prompt_logprobs=prompt_logprobs_reply(output.prompt_logprobs or [])
            if wants_prompt
            else UNSET,
        )

    def echoed(self, number: int, output: RequestOutput) -> str:
        """The prompt's text, if the answer is to begin with it."""
        if not self._echo:
            return ""
        given = self._given[number]
        if isinstance(given, str) and self._fields.truncate_prompt_tokens is None:
            return given
        return self._state.tokenizer.decode(output.prompt_token_ids)

    def logprobs_writer(self) -> CompletionLogprobsWriter | None:
        if self._params.logprobs is None:
            return None
        as_ids = bool(self._fields.return_tokens_as_token_ids)
        return CompletionLogprobsWriter(
            num_listed(self._params.logprobs, self._state), as_ids=as_ids
        )

    def logprobs(
        self,
        writer: CompletionLogprobsWriter | None,
        output: RequestOutput,
        sequence: CompletionOutput,
        *,
        first: bool,
    ) -> CompletionLogprobs | None:
        """Entries of the new tokens, before them those of an echoed prompt."""
        if writer is None:
            return None
        positions: list[Position] = []
        if self._echo and first:
            places = output.prompt_logprobs or [None] * len(output.prompt_token_ids)
            positions += positions_of(output.prompt_token_ids, places)
        if not self.hides_output:
            positions += positions_of(sequence.token_ids, sequence.logprobs or [])
        decode = self._state.tokenizer.decode_token
        texts = [decode(token_id) if place is None else "" for token_id, place in positions]
        return writer.write(positions, texts)


class _Pieces:
    """The deltas of each choice as chunks."""

    def __init__(self, job: CompletionJob, chunks: CompletionChunks) -> None:
        self._chunks = chunks
        self._job = job
        self._writers: dict[int, CompletionLogprobsWriter | None] = {}
        """By the choice's index; a choice is in here once it has had its first chunk."""

    def write(self, number: int, output: RequestOutput) -> bytes:
        """What an output of prompt `number` brings; nothing while its text is held back."""
        return b"".join(self._write(number, output, sequence) for sequence in output.outputs)

    def end(self) -> bytes:
        """The usage, if it was asked for."""
        return self._chunks.usage()

    def _write(self, number: int, output: RequestOutput, sequence: CompletionOutput) -> bytes:
        job, hidden = self._job, self._job.hides_output
        index = number * job.n + sequence.index
        text = "" if hidden else sequence.text
        first = index not in self._writers
        if first:
            self._writers[index] = job.logprobs_writer()
            text = job.echoed(number, output) + text
        logprobs = job.logprobs(self._writers[index], output, sequence, first=first)
        if not (text or sequence.finish_reason or job.tells_ids or (logprobs and logprobs.tokens)):
            return b""
        return self._chunks.text(
            index,
            text,
            logprobs=None if logprobs is None else msgspec.json.encode(logprobs),
            token_ids=[] if hidden else sequence.token_ids,
            finish_reason="length" if hidden else sequence.finish_reason,
            stop_reason=None if hidden else sequence.stop_reason,
            prompt_token_ids=output.prompt_token_ids if first else None,
        )


def completion_params(
    state: ServerState, fields: CompletionRequest, form: Form | None = None
) -> SamplingParams:
    """Raises `InvalidRequestError` that names the field."""
    more: dict[str, Any] = {} if form is None else {"structured_outputs": form.params}
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise InvalidRequestError(
            f"best_of={fields.best_of} must equal n ({fields.n or 1}): every sequence is returned.",
            parameter="best_of",
        )
    if fields.max_tokens == 0:
        if not fields.echo:
            raise InvalidRequestError(
                "max_tokens=0 must be at least 1 unless echo is set.", parameter="max_tokens"
            )
        # The prompt's log-probabilities come with a first token, which nobody gets to see.
        more["max_tokens"] = 1
        more["min_tokens"] = 0
    elif fields.max_tokens is not None:
        more["max_tokens"] = fields.max_tokens
    if fields.logprobs is not None:
        more["logprobs"] = fields.logprobs
        if fields.echo and fields.prompt_logprobs is None:
            more["prompt_logprobs"] = fields.logprobs
    return sampling_params(fields, state.engine.default_params, state.args, **more)
