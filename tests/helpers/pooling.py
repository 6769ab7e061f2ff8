"""Small pooling models with random weights, as transformers saves them."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from helpers.families import COMMON
from helpers.tiny_text import write_tokenizer
from tokenmill import LLM

ENCODER: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 160,
    "pad_token_id": 0,
}
"""Of BERT and RoBERTa; heads of 64 values, so that the native kernels serve them."""


def randomized(model: Any, scale: float = 0.15) -> Any:
    """A model of transformers whose biases, norms and scores are random, too."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(noise * 0.3)
            else:
                parameter.copy_(noise * scale)
    return model.eval()


def save(model: Any, **sentence: Any) -> Path:
    """A directory of the model until the tests end; `sentence` as `write_sentence_files` takes."""
    path = Path(tempfile.mkdtemp(prefix="tokenmill-pooling-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    model.save_pretrained(path)
    if sentence:
        write_sentence_files(path, **sentence)
    return path


def write_sentence_files(
    path: Path, *, pooling: str, normalize: bool = True, max_seq_length: int | None = None
) -> None:
    """What sentence-transformers writes: `pooling` is the name of a mode in its file."""
    kinds = ["Transformer", "Pooling"] + ["Normalize"] * normalize
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if i == 0 else f"{i}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{name}": name == pooling for name in ("cls_token", "mean_tokens")}
    modes |= {"pooling_mode_max_tokens": pooling == "max_tokens", f"pooling_mode_{pooling}": True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_seq_length}))


@functools.cache
def encoder(architecture: str, **settings: Any) -> tuple[Any, Path]:
    """A BERT or RoBERTa of transformers with this class, and its directory."""
    family = architecture.partition("Model")[0].partition("For")[0]
    config = getattr(transformers, f"{family}Config")(**(ENCODER | settings))
    model = randomized(getattr(transformers, architecture)(config))
    return model, save(model)


@functools.cache
def decoder(architecture: str, **settings: Any) -> tuple[Any, Path]:
    """A Llama or Qwen3 of transformers with this class, and its directory."""
    family = architecture.partition("Model")[0].partition("For")[0]
    shared = {**COMMON, "head_dim": 64, "pad_token_id": 0}
    config = getattr(transformers, f"{family}Config")(**(shared | settings))
    model = randomized(getattr(transformers, architecture)(config))
    return model, save(model)


def open_pooling(path: Path, **settings: Any) -> LLM:
    """An engine in float32 without a tokenizer, unless settings say otherwise."""
    common: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "skip_tokenizer_init": True,
        "num_kv_blocks": 40,
        "max_model_len": 150,
    }
    return LLM(str(path), **(common | settings))


def with_tokenizer(path: Path) -> Path:
    """The same directory, with the tokenizer of `tiny_text`."""
    write_tokenizer(path)
    return path


def prompts(*lengths: int) -> list[dict[str, list[int]]]:
    """Random ids; those of one length begin like those of another."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 97, (max(lengths),), generator=generator).tolist()
    return [{"prompt_token_ids": [*ids[: length - 1], length % 90 + 1]} for length in lengths]


@torch.inference_mode()
def hidden_states(model: Any, ids: list[int], **inputs: Any) -> torch.Tensor:
    """transformers' last hidden states, float32 [len(ids), hidden_size]."""
    body = model if hasattr(model, "embeddings") or not hasattr(model, "model") else model.model
    found: torch.Tensor = body(torch.tensor([ids]), **inputs).last_hidden_state[0]
    return found
