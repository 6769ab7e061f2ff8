"""A tiny tokenizer with a chat template, as the files of a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers

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
