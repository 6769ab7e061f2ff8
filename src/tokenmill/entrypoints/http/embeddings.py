"""POST /v1/embeddings, POST /pooling: vectors, as numbers or in base64."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from tokenmill.entrypoints.http.body import read_request
from tokenmill.entrypoints.http.errors import blamed_on_fields
from tokenmill.entrypoints.http.openapi import json_body, pooling_replies
from tokenmill.entrypoints.http.pooling_job import MAX_INPUTS, PoolingJob, usage_of
from tokenmill.entrypoints.http.pooling_protocol import (
    ENCODING_FORMATS,
    Embedding,
    EmbeddingReply,
    EmbeddingRequest,
    Pooled,
    PoolingBody,
    PoolingReply,
)
from tokenmill.entrypoints.http.prompts import given_prompts
from tokenmill.entrypoints.http.record import RequestRecord
from tokenmill.entrypoints.http.sse import JsonAnswer
from tokenmill.entrypoints.http.state import ServerState, record_of, state_of
from tokenmill.errors import InvalidRequestError, did_you_mean, shown
from tokenmill.pooling_params import pooling_task

router = APIRouter(default_response_class=Response)

_NAMES = {"prompt": "input", "prompt_token_ids": "input"}


@router.post(
    "/v1/embeddings",
    responses=pooling_replies(EmbeddingReply),
    openapi_extra=json_body(EmbeddingRequest),
)
async def create_embedding(request: Request) -> Response:
    """The vector of a text, or of each of several."""
    state, record = state_of(request), record_of(request)
    state.check_open()
    fields = await read_request(request, EmbeddingRequest)
    job = VectorJob(state, record, fields, "embed", prefix="embd")
    job.require("embed", "/v1/embeddings")
    return JsonAnswer(state, record, job.embeddings)


@router.post(
    "/pooling", responses=pooling_replies(PoolingReply), openapi_extra=json_body(PoolingBody)
)
async def create_pooling(request: Request) -> Response:
    """What the model makes of a text, or of each of its tokens."""
    state, record = state_of(request), record_of(request)
    state.check_open()
    fields = await read_request(request, PoolingBody)
    task = None if fields.task is None else pooling_task("task", fields.task)
    job = VectorJob(state, record, fields, task, prefix="pool")
    return JsonAnswer(state, record, job.pooled)


class VectorJob(PoolingJob):
    """One request, checked."""

    def __init__(
        self,
        state: ServerState,
        record: RequestRecord,
        fields: EmbeddingRequest,
        task: str | None,
        *,
        prefix: str,
    ) -> None:
        super().__init__(state, record, fields, prefix)
        encoding = "float" if fields.encoding_format is None else fields.encoding_format
        if encoding not in ENCODING_FORMATS:
            raise InvalidRequestError(
                f"encoding_format={shown(encoding)} is not one of: {', '.join(ENCODING_FORMATS)}."
                f"{did_you_mean(encoding, ENCODING_FORMATS)}",
                parameter="encoding_format",
            )
        self._as_base64 = encoding == "base64"
        self._params = self.params(task=task, dimensions=fields.dimensions)
        self._prompts = given_prompts(fields.input, "input", MAX_INPUTS)

    async def embeddings(self) -> bytes:
        """The answer of /v1/embeddings as JSON."""
        with blamed_on_fields(_NAMES):
            outputs = await self.run(self._prompts, self._params, "input")
        return msgspec.json.encode(
            EmbeddingReply(
                id=self.id,
                created=self.created,
                model=self.model,
                data=[
                    Embedding(index=index, embedding=self._encoded(output.pooled))
                    for index, output in enumerate(outputs)
                ],
                usage=usage_of(outputs),
            )
        )

    async def pooled(self) -> bytes:
        """The answer of /pooling as JSON."""
        with blamed_on_fields(_NAMES):
            outputs = await self.run(self._prompts, self._params, "input")
        return msgspec.json.encode(
            PoolingReply(
                id=self.id,
                created=self.created,
                model=self.model,
                data=[
                    Pooled(index=index, data=self._encoded(output.pooled))
                    for index, output in enumerate(outputs)
                ],
                usage=usage_of(outputs),
            )
        )

    def _encoded(self, values: Any) -> Any:
        """float32 of numpy as lists of numbers, or as base64 of little-endian bytes."""
        if not self._as_base64:
            return values.tolist()
        return base64.b64encode(values.astype("<f4").tobytes()).decode()
