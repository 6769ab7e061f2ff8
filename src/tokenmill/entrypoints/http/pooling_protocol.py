"""Bodies of the endpoints for pooling models, as clients of OpenAI, Cohere, Jina and vLLM send and
expect them. As in `protocol.py`, a field that is null counts as left out.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from tokenmill.entrypoints.http.field_types import (
    CacheSalt,
    ModelName,
    meta,
)
from tokenmill.pooling_params import MAX_DIMENSIONS, MAX_TRUNCATION, POOLING_TASKS

Texts = str | list[int | str | list[int]]
ENCODING_FORMATS = ("float", "base64")


_INPUT = meta("A text, its token ids, or a list of texts and lists of ids.")


class PoolingFields(Struct, kw_only=True):
    """What all of them share."""

    model: ModelName = None
    truncate_prompt_tokens: Annotated[
        int | None,
        meta(
            "Keep the first so many tokens; -1 as many as fit.", minimum=-1, maximum=MAX_TRUNCATION
        ),
    ] = None
    use_activation: Annotated[
        bool | None, meta("Whether embeddings are normalised and scores are probabilities.")
    ] = None
    priority: Annotated[int | None, meta("Smaller is earlier, under that policy.")] = None
    cache_salt: CacheSalt = None
    data_parallel_rank: Annotated[
        int | None, meta("The replica that is to compute it.", minimum=0)
    ] = None
    timeout: Annotated[float | None, meta("Seconds.", exclusiveMinimum=0)] = None
    user: str | None = None


class EmbeddingRequest(PoolingFields, kw_only=True):
    """Body of POST /v1/embeddings."""

    input: Annotated[Texts, _INPUT]
    encoding_format: Annotated[
        str | None,
        meta("float, or base64 of little-endian float32.", enum=[*ENCODING_FORMATS, None]),
    ] = None
    dimensions: Annotated[
        int | None,
        meta(
            "Keep the first so many values, of a model that was trained so.",
            minimum=1,
            maximum=MAX_DIMENSIONS,
        ),
    ] = None


class PoolingBody(EmbeddingRequest, kw_only=True):
    """Body of POST /pooling."""

    task: Annotated[
        str | None,
        meta("What to make of the input; what the model is for by default.", enum=[
            *POOLING_TASKS, None
        ]),
    ] = None  # fmt: skip


class ClassificationRequest(PoolingFields, kw_only=True):
    """Body of POST /classify."""

    input: Annotated[Texts, _INPUT]


class ScoreRequest(PoolingFields, kw_only=True):
    """Body of POST /score: one text for all of the second ones, or one for each."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: Annotated[str | list[str] | None, meta("Another name of text_1.")] = None
    documents: Annotated[str | list[str] | None, meta("Another name of text_2.")] = None
    data_1: Annotated[str | list[str] | None, meta("Another name of text_1.")] = None
    data_2: Annotated[str | list[str] | None, meta("Another name of text_2.")] = None


class Document(Struct):
    """A text to rank."""

    text: str


class RerankRequest(PoolingFields, kw_only=True):
    """Body of POST /rerank."""

    query: str
    documents: Annotated[list[str | Document], meta("Texts, or objects with one.", minItems=1)]
    top_n: Annotated[int | None, meta("Best results to give; all by default.", minimum=0)] = None
    return_documents: Annotated[bool | None, meta("Repeat the texts; true by default.")] = None


class PoolingUsage(Struct, kw_only=True):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class Embedding(Struct, kw_only=True):
    """One input's vector, as numbers or in base64."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingReply(Struct, kw_only=True):
    """Answer of /v1/embeddings."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage


class Pooled(Struct, kw_only=True):
    """One input's result: a vector, or one for each token; in base64 the same, in that order."""

    object: str = "pooling"
    index: int
    data: list[float | list[float]] | str


class PoolingReply(Struct, kw_only=True):
    """Answer of /pooling."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Pooled]
    usage: PoolingUsage


class Classification(Struct, kw_only=True):
    """One input's scores."""

    index: int
    label: str
    """Of the best class."""
    probs: list[float]
    num_classes: int


class ClassificationReply(Struct, kw_only=True):
    """Answer of /classify."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Classification]
    usage: PoolingUsage


class Score(Struct, kw_only=True):
    """How well one pair goes together."""

    object: str = "score"
    index: int
    score: float


class ScoreReply(Struct, kw_only=True):
    """Answer of /score."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class RankedDocument(Struct, kw_only=True, omit_defaults=True):
    """One document's place in the ranking."""

    index: int
    """Of the document in the request."""
    relevance_score: float
    document: Document | None = None


class RerankReply(Struct, kw_only=True):
    """Answer of /rerank, best first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: PoolingUsage


POOLING_STRUCTS = [
    EmbeddingRequest,
    PoolingBody,
    ClassificationRequest,
    ScoreRequest,
    RerankRequest,
    EmbeddingReply,
    PoolingReply,
    ClassificationReply,
    ScoreReply,
    RerankReply,
]
"""For the description of the interface."""
