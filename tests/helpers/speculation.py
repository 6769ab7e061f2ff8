"""Requests that ask for everything there is, and what they bring without speculation."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from typing import Any

from tokenmill import LLM, RequestOutput, SamplingParams
from tokenmill.structured_outputs import StructuredOutputsParams

ASKED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0.9, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_k": 5},
    {"temperature": 1.1, "seed": 3, "top_p": 0.8, "logprobs": 2},
    {"temperature": 1.0, "seed": 4, "min_p": 0.1},
    {"temperature": 0, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.3, "logprobs": 1},
    {"temperature": 0, "logit_bias": {40: 4.0, 41: -100.0}},
    {"temperature": 0, "bad_words": ["the"]},
    {"temperature": 0.6, "seed": 6, "min_tokens": 20, "ignore_eos": False},
    {"temperature": 0, "max_tokens": 7},
    {"temperature": 0, "max_tokens": 1},
    {"temperature": 0.5, "seed": 7, "stop": ["e", "at"], "include_stop_str_in_output": True},
    {"temperature": 0.5, "seed": 8, "stop_token_ids": list(range(50, 90))},
    {"temperature": 0.5, "seed": 9, "prompt_logprobs": 2},
    {"temperature": 0.7, "seed": 10, "n": 3},
    {"temperature": 0.7, "seed": 11, "structured_outputs": {"regex": "(ab|ba|abba)+c{3,9}"}},
    {"temperature": 0, "structured_outputs": {"choice": ["red", "green", "greenish"]}},
    {
        "temperature": 0.9,
        "seed": 12,
        "structured_outputs": {"json": {"type": "array", "items": {"enum": ["on", "off"]}}},
    },
]


def requests() -> tuple[list[dict[str, Any]], list[SamplingParams]]:
    """Prompts with parts that repeat, of any length, and everything that can be asked for."""
    draw = random.Random(0)
    prompts, params = [], []
    for asked in ASKED:
        part = [draw.randrange(10, 200) for _ in range(draw.randrange(2, 12))]
        prompts.append({"prompt_token_ids": part * draw.randrange(1, 6)})
        settings = {"max_tokens": 40, "ignore_eos": True, **asked}
        if "structured_outputs" in asked:
            settings["structured_outputs"] = StructuredOutputsParams(**asked["structured_outputs"])
            settings["max_tokens"] = 20
        params.append(SamplingParams(**settings))
    return prompts, params


def results(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [
        (
            output.prompt_logprobs,
            [
                (
                    each.token_ids,
                    each.text,
                    each.finish_reason,
                    each.stop_reason,
                    each.logprobs,
                    each.cumulative_logprob,
                )
                for each in output.outputs
            ],
        )
        for output in outputs
    ]


def engine(path: str, **settings: Any) -> LLM:
    defaults: dict[str, Any] = {"num_kv_blocks": 100, "block_size": 32, "max_model_len": 256}
    return LLM(path, device="cpu", **(defaults | settings))


def run(llm: LLM) -> list[RequestOutput]:
    return llm.generate(*requests(), use_tqdm=False)


def freeze(value: Any) -> Any:
    """What a dict is made of, in a form that can be a key."""
    return json.dumps(value) if isinstance(value, dict) else value


@functools.cache
def plain(path: str, **settings: Any) -> list[Any]:
    """Each request alone, without drafts."""
    prompts, params = requests()
    thawed = {
        key: json.loads(value) if key == "hf_overrides" else value
        for key, value in settings.items()
    }
    with engine(path, **thawed) as llm:
        return [
            result
            for prompt, asked in zip(prompts, params, strict=True)
            for result in results(llm.generate(prompt, asked, use_tqdm=False))
        ]
