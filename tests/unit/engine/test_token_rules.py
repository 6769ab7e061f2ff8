"""Words and marks of reasoning as token ids."""

from __future__ import annotations

import pytest

from helpers.tiny_text import tiny_tokenizer
from helpers.tokenizers import sentencepiece_tokenizer
from tokenmill.engine.token_rules import token_rules
from tokenmill.errors import InvalidRequestError
from tokenmill.sampling_params import SamplingParams
from tokenmill.tokenizer.reasoning import ReasoningMarkers
from tokenmill.tokenizer.tokenizer import Tokenizer

MARKS = ReasoningMarkers((6,), (7,))


def rules_of(tokenizer, marks=None, vocab_size=10_000, **params):
    return token_rules(SamplingParams(**params), tokenizer, marks, vocab_size)


def test_nothing_asked_is_nothing_sent():
    assert rules_of(Tokenizer(tiny_tokenizer()), MARKS) is None
    assert rules_of(None) is None


def test_words_with_and_without_a_blank():
    tokenizer = Tokenizer(tiny_tokenizer())
    rules = rules_of(tokenizer, bad_words=["quick", " brown"])
    for word in ("quick", "brown"):
        for text in (word, " " + word):
            assert tokenizer.encode(text, add_special_tokens=False) in rules.bad_words
    assert len(rules.bad_words) == len({tuple(ids) for ids in rules.bad_words})
    assert rules.reasoning is None


def test_a_blank_is_a_word():
    tokenizer = Tokenizer(tiny_tokenizer())
    assert (
        tokenizer.encode(" ", add_special_tokens=False)
        in rules_of(tokenizer, bad_words=[" "]).bad_words
    )


def test_words_of_a_tokenizer_that_writes_its_own_blank():
    """Such a tokenizer spells `word` alone as `▁word`; inside a text it may be without."""
    tokenizer = sentencepiece_tokenizer()
    text = "(quick"
    rules = rules_of(tokenizer, bad_words=["quick"])
    inside = tokenizer.encode(text, add_special_tokens=False)
    assert any(
        inside[start : start + len(ids)] == ids
        for ids in rules.bad_words
        for start in range(len(inside))
    )


def test_what_cannot_be_had():
    tokenizer = Tokenizer(tiny_tokenizer())
    with pytest.raises(InvalidRequestError, match="needs a tokenizer") as caught:
        rules_of(None, bad_words=["x"])
    assert caught.value.parameter == "bad_words"
    with pytest.raises(InvalidRequestError, match=r"'quick', whose token \d+ this model") as caught:
        rules_of(tokenizer, bad_words=["quick"], vocab_size=5)
    assert caught.value.parameter == "bad_words"
    with pytest.raises(InvalidRequestError, match="needs a model that marks") as caught:
        rules_of(tokenizer, thinking_token_budget=5)
    assert caught.value.parameter == "thinking_token_budget"
    assert rules_of(tokenizer, MARKS, thinking_token_budget=5).reasoning == MARKS


def test_a_form_begins_behind_the_reasoning_so_its_marks_go_along():
    tokenizer = Tokenizer(tiny_tokenizer())
    assert rules_of(tokenizer, MARKS, structured_outputs={"regex": "a"}).reasoning == MARKS
    assert rules_of(tokenizer, structured_outputs={"regex": "a"}) is None
