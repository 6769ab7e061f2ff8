"""Shapes of real models, run on random weights; and the least that a step of them costs."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Stored:
    """How an engine keeps weights of layers and the KV cache; the head stays bfloat16."""

    name: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the engine."""
    weight_bytes: float = BF16_BYTES
    """Of a value, scales included."""
    kv_bytes: float = BF16_BYTES
    tolerance: float = 0.0
    """Of log-probabilities beside float32, see `exactness.py`; what its rounding takes, and room
    for little else."""


SMALLER = (
    Stored("fp8", {"quantization": "fp8"}, weight_bytes=1.0, tolerance=0.12),
    # Four bits, and for 32 values a scale and a minimum in bfloat16.
    Stored("int4", {"quantization": "int4"}, weight_bytes=0.5 + 4 / 32, tolerance=0.3),
    Stored("fp8 KV cache", {"kv_cache_dtype": "fp8"}, kv_bytes=1.0, tolerance=0.12),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    tied: bool
    max_context: int = 131_072
    rope_scaling: dict[str, Any] | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    """Of its config.json, where it is no Llama; only `exactness.py` knows such."""

    def config(self) -> dict[str, Any]:
        """Its config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "max_position_embeddings": self.max_context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "rope_scaling": self.rope_scaling,
            "tie_word_embeddings": self.tied,
        } | self.changes

    @property
    def layer_values(self) -> int:
        """Weights that every token is multiplied with, the head aside."""
        qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_size * self.hidden_size
        out = self.num_heads * self.head_size * self.hidden_size
        return self.num_layers * (qkv + out + 3 * self.hidden_size * self.intermediate_size)

    @property
    def head_values(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def kv_bytes_per_token(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_size * BF16_BYTES

    def decode_bytes(self, num_cached_tokens: float, stored: Stored | None = None) -> float:
        """What one step of decoding reads: every weight once, and the requests' keys and values."""
        stored = stored or Stored()
        weights = self.layer_values * stored.weight_bytes + self.head_values * BF16_BYTES
        cached = num_cached_tokens * self.kv_bytes_per_token
        return weights + cached * stored.kv_bytes / BF16_BYTES

    def decode_flops(self, num_requests: int, num_cached_tokens: float) -> float:
        """Of one step of decoding."""
        products = 2.0 * num_requests * (self.layer_values + self.head_values)
        return products + self._attention_flops(num_cached_tokens)

    def prefill_flops(self, num_tokens: int) -> float:
        """Of one prompt; the head sees its last token only."""
        pairs = num_tokens * (num_tokens + 1) / 2
        products = 2.0 * (num_tokens * self.layer_values + self.head_values)
        return products + self._attention_flops(pairs)

    def _attention_flops(self, num_pairs: float) -> float:
        """Of so many pairs of a query and a key in every layer: the scores, and the sum of V."""
        return 4.0 * num_pairs * self.num_layers * self.num_heads * self.head_size


_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8_192,
}

SHAPES = {
    "tiny": Shape("tiny", 256, 512, 2, 4, 2, 64, 1_024, tied=True, max_context=4_096),
    "1b": Shape(
        "Llama-3.2-1B", 2_048, 8_192, 16, 32, 8, 64, 128_256, tied=True,
        rope_scaling=_LLAMA3_SCALING | {"factor": 32.0},
    ),
    "8b": Shape(
        "Llama-3.1-8B", 4_096, 14_336, 32, 32, 8, 128, 128_256, tied=False,
        rope_scaling=_LLAMA3_SCALING | {"factor": 8.0},
    ),
}  # fmt: skip

_LATENTS = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "rope_theta": 10_000.0,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
LATENTS = {
    "cpu": Shape(
        "tiny with latents", 256, 512, 2, 4, 4, 64, 1_024, tied=True, max_context=4_096,
        changes=_LATENTS
        | {
            "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
            "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2,
            "n_shared_experts": 1, "moe_intermediate_size": 64,
        },
    ),
    "cuda": Shape(
        "DeepSeek-V2-Lite, routed as V3", 2_048, 10_944, 27, 16, 16, 128, 102_400, tied=False,
        changes=_LATENTS
        | {
            "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
            "n_routed_experts": 64, "num_experts_per_tok": 6, "n_group": 8, "topk_group": 4,
            "n_shared_experts": 2, "moe_intermediate_size": 1_408,
        },
    ),
}  # fmt: skip
"""By device, a model with latents and groups of experts."""


def write_draft(directory: Path, vocab_size: int) -> None:
    """A small Llama with random weights in a file, to draft for a model of that vocabulary."""
    import torch

    from tokenmill.checkpoint.dummy import open_dummy
    from tokenmill.models.loader import tensor_shapes

    shape = replace(SHAPES["tiny"], vocab_size=vocab_size, max_context=131_072)
    (directory / "config.json").write_text(json.dumps(shape.config()))
    sizes = open_dummy(directory, tensor_shapes=tensor_shapes, seed=0).tensor_shapes
    header, parts, end = {}, [], 0
    for name, size in sizes.items():
        values = torch.ones(size) if len(size) == 1 else 0.05 * torch.randn(size)
        parts.append(values.bfloat16().view(torch.uint8).numpy().tobytes())
        begin, end = end, end + len(parts[-1])
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + b"".join(parts)
    (directory / "model.safetensors").write_bytes(data)


@contextlib.contextmanager
def engine(shape: Shape, device: str, **engine_args: Any) -> Iterator[Any]:
    """An `LLM` of this shape on random weights; closed, and its memory given back, at the end."""
    from tokenmill import LLM

    settings: dict[str, Any] = {
        "device": device,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
    }
    with tempfile.TemporaryDirectory(prefix="gpucheck-") as directory:
        Path(directory, "config.json").write_text(json.dumps(shape.config()))
        llm = LLM(directory, **(settings | engine_args))
        try:
            yield llm
        finally:
            llm.close()
            del llm
            _give_memory_back(device)


def _give_memory_back(device: str) -> None:
    import gc

    import torch

    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def prompt(index: int, length: int, vocab_size: int) -> list[int]:
    """Token ids without a pattern, others for each index."""
    state = (index * 2_654_435_761 + 12_345) % (1 << 31)
    ids = []
    for _ in range(length):
        state = (1_103_515_245 * state + 12_345) % (1 << 31)
        ids.append((state >> 8) % vocab_size)
    return ids
