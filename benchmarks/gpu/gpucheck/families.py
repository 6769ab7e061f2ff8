"""Other models than Llama, two layers of each at full width: beside float32, and the same bits
alone and in a batch.

    GPT-2          LayerNorm, learned positions, blocks without a gate
    gpt-oss        sinks, windows, experts in MXFP4 with biases
    Qwen3          that embeds: hidden states become vectors
    BERT           that embeds: attention in both directions
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpucheck.models import engine, prompt
from gpucheck.report import Budget, Row

TOLERANCE = 0.02
"""Of log-probabilities and vectors, as in `exactness.py`."""
PROMPT_LENS = (2, 17, 64, 129, 257)


@dataclass(frozen=True, slots=True)
class Family:
    """A model by its config.json."""

    name: str
    hf_config: dict[str, Any]
    small: dict[str, Any]
    """Changes of the config where kernels are interpreted."""
    pools: bool = False

    def config(self) -> dict[str, Any]:
        return self.hf_config


def _gpt_oss(**changes: Any) -> dict[str, Any]:
    """gpt-oss-20b with a quarter of its experts, so that float32 fits the host."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 201_088,
        "hidden_size": 2_880,
        "intermediate_size": 2_880,
        "num_hidden_layers": 2,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "max_position_embeddings": 131_072,
        "rope_theta": 150_000.0,
        "quantization_config": {"quant_method": "mxfp4"},
        **changes,
    }


FAMILIES = (
    Family(
        "GPT-2 XL",
        {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": 50_257,
            "n_embd": 1_600,
            "n_layer": 2,
            "n_head": 25,
            "n_positions": 1_024,
        },
        {"vocab_size": 500, "n_embd": 128, "n_head": 2},
    ),
    Family(
        "gpt-oss-20b, 8 experts",
        _gpt_oss(),
        {
            "vocab_size": 500, "hidden_size": 128, "intermediate_size": 64,
            "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 16,
        },
    ),
    Family(
        "Qwen3-Embedding-0.6B",
        {
            "architectures": ["Qwen3Model"],
            "model_type": "qwen3",
            "vocab_size": 151_669,
            "hidden_size": 1_024,
            "intermediate_size": 3_072,
            "num_hidden_layers": 2,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 32_768,
            "rope_theta": 1_000_000.0,
        },
        {
            "vocab_size": 500, "hidden_size": 128, "intermediate_size": 192,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
        },
        pools=True,
    ),
    Family(
        "BERT large",
        {
            "architectures": ["BertModel"],
            "model_type": "bert",
            "vocab_size": 30_522,
            "hidden_size": 1_024,
            "intermediate_size": 4_096,
            "num_hidden_layers": 2,
            "num_attention_heads": 16,
            "max_position_embeddings": 512,
            "type_vocab_size": 2,
            "hidden_act": "gelu",
        },
        {"vocab_size": 500, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2},
        pools=True,
    ),
)  # fmt: skip


def run(device: str, budget: Budget) -> Iterator[Row]:
    for family in FAMILIES:
        if device == "cpu":
            family = Family(family.name, family.hf_config | family.small, {}, family.pools)
        yield from _checked(family, device, budget)


def _checked(family: Family, device: str, budget: Budget) -> Iterator[Row]:
    lens = PROMPT_LENS if device == "cuda" else PROMPT_LENS[:2]
    vocab_size = family.hf_config["vocab_size"]
    prompts = [prompt(i, length, vocab_size) for i, length in enumerate(lens)]
    settings = {"max_num_seqs": 8, "max_model_len": 320, "max_num_batched_tokens": 2_048}
    budget.check(5.0)
    with engine(family, "cpu", **(settings | {"dtype": "float32"})) as llm:
        expected = _values(llm, family, prompts)
    budget.check(5.0)
    with engine(family, device, **settings, exact=True) as llm:
        together = _values(llm, family, prompts)
        alone = [_values(llm, family, [each])[0] for each in prompts]
    error = _relative_error(together, expected)
    yield Row(
        "families",
        f"{family.name}, beside float32",
        ok=math.isfinite(error) and error < TOLERANCE,
        figures={"error": error, "allowed": TOLERANCE, "values": sum(map(len, expected))},
    )
    different = [length for length, a, b in zip(lens, alone, together, strict=True) if a != b]
    yield Row(
        "families",
        f"{family.name}, in a batch",
        ok=not different,
        figures={"requests": len(prompts), "other bits": len(different), "which": str(different)},
    )


def _values(llm: Any, family: Family, prompts: Sequence[list[int]]) -> list[list[float]]:
    """Of each prompt its vector, or the log-probabilities of its tokens but the first."""
    from tokenmill import PoolingParams, SamplingParams

    if family.pools:
        raw = PoolingParams(use_activation=False)
        outputs = llm.embed([{"prompt_token_ids": ids} for ids in prompts], raw, use_tqdm=False)
        return [list(output.outputs.embedding) for output in outputs]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    return [
        [entry[t].logprob for t, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
        for ids, output in zip(prompts, outputs, strict=True)
    ]


def _relative_error(found: list[list[float]], expected: list[list[float]]) -> float:
    """The norm of the error over that of the spread."""
    mine, theirs = ([value for part in values for value in part] for values in (found, expected))
    mean = sum(theirs) / len(theirs)
    error = sum((a - b) ** 2 for a, b in zip(mine, theirs, strict=True))
    return math.sqrt(error / sum((b - mean) ** 2 for b in theirs))
