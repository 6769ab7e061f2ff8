"""Fields of OpenAI's and vLLM's protocols that would change an answer, but that nothing here acts
on. Their neutral values are fine; another one is refused rather than ignored.

A name leaves this table by becoming a field of `SamplingParams`: `sampling.py` then passes it on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.errors import InvalidRequestError
from tokenmill.sampling_params import SamplingParams

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "ec_transfer_params": ({},),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": ([],),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "prompt_embeds": (),
    "repetition_detection": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_prompt_text": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
"""Name to the values, besides null, that ask for nothing."""


def sampling_extras(given: Mapping[str, Any]) -> dict[str, Any]:
    """Of the fields above those that `SamplingParams` takes, for whoever builds them."""
    return {
        name: value
        for name, value in given.items()
        if value is not None and name in SamplingParams.__struct_fields__
    }


def refuse_unsupported(given: Mapping[str, Any]) -> None:
    """Raise `InvalidRequestError` for the first field that asks for what is not there."""
    for name, value in given.items():
        if value is None or name in SamplingParams.__struct_fields__:
            continue
        if any(_same(value, neutral) for neutral in UNSUPPORTED[name]):
            continue
        raise InvalidRequestError(
            f"{name} is not supported by this server; leave it out.", parameter=name
        )


def _same(value: Any, neutral: Any) -> bool:
    """Equality, but false is not 0."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
