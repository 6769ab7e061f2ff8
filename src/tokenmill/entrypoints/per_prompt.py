"""Arguments of `LLM` that are one for all prompts, or one for each."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenmill.engine.input_processor import RequestParams
from tokenmill.engine.prompts import Prompt
from tokenmill.errors import InvalidRequestError
from tokenmill.pooling_params import PoolingParams
from tokenmill.sampling_params import RequestOutputKind


def one_each(name: str, given: Any, kind: type, num_prompts: int, default: Any = None) -> list[Any]:
    """`given`, an object of `kind`, None, or a list of as many as there are prompts, as a list,
    with the default for each None.

    Raises `InvalidRequestError` that names the argument.
    """
    if given is None or isinstance(given, kind):
        given = [given] * num_prompts
    entries = as_list(name, given, f"{kind.__name__}, or one for all")
    if len(entries) != num_prompts:
        raise InvalidRequestError(
            f"{name} has {len(entries)} entries for {num_prompts} prompts;"
            f" give one, or one for each prompt.",
            parameter=name,
        )
    for each in entries:
        if each is not None and not isinstance(each, kind):
            raise InvalidRequestError(
                f"{name} holds {type(each).__name__}; each must be {kind.__name__}.",
                parameter=name,
            )
    return [default if each is None else each for each in entries]


def final_only(params: RequestParams) -> RequestParams:
    """The parameters of a request whose output comes once, as a whole."""
    if isinstance(params, PoolingParams):
        return params
    return params.replace(output_kind=RequestOutputKind.FINAL_ONLY)


def as_prompts(prompts: Any) -> list[Prompt]:
    """A single prompt in any form, or a sequence of prompts, as a list."""
    if isinstance(prompts, str | bytes | bytearray | Mapping) or not isinstance(prompts, Iterable):
        return [prompts]  # type: ignore[list-item]
    prompt_list = list(prompts)
    if not prompt_list:
        raise InvalidRequestError("prompts is empty; give at least one.", parameter="prompts")
    if isinstance(prompt_list[0], int | numbers.Integral):
        return [prompt_list]
    return prompt_list


def as_list(name: str, value: Any, what: str) -> list[Any]:
    """Raises `InvalidRequestError` for what is no list of such things."""
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        raise InvalidRequestError(
            f"{name} has type {type(value).__name__}; it must be a list of {what}.", parameter=name
        )
    return list(value)


def is_list(value: Any) -> bool:
    """Whether it is a sequence, and no text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
