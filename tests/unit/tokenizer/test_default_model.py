"""The default model's tokenizer, built from its file."""

from __future__ import annotations

import random

import pytest
from tokenizers import pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from helpers.default_model import default_model_path
from helpers.tokenizers import TEXTS
from tokenmill.checkpoint.gguf_checkpoint import GGUFCheckpoint
from tokenmill.tokenizer.tokenizer import load_tokenizer

pytestmark = pytest.mark.model

WORDS = [
    " ", "  ", "\n", "\n\n", "\t", "\r\n", "0", "7", "42", "2026", "3.14",
    "def ", "return", "self.",
    "{", "}", "();", "==", "->", "#", "\"", "'", "don't",
    "I'LL", "hello", "World", " the", "Straße",
    "naïve", "Ελλάδα", "привет", "你好", "世界", "日本語",
    "カタカナ", "한국어", "العربية", "हिन्दी", "ไทย",
    "🎉", "👩‍👩‍👧", "🏳️‍🌈", "½", "٣", "…", "—", "\u00a0", "\u200b", "e\u0301", "\x00", "<|im_end|>",
    "<|endoftext|>", "<|im_start|>", "<|", "http://a.b/c?d=e&f", "\\n", "α+β", "∑", "ﬁ",
]  # fmt: skip


def varied_texts(count):
    source = random.Random(20)
    return [
        "".join(source.choices(WORDS, k=source.randint(1, 12))) for _ in range(count - len(TEXTS))
    ] + TEXTS


def test_b105_ids_equal_transformers_on_500_texts():
    """transformers cuts this file's text by GPT-2's pattern alone; SmolLM's own tokenizer cuts
    single digits off first, so that rule is put in front."""
    data = GGUFCheckpoint.open(default_model_path()).tokenizer_data
    ours = load_tokenizer(data)
    keys = ("tokens", "merges", "token_type")
    tables = {key: data.gguf_metadata[f"tokenizer.ggml.{key}"] for key in keys}
    theirs, _ = convert_gguf_tokenizer("llama", {"tokenizer_type": "gpt2", **tables})
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    for text in varied_texts(500):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == text


def test_what_the_file_says():
    tokenizer = load_tokenizer(GGUFCheckpoint.open(default_model_path()).tokenizer_data)
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == (tokenizer.token_to_id("<|im_end|>"),)
    assert tokenizer.bos_token_id not in tokenizer.encode("hello")  # add_bos_token is false
    assert "You are a helpful AI assistant named SmolLM" in tokenizer.chat_template
