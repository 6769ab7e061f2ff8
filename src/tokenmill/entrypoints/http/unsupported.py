"""Fields of OpenAI's and vLLM's protocols that would change an answer, but that nothing here acts
on. Their neutral values are fine; another one is refused rather than ignored.

A name leaves this table by becoming a field of a request in `protocol.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.errors import InvalidRequestError

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "ec_transfer_params": ({},),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prompt_embeds": (),
    "return_prompt_text": (False,),
    "suffix": ("",),
    "truncation_side": ("left",),
    "web_search_options": (),
}
"""Name to the values, besides null, that ask for nothing."""


def refuse_unsupported(given: Mapping[str, Any]) -> None:
    """Raise `InvalidRequestError` for the first field that asks for what is not there."""
    for name, value in given.items():
        if value is None or any(_same(value, neutral) for neutral in UNSUPPORTED[name]):
            continue
        raise InvalidRequestError(
            f"{name} is not supported by this server; leave it out.", parameter=name
        )


def _same(value: Any, neutral: Any) -> bool:
    """Equality, but false is not 0."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
