"""A model of experts beside a dense one whose layers have the size of what a token uses of it.

Both have the same attention, vocabulary and number of layers, and random weights:

    experts    Qwen3-MoE, 64 experts a layer of which a token uses 8, about 0.9 billion parameters
    dense      Llama, with feed-forward blocks of the size of 8 experts

Each line is one case: tokens per second while requests decode, or of a prompt; beside it what the
machine could do at best (weights read once a step, of experts those that some token is likely to
have chosen; or products at the peak; the longer of the two). The ratio is experts to dense: 1 where
the time of a step goes with the active parameters, and less where more experts must be read than
one token uses. `experts' bytes` is the same ratio of the bytes that a step reads at least.

    python benchmarks/experts.py [--formats int4 bf16] [--json]
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NUM_EXPERTS, NUM_CHOSEN, EXPERT_SIZE = 64, 8, 384

COMMON: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32_000,
    "max_position_embeddings": 4_096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "intermediate_size": NUM_CHOSEN * EXPERT_SIZE,
        "moe_intermediate_size": EXPERT_SIZE,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": NUM_CHOSEN,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "dense": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": NUM_CHOSEN * EXPERT_SIZE,
    },
}


@dataclass(frozen=True)
class Case:
    """What is asked of an engine, and the phase that counts."""

    name: str
    num_requests: int
    input_len: int
    output_len: int
    phase: str


CASES = (
    Case("decode, 1 request", 1, 32, 48, "decode"),
    Case("decode, 32 requests", 32, 16, 24, "decode"),
    Case("prompt of 1,024", 1, 1024, 1, "prompts"),
)


@dataclass(frozen=True)
class Figure:
    """One case on one model."""

    tokens_per_second: float
    limit_tokens_per_second: float
    bound_by: str
    bytes_per_step: float


def measure(name: str, format_: str) -> dict[str, Figure]:
    """All cases on one model, by an engine of its own."""
    from tokenmill import LLM
    from tokenmill.config.engine_args import EngineArgs
    from tokenmill.entrypoints.bench.options import LatencyOptions
    from tokenmill.entrypoints.bench.serving import held_weights, measure_latency

    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(COMMON | MODELS[name]))
        settings: dict[str, Any] = {
            "model": directory,
            "load_format": "dummy",
            "device": "cpu",
            "dtype": "bfloat16",
            "quantization": None if format_ == "bf16" else format_,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "max_model_len": 1_152,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 1_024,
            "kv_cache_memory_bytes": 256 << 20,
        }
        found = {}
        with LLM(**settings) as llm:
            weights = held_weights(EngineArgs(**settings), llm.llm_engine.config)
            for case in CASES:
                options = LatencyOptions(
                    batch_size=case.num_requests,
                    input_len=case.input_len,
                    output_len=case.output_len,
                    num_iters=3,
                )
                report = measure_latency(llm, weights, options, profile=False)
                (phase,) = (each for each in report.phases if each.phase == case.phase)
                found[case.name] = Figure(
                    phase.tokens_per_second,
                    phase.num_tokens / phase.limit_seconds,
                    phase.bound_by,
                    phase.num_bytes / phase.num_steps,
                )
    gc.collect()  # weights go before the next model's come
    return found


def table(found: Mapping[str, Mapping[str, Mapping[str, Figure]]]) -> str:
    """By format, model and case."""
    lines = [
        "| weights | case | experts tok/s | of its limit | dense tok/s | of its limit |"
        " ratio | ratio of limits | experts' bytes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for format_, models in found.items():
        for case in CASES:
            experts, dense = (models[name][case.name] for name in MODELS)
            shares = [
                f"{each.tokens_per_second / each.limit_tokens_per_second:.0%}"
                f" ({'bytes' if each.bound_by == 'memory' else 'products'})"
                for each in (experts, dense)
            ]
            ratio = experts.tokens_per_second / dense.tokens_per_second
            of_limits = experts.limit_tokens_per_second / dense.limit_tokens_per_second
            lines.append(
                f"| {format_} | {case.name} | {experts.tokens_per_second:,.1f} | {shares[0]} |"
                f" {dense.tokens_per_second:,.1f} | {shares[1]} | {ratio:.2f} | {of_limits:.2f} |"
                f" {experts.bytes_per_step / dense.bytes_per_step:.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", nargs="+", choices=["int4", "int8", "bf16"])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    formats = options.formats or ["int4", "bf16"]
    found = {format_: {name: measure(name, format_) for name in MODELS} for format_ in formats}
    if options.json:
        print(json.dumps(found, default=asdict))
    else:
        print(table(found))


if __name__ == "__main__":
    main()
