"""POST /classify, POST /score, POST /rerank: scores of texts, and of pairs of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from tokenmill.entrypoints.http.body import read_request
from tokenmill.entrypoints.http.errors import blamed_on_fields
from tokenmill.entrypoints.http.openapi import json_body, pooling_replies
from tokenmill.entrypoints.http.pooling_job import MAX_INPUTS, PoolingJob, usage_of
from tokenmill.entrypoints.http.pooling_protocol import (
    Classification,
    ClassificationReply,
    ClassificationRequest,
    Document,
    PoolingUsage,
    RankedDocument,
    RerankReply,
    RerankRequest,
    Score,
    ScoreReply,
    ScoreRequest,
)
from tokenmill.entrypoints.http.prompts import given_prompts, too_many_prompts
from tokenmill.entrypoints.http.record import RequestRecord
from tokenmill.entrypoints.http.sse import JsonAnswer
from tokenmill.entrypoints.http.state import ServerState, record_of, state_of
from tokenmill.entrypoints.pooling import (
    as_texts,
    pair_prompt,
    paired,
    scores_pairs,
    scoring_output,
    similarity_output,
)
from tokenmill.errors import InvalidRequestError

router = APIRouter(default_response_class=Response)

_INPUT_NAMES = {"prompt": "input", "prompt_token_ids": "input"}


@router.post(
    "/classify",
    responses=pooling_replies(ClassificationReply),
    openapi_extra=json_body(ClassificationRequest),
)
async def create_classification(request: Request) -> Response:
    """The class of a text, or of each of several."""
    state, record = state_of(request), record_of(request)
    state.check_open()
    fields = await read_request(request, ClassificationRequest)
    job = ClassificationJob(state, record, fields)
    return JsonAnswer(state, record, job.reply)


@router.post("/score", responses=pooling_replies(ScoreReply), openapi_extra=json_body(ScoreRequest))
@router.post(
    "/v1/score", responses=pooling_replies(ScoreReply), openapi_extra=json_body(ScoreRequest)
)
async def create_score(request: Request) -> Response:
    """How well pairs of texts go together."""
    state, record = state_of(request), record_of(request)
    state.check_open()
    fields = await read_request(request, ScoreRequest)
    first, first_name = _given(fields, ("text_1", "queries", "data_1"))
    second, second_name = _given(fields, ("text_2", "documents", "data_2"))
    job = PairsJob(state, record, fields, "score", first, second, (first_name, second_name))

    async def reply() -> bytes:
        scores, usage = await job.scores()
        data = [Score(index=index, score=score) for index, score in enumerate(scores)]
        return msgspec.json.encode(
            ScoreReply(id=job.id, created=job.created, model=job.model, data=data, usage=usage)
        )

    return JsonAnswer(state, record, reply)


@router.post(
    "/rerank", responses=pooling_replies(RerankReply), openapi_extra=json_body(RerankRequest)
)
@router.post(
    "/v1/rerank", responses=pooling_replies(RerankReply), openapi_extra=json_body(RerankRequest)
)
@router.post(
    "/v2/rerank", responses=pooling_replies(RerankReply), openapi_extra=json_body(RerankRequest)
)
async def rerank(request: Request) -> Response:
    """Documents in the order in which they go with a query."""
    state, record = state_of(request), record_of(request)
    state.check_open()
    fields = await read_request(request, RerankRequest)
    texts = [each.text if isinstance(each, Document) else each for each in fields.documents]
    names = ("query", "documents")
    job = PairsJob(state, record, fields, "rerank", [fields.query], texts, names)
    top_n = fields.top_n or None
    if top_n is not None and top_n < 0:
        raise InvalidRequestError(f"top_n={top_n} must be at least 0.", parameter="top_n")

    async def reply() -> bytes:
        scores, usage = await job.scores()
        ranking = sorted(range(len(texts)), key=lambda index: -scores[index])[:top_n]
        repeats = fields.return_documents is not False
        results = [
            RankedDocument(
                index=index,
                relevance_score=scores[index],
                document=Document(texts[index]) if repeats else None,
            )
            for index in ranking
        ]
        return msgspec.json.encode(
            RerankReply(id=job.id, model=job.model, results=results, usage=usage)
        )

    return JsonAnswer(state, record, reply)


class ClassificationJob(PoolingJob):
    """One request to /classify, checked."""

    def __init__(
        self, state: ServerState, record: RequestRecord, fields: ClassificationRequest
    ) -> None:
        super().__init__(state, record, fields, "classify")
        self.require("classify", "/classify")
        self._prompts = given_prompts(fields.input, "input", MAX_INPUTS)

    async def reply(self) -> bytes:
        """The answer as JSON."""
        with blamed_on_fields(_INPUT_NAMES):
            outputs = await self.run(self._prompts, self.params(task="classify"), "input")
        return msgspec.json.encode(
            ClassificationReply(
                id=self.id,
                created=self.created,
                model=self.model,
                data=[
                    self._classification(index, output.pooled)
                    for index, output in enumerate(outputs)
                ],
                usage=usage_of(outputs),
            )
        )

    def _classification(self, index: int, scores: Any) -> Classification:
        labels = self.pooling.labels
        return Classification(
            index=index,
            label=labels[int(scores.argmax())],
            probs=scores.tolist(),
            num_classes=len(labels),
        )


class PairsJob(PoolingJob):
    """One request that scores pairs, checked."""

    def __init__(
        self,
        state: ServerState,
        record: RequestRecord,
        fields: ScoreRequest | RerankRequest,
        what: str,
        first: Sequence[str],
        second: Sequence[str],
        names: tuple[str, str],
    ) -> None:
        """`names` are the client's for the two."""
        super().__init__(state, record, fields, what)
        if not second:
            raise InvalidRequestError(
                f"{names[1]} is empty; give at least one.", parameter=names[1]
            )
        if len(second) > MAX_INPUTS:
            raise too_many_prompts(names[1], len(second), MAX_INPUTS)
        self._first, self._second, self._names = first, second, names
        self._pairs = list(zip(paired(first, second, names), second, strict=True))
        self._together = scores_pairs(self.pooling, what)

    async def scores(self) -> tuple[list[float], PoolingUsage]:
        """One for each pair, and the tokens that they took."""
        with blamed_on_fields({"prompt": self._names[1]}):
            return await self._scores()

    async def _scores(self) -> tuple[list[float], PoolingUsage]:
        if self._together:
            prompts = [pair_prompt(*pair) for pair in self._pairs]
            params = self.params(task="classify")
            outputs = await self.run(prompts, params, self._names[1])
            results = [scoring_output(output) for output in outputs]
        else:
            params = self.params(task="embed")
            outputs = await self.run([*self._first, *self._second], params, self._names[1])
            count = len(self._first)
            firsts = paired(outputs[:count], self._second, self._names)
            results = [
                similarity_output(*each) for each in zip(firsts, outputs[count:], strict=True)
            ]
        return [result.outputs.score for result in results], usage_of(outputs)


def _given(fields: ScoreRequest, names: tuple[str, ...]) -> tuple[list[str], str]:
    """The texts under one of these names, and the name."""
    found = [name for name in names if getattr(fields, name) is not None]
    if len(found) != 1:
        raise InvalidRequestError(
            f"give exactly one of: {', '.join(names)}; there"
            f" {'are' if len(found) > 1 else 'is'} {' and '.join(found) or 'none'}.",
            parameter=names[0],
        )
    return as_texts(found[0], getattr(fields, found[0])), found[0]
