"""Bans by a bitmask, natively, against torch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from helpers import isas
from tokenmill.kernels import native
from tokenmill.kernels.bitmask import apply_bitmask, apply_bitmask_reference

pytestmark = pytest.mark.skipif(not native.is_available(), reason="needs the native kernels")


@pytest.fixture(params=isas.OF_ROWS, autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    with isas.active(request.param):
        yield


def random_words(rng: np.random.Generator, num_rows: int, vocab_size: int) -> np.ndarray:
    words = rng.integers(0, 2**32, (num_rows, -(-vocab_size // 32)), dtype=np.uint32)
    words[rng.random(words.shape) < 0.3] = 0
    words[rng.random(words.shape) < 0.3] = 2**32 - 1
    return words.view(np.int32)


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 31, 32, 33, 63, 1000, 49_152])
def test_the_native_kernel_bans_what_torch_bans(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(rng.standard_normal((7, vocab_size + 3), np.float32))[:, :vocab_size]
    rows = np.array([5, 0, 3], np.int64)
    words = random_words(rng, len(rows), vocab_size)
    expected, got = logits.clone(), logits.clone()
    apply_bitmask_reference(expected, words, rows)
    apply_bitmask(got, words, rows)
    assert torch.equal(got, expected)
    view = torch.zeros(7, vocab_size + 3)[:, :vocab_size].copy_(logits)
    apply_bitmask(view, words, rows)
    assert torch.equal(view, expected)


def test_no_rows_are_no_work() -> None:
    logits = torch.zeros(2, 40)
    apply_bitmask(logits, np.empty((0, 2), np.int32), np.empty(0, np.int64))
    assert not logits.any()


@pytest.mark.parametrize(("rows", "width"), [([0, 7], 2), ([-1], 2), ([0], 1), ([0], 3)])
def test_what_does_not_fit_is_refused(rows: list[int], width: int) -> None:
    words = np.zeros((len(rows), width), np.int32)
    with pytest.raises(ValueError):
        native.module().apply_bitmask(torch.zeros(7, 40), np.array(rows, np.int64), words)
