"""Sampling parameters that are text, as token ids."""

from __future__ import annotations

from tokenmill.contracts.request import TokenRules
from tokenmill.errors import InvalidRequestError
from tokenmill.sampling_params import SamplingParams
from tokenmill.tokenizer.reasoning import ReasoningMarkers
from tokenmill.tokenizer.tokenizer import Tokenizer

_LINE = "\n"
"""What a word follows where no blank is before it."""


def token_rules(
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    reasoning: ReasoningMarkers | None,
    vocab_size: int,
) -> TokenRules | None:
    """What the parameters ask for; None if nothing.

    `reasoning` are the model's marks. Raises `InvalidRequestError` for what cannot be had without a
    tokenizer or marks.
    """
    asks_budget = params.thinking_token_budget is not None
    # A grammar counts from the end of reasoning on.
    knows_marks = asks_budget or (params.structured_outputs is not None and reasoning is not None)
    if not params.bad_words and not knows_marks:
        return None
    if asks_budget and reasoning is None:
        raise InvalidRequestError(
            f"thinking_token_budget={params.thinking_token_budget} needs a model that marks its"
            f" reasoning, and none is known of this one; leave it out, or build the engine with the"
            f" model's reasoning_parser.",
            parameter="thinking_token_budget",
        )
    if params.bad_words and tokenizer is None:
        raise InvalidRequestError(
            "bad_words needs a tokenizer, and the engine has none (skip_tokenizer_init);"
            " use logit_bias.",
            parameter="bad_words",
        )
    sequences: dict[tuple[int, ...], None] = {}
    for word in params.bad_words or ():
        assert tokenizer is not None
        sequences.update(dict.fromkeys(_spellings(tokenizer, word, vocab_size)))
    return TokenRules(
        bad_words=[list(ids) for ids in sequences], reasoning=reasoning if knows_marks else None
    )


def _spellings(tokenizer: Tokenizer, word: str, vocab_size: int) -> list[tuple[int, ...]]:
    """The ids that write a word: at the start of a text, behind a blank, and right behind something
    else.
    """
    bare = word.lstrip(" ") or word
    line = tuple(tokenizer.encode(_LINE, add_special_tokens=False))
    behind_line = tuple(tokenizer.encode(_LINE + bare, add_special_tokens=False))
    found = [
        tuple(tokenizer.encode(bare, add_special_tokens=False)),
        tuple(tokenizer.encode(" " + bare, add_special_tokens=False)),
    ]
    if behind_line[: len(line)] == line:  # else the two have become one token
        found.append(behind_line[len(line) :])
    for ids in found:
        if max(ids, default=0) >= vocab_size:
            raise InvalidRequestError(
                f"bad_words holds {word!r}, whose token {max(ids)} this model does not have: its"
                f" ids lie between 0 and {vocab_size - 1}.",
                parameter="bad_words",
            )
    return [ids for ids in found if ids]
