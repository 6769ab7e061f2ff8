"""Small tokenizers of each kind, trained on the spot, and GGUF metadata made of them."""

from __future__ import annotations

import io
import json
from functools import lru_cache
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from tokenmill.tokenizer.from_gguf import tokenizer_from_gguf
from tokenmill.tokenizer.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "Tokens are numbers; numbers like 12, 345 and 6789 are split into digits.",
    "def main():\n    for i in range(10):\n        print(i * 2)\n\n    return None\n",
    "Größe, naïve, façade, Ελληνικά, русский язык, 日本語のテキスト, 한국어, 中文文本",
    "Emoji 🎉 and 👩‍👩‍👧 families; don't, won't, it's   spaced    out.\t\tTabs.",
] * 4
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "",
    " ",
    "hello",
    " hello  world",
    "  two leading, two trailing  ",
    "The quick brown fox\n\n\njumps\t\tover 12345 dogs.\r\n",
    "def f(x):\n    return x**2  # 100%\n",
    "Größe naïve façade Ελληνικά русский",
    "日本語のテキスト 中文文本 한국어",
    "🎉👩‍👩‍👧🏳️‍🌈 e\u0301 \u200b\ufeff",
    "don't WON'T it's I'LL",
    "½ ² Ⅷ ٣٤٥ १२३",
    "a\u0000b \u2581 \ufffd",
]


@lru_cache
def byte_level_backend() -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer of the library with three control tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=CONTROL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def copy_of(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(backend.to_str())


def gguf_of_byte_level(**changes: Any) -> dict[str, Any]:
    """The trained byte-level tokenizer as GGUF metadata; `changes` set or (None) remove keys."""
    backend = byte_level_backend()
    vocabulary = backend.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    # The model keeps its merges to itself, but a saved model lists them.
    merges = json.loads(backend.to_str())["model"]["merges"]
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3 if token in CONTROL_TOKENS else 1 for token in tokens],
        "merges": [" ".join(merge) for merge in merges],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "padding_token_id": 2,
    }
    return _metadata(metadata, changes)


def byte_level_tokenizer(**changes: Any) -> Tokenizer:
    return tokenizer_from_gguf(gguf_of_byte_level(**changes))


@lru_cache
def sentencepiece_model() -> bytes:
    """A SentencePiece BPE model with byte fallback, settings as Llama's."""
    saved = io.BytesIO()
    sentencepiece.set_min_log_level(3)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in CORPUS for line in text.splitlines() if line]),
        model_writer=saved,
        model_type="bpe",
        vocab_size=500,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        user_defined_symbols=["<|user|>"],
    )
    return saved.getvalue()


def sentencepiece_processor() -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())


def gguf_of_sentencepiece(**changes: Any) -> dict[str, Any]:
    """The trained SentencePiece model as GGUF metadata, as converters write it."""
    processor = sentencepiece_processor()
    ids = range(processor.vocab_size())
    kinds = [(processor.is_unknown, 2), (processor.is_control, 3), (processor.is_byte, 6)]

    def token_type(i: int) -> int:
        if processor.id_to_piece(i) == "<|user|>":
            return 4
        return next((kind for test, kind in kinds if test(i)), 1)

    metadata = {
        "model": "llama",
        "tokens": [processor.id_to_piece(i) for i in ids],
        "scores": [processor.get_score(i) for i in ids],
        "token_type": [token_type(i) for i in ids],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return _metadata(metadata, changes)


def sentencepiece_tokenizer(**changes: Any) -> Tokenizer:
    return tokenizer_from_gguf(gguf_of_sentencepiece(**changes))


def _metadata(metadata: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = {f"tokenizer.ggml.{key}": value for key, value in {**metadata, **changes}.items()}
    return {key: value for key, value in merged.items() if value is not None}
