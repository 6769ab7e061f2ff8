"""A model of the shape of Llama 3.2 1B: its config, and a checkpoint of it with random weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
SHARD_BYTES = 1 << 30


def write_config(directory: Path) -> None:
    """config.json alone, for engines that make dummy weights of it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=2))


def write_checkpoint(directory: Path) -> None:
    """Random bfloat16 weights in shards of at most `SHARD_BYTES`, with an index; what is there
    already stays.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return
    from tokenmill.checkpoint.dummy import open_dummy
    from tokenmill.models.loader import tensor_shapes

    write_config(directory)
    checkpoint = open_dummy(directory, tensor_shapes=tensor_shapes, seed=0)
    shards = list(_shards(checkpoint.tensor_shapes))
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = directory / f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(file, checkpoint, names)
        weight_map.update(dict.fromkeys(names, file.name))
    content = {"metadata": {"total_size": checkpoint.num_bytes}, "weight_map": weight_map}
    index.write_text(json.dumps(content, indent=2))


def _shards(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[list[str]]:
    names: list[str] = []
    num_bytes = 0
    for name, shape in shapes.items():
        if names and num_bytes + 2 * prod(shape) > SHARD_BYTES:
            yield names
            names, num_bytes = [], 0
        names.append(name)
        num_bytes += 2 * prod(shape)
    yield names


def _write_shard(file: Path, checkpoint: Any, names: list[str]) -> None:
    entries, end = {}, 0
    for name in names:
        begin, end = end, end + 2 * prod(checkpoint.tensor_shapes[name])
        shape = list(checkpoint.tensor_shapes[name])
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 64)
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for name in names:
            stream.write(checkpoint.read(name).data.numpy())
