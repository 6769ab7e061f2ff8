"""Raw log-probabilities: values, order, ties, ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.sampling.logprobs import raw_logprobs, token_logprobs


@settings(deadline=None)
@given(st.data())
def test_chosen_first_then_the_best_with_ties_by_id(data):
    count = data.draw(st.integers(1, 60))
    logits = data.draw(
        st.lists(st.sampled_from([-5.0, -1.0, 0.0, 2.5]), min_size=count, max_size=count)
    )
    chosen = data.draw(st.integers(0, count - 1))
    num_best = data.draw(st.integers(0, count))
    exact = np.array(logits) - np.log(np.exp(np.array(logits)).sum())
    entry = token_logprobs(raw_logprobs(torch.tensor([logits]))[0], chosen, num_best)
    best = sorted(range(count), key=lambda i: (-logits[i], i))[:num_best]
    assert entry.token_ids == [chosen, *best]
    assert entry.logprobs == pytest.approx(exact[[chosen, *best]].tolist(), abs=1e-5)
    assert entry.rank == sum(value >= logits[chosen] for value in logits)


@pytest.mark.parametrize("vocab_size", [1, 7, 997, 4096, 49_153])
def test_values_have_the_same_bits_in_any_batch_and_with_any_threads(vocab_size):
    logits = torch.randn(20, vocab_size, generator=torch.Generator().manual_seed(3)) * 4
    whole = raw_logprobs(logits)
    for some in ([0], [19], [4, 3], list(range(1, 20, 3))):
        assert torch.equal(raw_logprobs(logits[some]), whole[some])
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    single = raw_logprobs(logits)
    torch.set_num_threads(before)
    assert torch.equal(single, whole)
