"""A Hugging Face directory from a GGUF file, for engines that read no GGUF.

    python benchmarks/peers/convert.py OUT [--model smollm2-135m] [--dtype bfloat16]

Every tensor is dequantised and stored in one type; the tokenizer and its chat template come along.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tokenmill.checkpoint.checkpoint import Checkpoint
from tokenmill.checkpoint.names import resolve_model
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.quantization.dequantize import dequantize
from tokenmill.tokenizer.tokenizer import load_tokenizer

COMPLETE = ".complete"
"""Written last, so that a directory that was begun and not finished is not taken for one."""


def convert(model: str, directory: Path, dtype: str = "bfloat16") -> Path:
    """Write the directory, unless it is there already; returns it."""
    if (directory / COMPLETE).exists():
        return directory
    checkpoint = open_checkpoint(resolve_model(model))
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {
            name: dequantize(checkpoint.read(name), getattr(torch, dtype)).contiguous()
            for name in checkpoint.tensor_shapes
        },
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    _write_json(directory / "config.json", {**checkpoint.config, "dtype": dtype})
    _write_tokenizer(directory, checkpoint)
    (directory / COMPLETE).touch()
    return directory


def _write_tokenizer(directory: Path, checkpoint: Checkpoint) -> None:
    tokenizer = load_tokenizer(checkpoint.tokenizer_data)
    tokenizer._backend.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            **tokenizer.special_tokens,
            "chat_template": tokenizer.chat_template,
            "model_max_length": checkpoint.config["max_position_embeddings"],
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", default="smollm2-135m", help="a name that `LLM` takes")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    options = parser.parse_args()
    print(convert(options.model, options.directory, options.dtype))


if __name__ == "__main__":
    main()
