"""Small engines of several kinds of layers, for KV that comes and goes."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from helpers.family_models import saved
from helpers.tiny import write_tiny_llama, write_wide_llama
from tokenmill import LLM

LENGTHS = (150, 70, 131, 33, 129)


@functools.cache
def model(name: str) -> Path:
    if name == "wide":
        return write_wide_llama(_directory())
    if name == "windows":
        return write_tiny_llama(
            _directory(),
            num_hidden_layers=3,
            hidden_size=128,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            sliding_window=40,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    return saved(name)


def _directory() -> Path:
    path = Path(tempfile.mkdtemp(prefix="tokenmill-offload-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def prompts() -> list[dict[str, Any]]:
    """The last begins like the first."""
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 97, (length,), generator=draw).tolist() for length in LENGTHS]
    ids.append(ids[0][:100] + ids[3])
    return [{"prompt_token_ids": each} for each in ids]


def engine(name: str = "wide", **settings: Any) -> LLM:
    defaults = {
        "num_kv_blocks": 30,
        "block_size": 32,
        "max_model_len": 192,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "device": "cpu",
        "dtype": "bfloat16",
        "num_threads": 1,
        "skip_tokenizer_init": True,
    }
    return LLM(str(model(name)), **(defaults | settings))
