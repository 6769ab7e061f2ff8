"""Noise is a pure function of (seed, position, token id), the same wherever it is made."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.sampling import gumbel, mix64
from tokenmill.sampling import random

SEEDS = st.integers(0, 2**64 - 1)


def noise(seed, position, token_ids):
    keys = random.stream_keys(np.array([seed], np.uint64), np.array([position], np.int64))
    return random.gumbel_noise(keys[0], np.array(token_ids, np.int64))


def test_mix64_gives_the_published_splitmix64_stream():
    """The first outputs of splitmix64 for seed 1234567, from its authors' C code."""
    states = (np.arange(1, 4, dtype=np.uint64)) * random.GOLDEN + np.uint64(1234567)
    assert random.mix64(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@given(SEEDS, st.integers(0, 2**31), st.lists(st.integers(0, 300_000), min_size=1, max_size=20))
def test_noise_equals_plain_integer_arithmetic(seed, position, token_ids):
    want = [np.float32(gumbel(seed, position, token_id)) for token_id in token_ids]
    np.testing.assert_array_max_ulp(noise(seed, position, token_ids), np.array(want), maxulp=1)


@pytest.mark.parametrize("vocab_size", [1, 7, 997, 4096, 49_153])
def test_a_tokens_noise_has_the_same_bits_in_any_company(vocab_size):
    token_ids = np.arange(vocab_size)
    whole = noise(3, 5, token_ids)
    chooser = np.random.default_rng(vocab_size)
    for _ in range(20):
        some = np.sort(chooser.choice(vocab_size, chooser.integers(1, vocab_size + 1), False))
        assert noise(3, 5, some).tobytes() == whole[some].tobytes()


def test_extreme_uniforms_give_finite_noise(monkeypatch):
    for bits in (0, 2**64 - 1):
        monkeypatch.setattr(random, "mix64", lambda z, bits=bits: np.full_like(z, bits))
        assert np.isfinite(random.gumbel_noise(np.uint64(0), np.arange(3))).all()


def test_noise_has_the_gumbel_distribution():
    values = np.concatenate([noise(11, position, np.arange(50_000)) for position in range(4)])
    assert values.mean() == pytest.approx(np.euler_gamma, abs=0.01)
    assert values.var() == pytest.approx(np.pi**2 / 6, abs=0.02)
    for quantile in (0.001, 0.1, 0.5, 0.9, 0.999):
        want = -np.log(-np.log(quantile))
        assert np.mean(values <= want) == pytest.approx(quantile, abs=0.003)


def test_neighbouring_seeds_positions_and_tokens_are_not_correlated():
    base = noise(1, 1, np.arange(20_000))
    for other in (
        noise(2, 1, np.arange(20_000)),
        noise(1, 2, np.arange(20_000)),
        noise(1, 1, np.arange(1, 20_001)),
        noise(1 + mix64(1) % 2**32, 1, np.arange(20_000)),
    ):
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.03
