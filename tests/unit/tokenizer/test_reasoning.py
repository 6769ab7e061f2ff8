"""Marks of reasoning: as ids, at the end of prompts, and recognised from a model's files."""

from __future__ import annotations

import pytest
import tokenizers

from helpers.tiny_text import tiny_tokenizer
from tokenmill.errors import ConfigError
from tokenmill.tokenizer.reasoning import (
    REASONING_FORMATS,
    ReasoningMarkers,
    reasoning_markers,
    resolve_reasoning_parser,
)
from tokenmill.tokenizer.tokenizer import Tokenizer

THINKING_TEMPLATE = "{{ messages[0].content.split('</think>')[-1] }}"


def tokenizer_with(*tokens, template="{{ messages }}"):
    backend = tiny_tokenizer()
    backend.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in tokens])
    return Tokenizer(backend, chat_templates={"default": template})


def test_marks_are_one_token_where_the_vocabulary_has_them():
    tokenizer = tokenizer_with("<think>", "</think>")
    markers = reasoning_markers(tokenizer, "qwen3")
    assert markers.start_ids == (tokenizer.token_to_id("<think>"),)
    assert markers.end_ids == (tokenizer.token_to_id("</think>"),)
    assert not markers.assumed_open
    assert reasoning_markers(tokenizer, "deepseek_r1").assumed_open


def test_marks_are_several_tokens_elsewhere():
    tokenizer = tokenizer_with()
    markers = reasoning_markers(tokenizer, "qwen3")
    assert len(markers.end_ids) > 1
    assert tokenizer.decode(markers.end_ids) == "</think>"


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_every_family_has_marks(name):
    markers = reasoning_markers(tokenizer_with(), name)
    assert markers.start_ids
    assert markers.end_ids
    assert markers.start_ids != markers.end_ids


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<|im_start|>assistant\n", None),
        ("<|im_start|>assistant\n<think>", True),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n</think>", False),
        ("what is <think>?<|im_end|>\n<|im_start|>assistant\n", None),
        ("</think>Hi<|im_end|>\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n", None),
        ("", None),
    ],
)
@pytest.mark.parametrize("tokens", [("<think>", "</think>"), ()])
def test_the_end_of_a_prompt_opens_or_closes_the_reasoning(prompt, is_open, tokens):
    tokenizer = tokenizer_with(*tokens)
    ids = tokenizer.encode(prompt)
    assert reasoning_markers(tokenizer, "qwen3").open_after(ids) is is_open
    assumed = reasoning_markers(tokenizer, "deepseek_r1").open_after(ids)
    assert assumed is (is_open is not False)


def test_marks_of_several_ids():
    markers = ReasoningMarkers((1, 2), (3, 4))
    assert markers.open_after([9, 1, 2]) is True
    assert markers.open_after([1, 2, 3, 4, 7, 7]) is False
    assert markers.open_after([1, 2, 7, 7, 7]) is None
    assert markers.open_after([2]) is None


def test_a_model_is_recognised_by_its_tokens_and_its_template():
    thinking = tokenizer_with("<think>", "</think>", template=THINKING_TEMPLATE)
    assert resolve_reasoning_parser("auto", thinking) == "qwen3"
    assert resolve_reasoning_parser("none", thinking) is None
    assert resolve_reasoning_parser("", thinking) is None
    assert resolve_reasoning_parser("deepseek_r1", thinking) == "deepseek_r1"
    without_tokens = tokenizer_with(template=THINKING_TEMPLATE)
    assert resolve_reasoning_parser("auto", without_tokens) is None
    without_template = tokenizer_with("<think>", "</think>")
    assert resolve_reasoning_parser("auto", without_template) is None
    assert resolve_reasoning_parser("auto", None) is None
    mistral = tokenizer_with("[THINK]", "[/THINK]", template="{{ '[/THINK]' }}")
    assert resolve_reasoning_parser("auto", mistral) == "mistral"


def test_a_wrong_name_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match="Did you mean 'deepseek_r1'"):
        resolve_reasoning_parser("deepseek-r1", None)
