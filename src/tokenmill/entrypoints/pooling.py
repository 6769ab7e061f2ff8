"""What a pooling model makes of prompts, offline: results to outputs, texts to pairs, scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tokenmill.config.engine_config import EngineConfig, PoolingConfig
from tokenmill.engine.prompts import Prompt
from tokenmill.errors import GenerationError, InvalidRequestError
from tokenmill.outputs import RequestOutput
from tokenmill.pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from tokenmill.pooling_params import PoolingParams


def pooling_of(config: EngineConfig, what: str) -> PoolingConfig:
    """How the model pools. Raises `InvalidRequestError` if it generates."""
    pooling = config.model.pooling
    if pooling is None:
        raise InvalidRequestError(
            f"{what} needs a pooling model, and {config.model.name} generates; build the engine"
            f" with runner='pooling', or with a model for embeddings or scores.",
            parameter="model",
        )
    return pooling


def with_task(params: PoolingParams, task: str) -> PoolingParams:
    """`params` for this task. Raises `InvalidRequestError` for those that ask for another one."""
    if params.task not in (None, task):
        raise InvalidRequestError(
            f"pooling_params.task={params.task!r} is not {task!r}, which this call is for.",
            parameter="task",
        )
    return params.replace(task=task)


def pooling_output(output: RequestOutput) -> PoolingRequestOutput:
    """A finished request's result as it is. Raises `GenerationError` if it has failed."""
    _check(output)
    return PoolingRequestOutput(
        output.request_id,
        PoolingOutput(output.pooled),
        output.prompt_token_ids,
        output.num_cached_tokens,
    )


def embedding_output(output: RequestOutput) -> EmbeddingRequestOutput:
    """The same as an embedding."""
    _check(output)
    return EmbeddingRequestOutput(
        output.request_id,
        EmbeddingOutput(output.pooled.tolist()),
        output.prompt_token_ids,
        output.num_cached_tokens,
    )


def classification_output(output: RequestOutput) -> ClassificationRequestOutput:
    """The same as scores of classes."""
    _check(output)
    return ClassificationRequestOutput(
        output.request_id,
        ClassificationOutput(output.pooled.tolist()),
        output.prompt_token_ids,
        output.num_cached_tokens,
    )


def scoring_output(output: RequestOutput) -> ScoringRequestOutput:
    """A cross-encoder's score of a pair."""
    _check(output)
    return ScoringRequestOutput(
        output.request_id,
        ScoringOutput(float(output.pooled[0])),
        output.prompt_token_ids,
        output.num_cached_tokens,
    )


def similarity_output(first: RequestOutput, second: RequestOutput) -> ScoringRequestOutput:
    """The cosine of two embeddings."""
    _check(first)
    _check(second)
    a, b = (output.pooled.astype(np.float64) for output in (first, second))
    size = float(np.sqrt(a @ a) * np.sqrt(b @ b))
    return ScoringRequestOutput(
        second.request_id,
        ScoringOutput(float(a @ b) / size if size else 0.0),
        [*first.prompt_token_ids, *second.prompt_token_ids],
        first.num_cached_tokens + second.num_cached_tokens,
    )


def scores_pairs(pooling: PoolingConfig, what: str) -> bool:
    """Whether pairs are scored together; else each text is embedded.

    Raises `InvalidRequestError` for a classifier of several classes, which has no one score.
    """
    if pooling.embeds:
        return False
    if pooling.size != 1:
        raise InvalidRequestError(
            f"{what} needs an embedding model or a classifier with one class; this model has"
            f" {pooling.size} classes.",
            parameter="model",
        )
    return True


def as_texts(name: str, given: Any) -> list[Any]:
    """One text, or several. Raises `InvalidRequestError` for none."""
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        return [given]
    texts = list(given)
    if not texts:
        raise InvalidRequestError(f"{name} is empty; give at least one.", parameter=name)
    if isinstance(texts[0], int):
        return [texts]
    return texts


def paired(first: Sequence[Any], second: Sequence[Any], names: tuple[str, str]) -> list[Any]:
    """The first texts as often as there are second ones: one for all, or one for each."""
    if len(first) not in (1, len(second)):
        raise InvalidRequestError(
            f"{names[0]} has {len(first)} entries and {names[1]} has {len(second)}; give one, or"
            f" one for each.",
            parameter=names[0],
        )
    return list(first) * len(second) if len(first) == 1 else list(first)


def pair_prompt(first: Any, second: Any) -> Prompt:
    """Two texts that a cross-encoder reads together."""
    return {"prompt": first, "text_pair": second}  # type: ignore[return-value]


def _check(output: RequestOutput) -> None:
    if output.pooled is None:
        why = output.outputs[0].error if output.outputs else None
        raise GenerationError(f"request {output.request_id} failed: {why or 'it was aborted'}.")
