"""Texts of a grammar without a model: tokens are drawn at random among those that masks allow."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from helpers.tiny_text import write_tokenizer
from tokenmill.checkpoint.checkpoint import TokenizerData
from tokenmill.contracts.request import EngineCoreRequest
from tokenmill.sampling_params import SamplingParams
from tokenmill.structured_output.backend import GrammarBackend
from tokenmill.structured_output.llguidance import LLGuidanceBackend
from tokenmill.structured_output.request_grammar import RequestGrammar
from tokenmill.structured_outputs import StructuredOutputsParams
from tokenmill.tokenizer.tokenizer import Tokenizer, load_tokenizer

EOS = 2


@functools.cache
def walk_tokenizer() -> Tokenizer:
    with TemporaryDirectory() as directory:
        write_tokenizer(Path(directory))
        return load_tokenizer(TokenizerData(directory=Path(directory)))


@functools.cache
def llguidance_backend() -> LLGuidanceBackend:
    tokenizer = walk_tokenizer()
    return LLGuidanceBackend(
        tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=[EOS], num_threads=1
    )


def request_for(form: StructuredOutputsParams, **changes: Any) -> EngineCoreRequest:
    params = SamplingParams(structured_outputs=form, **changes.pop("params", {}))
    return EngineCoreRequest(
        request_id="r", prompt_token_ids=[5], sampling_params=params, seed=0, max_tokens=1000,
        arrival_time=0.0, eos_token_id=EOS, **changes,
    )  # fmt: skip


def begin(form: StructuredOutputsParams, backend: GrammarBackend | None = None) -> RequestGrammar:
    matcher = (backend or llguidance_backend()).compile(form).make_matcher()
    return RequestGrammar(request_for(form), matcher)


def allowed(grammar: RequestGrammar, backend: GrammarBackend | None = None) -> list[int]:
    """Ids that may come next."""
    vocab_size = walk_tokenizer().vocab_size
    bitmask = np.zeros((1, -(-vocab_size // 32)), np.int32)
    (backend or llguidance_backend()).fill_bitmasks([grammar.matcher], bitmask)
    assert not grammar.matcher.error(), grammar.matcher.error()
    grammar.edit_mask(bitmask[0])
    bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")[:vocab_size]
    return np.flatnonzero(bits).tolist()


def walk(
    grammar: RequestGrammar,
    rng: random.Random,
    *,
    longest: int = 120,
    patience: int = 40,
    backend: GrammarBackend | None = None,
) -> tuple[list[int], bool]:
    """Draw tokens until the text ends: (ids without the end token, whether it ended).

    From `patience` tokens on those that end something are drawn rather than others.
    """
    ids: list[int] = []
    while len(ids) < longest:
        if grammar.is_terminated:
            return ids, True
        choices = allowed(grammar, backend)
        assert choices, "nothing is allowed"
        token_id = rng.choice(choices)
        if len(ids) >= patience:
            token_id = min(choices, key=lambda i: _eagerness(i, rng))
        if token_id == EOS:
            return ids, True
        refused = grammar.accept([token_id])
        assert refused is None, refused
        ids.append(token_id)
    return ids, False


def _eagerness(token_id: int, rng: random.Random) -> tuple[int, float]:
    text = walk_tokenizer().decode_token(token_id)
    rank = 0 if token_id == EOS else next((i + 1 for i, c in enumerate('}]"') if text == c), 4)
    return rank, rng.random()


def text_of(ids: Sequence[int]) -> str:
    """Bytes that are no UTF-8 would be a fault of the grammar."""
    text = walk_tokenizer().decode(ids)
    assert "\ufffd" not in text
    return text
