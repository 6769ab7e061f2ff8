"""Raw log-probabilities: values, order, ties, ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.kernels import native
from tokenmill.sampling.logprobs import NativeScorer, TokenScorer, TorchScorer

SCORERS: list[TokenScorer] = [TorchScorer(), *([NativeScorer()] if native.is_available() else [])]

each_scorer = pytest.mark.parametrize("scorer", SCORERS, ids=lambda scorer: type(scorer).__name__)


@each_scorer
@settings(deadline=None)
@given(st.data())
def test_chosen_first_then_the_best_with_ties_by_id(scorer, data):
    count = data.draw(st.integers(1, 60))
    logits = data.draw(
        st.lists(st.sampled_from([-5.0, -1.0, 0.0, 2.5]), min_size=count, max_size=count)
    )
    chosen = data.draw(st.integers(0, count - 1))
    num_best = data.draw(st.integers(0, count))
    exact = np.array(logits) - np.log(np.exp(np.array(logits)).sum())
    [entry], [is_finite] = scorer.score(
        torch.tensor([logits]), np.array([chosen]), np.array([num_best])
    )
    best = sorted(range(count), key=lambda i: (-logits[i], i))[:num_best]
    assert is_finite
    assert entry.token_ids == [chosen, *best]
    assert entry.logprobs == pytest.approx(exact[[chosen, *best]].tolist(), abs=1e-5)
    assert entry.rank == sum(value >= logits[chosen] for value in logits)


@each_scorer
@pytest.mark.parametrize("vocab_size", [20, 63, 1000, 49_153])
def test_rows_that_ask_for_different_numbers(scorer, vocab_size):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, vocab_size, generator=generator) * 4
    logits[1] = logits[1].round()  # many ties
    logits[2, 1::2] = -torch.inf  # a grammar's mask
    logits[3] += 1000
    chosen, num_best = np.array([3, 0, 2, 5, 7, 11]), np.array([0, 5, 20, 1, 20, 20])
    entries, is_finite = scorer.score(logits, chosen, num_best)
    exact = logits.double().log_softmax(-1).numpy()
    assert all(is_finite)
    for row, entry in enumerate(entries):
        order = np.argsort(-logits[row].numpy(), kind="stable")[: num_best[row]].tolist()
        assert entry.token_ids == [chosen[row], *order]
        np.testing.assert_allclose(entry.logprobs, exact[row, entry.token_ids], 1e-5, 1e-5)
        assert entry.rank == int((logits[row] >= logits[row, chosen[row]]).sum())


@each_scorer
def test_rows_without_a_best_token_are_not_finite(scorer):
    logits = torch.randn(5, 300)
    logits[0, 7] = torch.nan
    logits[1] = -torch.inf
    logits[2, 299] = torch.inf
    logits[3, 0] = torch.nan
    entries, is_finite = scorer.score(logits, np.arange(5), np.zeros(5, np.int64))
    assert is_finite == [False, False, False, False, True]
    assert all(np.isnan(entry.logprobs[0]) for entry in entries[:2])
    assert np.isfinite(entries[4].logprobs).all()


@each_scorer
@pytest.mark.parametrize("vocab_size", [1, 7, 997, 4096, 49_153])
def test_values_have_the_same_bits_in_any_batch_and_with_any_threads(scorer, vocab_size):
    logits = torch.randn(20, vocab_size, generator=torch.Generator().manual_seed(3)) * 4
    chosen, num_best = np.arange(20) % vocab_size, np.full(20, min(vocab_size, 4))
    whole, _ = scorer.score(logits, chosen, num_best)
    for some in ([0], [19], [4, 3], list(range(1, 20, 3))):
        entries, _ = scorer.score(logits[some], chosen[some], num_best[some])
        assert entries == [whole[row] for row in some]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    single, _ = scorer.score(logits, chosen, num_best)
    torch.set_num_threads(before)
    assert single == whole
