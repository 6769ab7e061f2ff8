"""A tiny Llama with random weights and a real tokenizer, as a Hugging Face directory."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from helpers.tiny_text import CHATML, CORPUS, EOS, tiny_tokenizer, write_tokenizer

__all__ = [
    "CHATML",
    "CORPUS",
    "EOS",
    "tiny_llama",
    "tiny_tokenizer",
    "write_tiny_llama",
    "write_tokenizer",
    "write_wide_llama",
]


def write_tiny_llama(path: Path, *, seed: int = 0, **config: Any) -> Path:
    """A model that says varied things: weights are large enough for peaked logits."""
    path.mkdir(parents=True, exist_ok=True)
    sizes = {
        "vocab_size": write_tokenizer(path),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "eos_token_id": 2,
        "bos_token_id": 0,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
    }
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**(sizes | config))).save_pretrained(path)
    return path


def write_wide_llama(path: Path, *, seed: int = 0, **config: Any) -> Path:
    """A tiny model with heads of a size that the native kernels take, and with biases."""
    return write_tiny_llama(
        path,
        seed=seed,
        **config,
        hidden_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        attention_bias=True,
    )


@functools.cache
def tiny_llama() -> Path:
    """The directory of one tiny model, shared by all tests of a run."""
    directory = Path(tempfile.mkdtemp(prefix="tokenmill-tiny-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return write_tiny_llama(directory)
