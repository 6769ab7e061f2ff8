"""Writes small GGUF files of the llama family with the gguf library, as llama.cpp's converter does.

model = tiny_llama()
write_llama_gguf(tmp_path / "tiny.gguf", model, "Q8_0")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tokenmill.checkpoint.gguf_reader import read_header

_VALUE_TYPES = {
    int: gguf.GGUFValueType.UINT32,
    float: gguf.GGUFValueType.FLOAT32,
    str: gguf.GGUFValueType.STRING,
}


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level BPE vocabulary as GGUF metadata holds it."""

    tokens: list[str]
    token_types: list[int]
    merges: list[str]
    bos_token_id: int
    eos_token_id: int
    chat_template: str


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_vocabulary(size: int = 320) -> Vocabulary:
    """Three control tokens, the 256 bytes, a few merges, and unused tokens up to `size`."""
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    pairs = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ġ", "a"), ("e", "r"), ("o", "n")]
    normal = [*sorted(ByteLevel.alphabet()), *(left + right for left, right in pairs)]
    unused = [f"<unused{i}>" for i in range(size - len(control) - len(normal))]
    types = [gguf.TokenType.CONTROL] * len(control) + [gguf.TokenType.NORMAL] * len(normal)
    return Vocabulary(
        tokens=[*control, *normal, *unused],
        token_types=[int(t) for t in types] + [int(gguf.TokenType.UNUSED)] * len(unused),
        merges=[f"{left} {right}" for left, right in pairs],
        bos_token_id=0,
        eos_token_id=2,
        chat_template=CHAT_TEMPLATE,
    )


def tiny_llama(seed: int = 0, **config: Any) -> LlamaForCausalLM:
    """A llama with random weights, small enough for a test; `config` overrides `LlamaConfig`."""
    values = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "initializer_range": 0.2,
        **config,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**values)).eval()


def write_llama_gguf(
    path: Path,
    model: LlamaForCausalLM,
    tensor_type: str = "F16",
    vocabulary: Vocabulary | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    metadata: Mapping[str, int | float | str] | None = None,
) -> Path:
    """Write `model` to `path`. Matrices get `tensor_type`, vectors F32, as in files of llama.cpp.

    `tensor_type` is one the gguf library can write: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1.
    `metadata` adds keys or replaces them.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    _add_parameters(writer, config)
    _add_vocabulary(writer, vocabulary or tiny_vocabulary(config.vocab_size))
    for key, value in (metadata or {}).items():
        writer.add_key_value(key, value, _VALUE_TYPES[type(value)])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = interleaved(name, tensor.float().numpy(), config)
        kind = gguf.GGMLQuantizationType[tensor_type if values.ndim > 1 else "F32"]
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight", ".bias")),
            gguf.quants.quantize(values, kind),
            raw_dtype=kind,
        )
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleaved(name: str, values: np.ndarray, config: LlamaConfig) -> np.ndarray:
    """Rows of q and k as llama.cpp stores them: the two halves of each head alternate."""
    if ".q_proj." in name:
        num_heads = config.num_attention_heads
    elif ".k_proj." in name:
        num_heads = config.num_key_value_heads
    else:
        return values
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def llama3_factors(config: LlamaConfig) -> np.ndarray:
    """What `rope_freqs.weight` holds: by how much each rotary frequency is divided."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    theta = config.rope_parameters["rope_theta"]
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    return (1.0 / theta**exponent / scaled).numpy()


def assert_header_equals_library(path: Path) -> None:
    """Our reader finds in the header of `path` what the gguf library finds."""
    ours = read_header(path, path.read_bytes())
    theirs = gguf.GGUFReader(path)
    own_fields = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"}
    assert ours.version == theirs.fields["GGUF.version"].contents()
    assert ours.alignment == theirs.alignment
    assert ours.metadata == {
        name: field.contents() for name, field in theirs.fields.items() if name not in own_fields
    }
    assert list(ours.tensors) == [entry.name for entry in theirs.tensors]
    for entry in theirs.tensors:
        found = ours.tensors[entry.name]
        assert found.type.name == entry.tensor_type.name
        assert found.shape == tuple(int(size) for size in reversed(entry.shape))
        assert (found.offset, found.num_bytes) == (entry.data_offset, entry.n_bytes)


def _add_parameters(writer: gguf.GGUFWriter, config: LlamaConfig) -> None:
    rope = config.rope_parameters
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if "original_max_position_embeddings" in rope and rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config))


def _add_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.token_types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(vocabulary.bos_token_id)
    writer.add_eos_token_id(vocabulary.eos_token_id)
    writer.add_add_bos_token(False)
    writer.add_chat_template(vocabulary.chat_template)
