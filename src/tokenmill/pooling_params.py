"""What a caller may ask of a pooling model: a prompt becomes a vector, or scores.

Checks that need the model (what it can do, its sizes) are made by the input processor.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokenmill import parameter_checks as check
from tokenmill.errors import InvalidRequestError, did_you_mean, shown

POOLING_TASKS = ("embed", "classify", "token_embed", "token_classify")
"""One vector or one set of scores for a prompt, or for each of its tokens."""
MAX_DIMENSIONS = 1 << 20
MAX_TRUNCATION = 2**31 - 1
_OLD_TASKS = {"encode": "token_embed", "score": "classify", "reward": "token_classify"}


class PoolingParams(
    msgspec.Struct, metaclass=check.StrictKeywords, frozen=True, kw_only=True, omit_defaults=True
):
    """How the hidden states of one prompt become its result.

    Raises `InvalidRequestError` (a `ValueError`) that names the parameter, its value and its limit.
    """

    task: str | None = None
    """embed, classify, token_embed or token_classify; None is what the model is for."""
    dimensions: int | None = None
    """Keep the first so many values of an embedding; only for models trained so (Matryoshka)."""
    use_activation: bool | None = None
    """Whether embeddings are normalised, and scores go through sigmoid or softmax; None is what the
    model's files say, and yes without any."""
    truncate_prompt_tokens: int | None = None
    """Keep the first so many tokens of the prompt; -1 as many as the model takes."""
    skip_reading_prefix_cache: bool | None = None
    """Compute the whole prompt even if the cache has its beginning."""

    def __post_init__(self) -> None:
        for name, value in self._normalised().items():
            msgspec.structs.force_setattr(self, name, value)

    def replace(self, **changes: Any) -> PoolingParams:
        """The same parameters with some of them changed, checked again."""
        return msgspec.structs.replace(self, **changes)

    def _normalised(self) -> dict[str, Any]:
        return {
            "task": None if self.task is None else pooling_task("task", self.task),
            "dimensions": check.optional_integer("dimensions", self.dimensions, 1, MAX_DIMENSIONS),
            "use_activation": _optional_flag("use_activation", self.use_activation),
            "truncate_prompt_tokens": _truncation(self.truncate_prompt_tokens),
            "skip_reading_prefix_cache": _optional_flag(
                "skip_reading_prefix_cache", self.skip_reading_prefix_cache
            ),
        }


def pooling_task(name: str, value: object) -> str:
    """The task that the parameter `name` asks for. Raises `InvalidRequestError`."""
    if isinstance(value, str) and value in POOLING_TASKS:
        return value
    hint = ""
    if isinstance(value, str):
        meant = _OLD_TASKS.get(value)
        hint = f" Did you mean {meant!r}?" if meant else did_you_mean(value, POOLING_TASKS)
    raise InvalidRequestError(
        f"{name}={shown(value)} is not one of: {', '.join(POOLING_TASKS)}.{hint}", parameter=name
    )


def _optional_flag(name: str, value: object) -> bool | None:
    return None if value is None else check.flag(name, value)


def _truncation(value: object) -> int | None:
    name = "truncate_prompt_tokens"
    keep = check.optional_integer(name, value, -1, MAX_TRUNCATION)
    if keep == 0:
        raise check.refusal(name, value, "must be at least 1, or -1 for what the model takes")
    return keep
