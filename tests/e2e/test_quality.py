"""What packed weights and bfloat16 cost, against the dequantised weights in float32."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from helpers.prompts import long_prompt, varied_prompts
from helpers.reference import reference_model
from tokenmill import LLM, RequestOutput, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
TEXTS = [
    *((ROOT / "docs" / "adr").glob("*.md")),
    ROOT / "docs" / "architecture.md",
    ROOT / "src" / "tokenmill" / "core" / "scheduler.py",
]
MAX_COST = 1.005
"""Perplexity may grow by half a percent."""


def texts() -> list[str]:
    return [
        *(path.read_text()[:6000] for path in TEXTS),
        *varied_prompts()[26:36],
        long_prompt(4000),
    ]


def mean_nll(outputs: list[RequestOutput]) -> float:
    values = [
        -position[token_id].logprob
        for output in outputs
        for token_id, position in zip(
            output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=True
        )
        if position is not None
    ]
    assert len(values) > 5_000
    return sum(values) / len(values)


def reference_nll(outputs: list[RequestOutput]) -> float:
    total, count = 0.0, 0
    for output in outputs:
        ids = torch.tensor(output.prompt_token_ids)
        with torch.inference_mode():
            logprobs = reference_model()(ids[None]).logits[0, :-1].log_softmax(-1)
        total -= float(logprobs.gather(1, ids[1:, None]).sum())
        count += len(ids) - 1
    return total / count


def test_perplexity_of_the_default_path_is_that_of_float32() -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(kv_cache_memory_bytes=1 << 29) as llm:
        outputs = llm.generate(texts(), params)
    cost = math.exp(mean_nll(outputs) - reference_nll(outputs))
    assert 1 / MAX_COST < cost < MAX_COST
