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
MAX_COST = math.log(1.005)
"""Perplexity may grow by half a percent. `benchmarks/quality.py` measures it on enough tokens; the
few here can show that it is more, but not that it is a little less."""


def texts() -> list[str]:
    return [
        *(path.read_text()[:6000] for path in TEXTS),
        *varied_prompts()[26:36],
        long_prompt(4000),
    ]


def surprises(output: RequestOutput) -> torch.Tensor:
    """-log p of each token of the prompt but the first, float64."""
    places = zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True)
    return torch.tensor([-place[token].logprob for token, place in places if place]).double()


@torch.inference_mode()
def reference_surprises(output: RequestOutput) -> torch.Tensor:
    ids = torch.tensor(output.prompt_token_ids)
    logprobs = reference_model()(ids[None]).logits[0, :-1].log_softmax(-1)
    return -logprobs.gather(1, ids[1:, None])[:, 0].double()


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8"])
def test_perplexity_of_the_default_path_is_that_of_float32(kv_cache_dtype: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    settings = {"device": "cpu", "kv_cache_dtype": kv_cache_dtype}
    with LLM(kv_cache_memory_bytes=1 << 29, **settings) as llm:
        outputs = llm.generate(texts(), params)
    costs = torch.cat([surprises(output) - reference_surprises(output) for output in outputs])
    assert len(costs) > 5_000
    error = 2 * costs.std() / len(costs) ** 0.5
    assert error < MAX_COST
    assert abs(costs.mean()) < MAX_COST + error
