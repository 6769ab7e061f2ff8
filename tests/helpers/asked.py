"""Requests that ask for every edit of the logits there is, alone and together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tokenmill.contracts.request import TokenRules
from tokenmill.tokenizer.reasoning import ReasoningMarkers

MARKS = ReasoningMarkers((5, 6), (7, 8, 7))
ONE_MARK = ReasoningMarkers((6,), (7,))
OPEN = ReasoningMarkers((6,), (7, 8), assumed_open=True)

EDITS: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.7, "presence_penalty": 0.3},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "frequency_penalty": 0.6, "presence_penalty": -1.0},
    {"logit_bias": {3: 100.0, 4: -100.0, 9: 1.5}},
    {"allowed_token_ids": [2, 3, 11, 4]},
    {"min_tokens": 4, "stop_token_ids": (1, 3), "logit_bias": {1: 30, 3: 30}},
    {"token_rules": TokenRules(bad_words=[[3], [11]])},
    {"token_rules": TokenRules(bad_words=[[3], [1, 2], [2, 1], [1, 1, 2], [0, 1, 2, 3]])},
    {
        "thinking_token_budget": 2,
        "token_rules": TokenRules(reasoning=MARKS),
        "logit_bias": {5: 6.0, 6: 6.0, 7: 2.0},
    },
    {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.2,
        "logit_bias": {0: 3.0, 12: 2.5},
        "allowed_token_ids": list(range(16)),
        "min_tokens": 3,
        "stop_token_ids": (0, 9),
        "thinking_token_budget": 5,
        "token_rules": TokenRules(bad_words=[[2, 3], [0, 0]], reasoning=MARKS),
    },
]
"""Of a vocabulary of at least 20; the keywords of `helpers.sampling.new_request`. Marks are one
model's, so the same for all rows."""
OTHER_MARKS: list[dict[str, Any]] = [
    {"thinking_token_budget": 0, "token_rules": TokenRules(reasoning=OPEN)},
    {
        "thinking_token_budget": 3,
        "token_rules": TokenRules(reasoning=ONE_MARK),
        "logit_bias": {6: 8.0},
    },
]

CHOICES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 10, "top_p": 0.9},
    {"temperature": 1.5, "min_p": 0.05},
]


def wishes(rng: np.random.Generator) -> Mapping[str, Any]:
    """Some edits, or none, and a way to choose."""
    edits = EDITS[int(rng.integers(len(EDITS)))] if rng.random() < 0.8 else {}
    return {**CHOICES[int(rng.integers(len(CHOICES)))], **edits}
