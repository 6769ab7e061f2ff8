"""A tiny Llama with random weights and a real tokenizer, as a Hugging Face directory."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM

EOS = "<|im_end|>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog. ",
    "One two three four five six seven eight nine ten. ",
    "def add(a, b):\n    return a + b\n",
    "Größe, naïve, señor, Привет мир, 你好世界, こんにちは, 😀🎉👨‍👩‍👧. ",
] * 4


def tiny_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE with about 400 tokens; 0 to 2 are special."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", EOS],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def write_tokenizer(path: Path, *, chat_template: str | None = CHATML) -> int:
    """Write the tokenizer's files and return its vocabulary size."""
    tokenizer = tiny_tokenizer()
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"eos_token": EOS, "bos_token": "<|endoftext|>", "chat_template": chat_template}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer.get_vocab_size()


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


def write_wide_llama(path: Path) -> Path:
    """A tiny model with heads of a size that the native kernels take, and with biases."""
    return write_tiny_llama(
        path,
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
