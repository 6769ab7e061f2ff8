"""What is drawn follows float64 arithmetic, on every path through the sampler."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.asked import ONE_MARK
from helpers.sampling import edited, filtered, new_request, run_sampler
from tokenmill.contracts.request import TokenRules
from tokenmill.kernels import native
from tokenmill.sampling.choosers import NativeChooser, TokenChooser, TorchChooser
from tokenmill.sampling.metadata import RandomColumns
from tokenmill.sampling_params import SamplingParams

INF = float("inf")
PROBABILITIES = [0.25, 0.2, 0.15, 0.12, 0.1, 0.08, 0.04, 0.03, 0.02, 0.01]
TOKENS = [1, 0, 3, 1, 1, 2]
"""Two of the prompt, four of the output."""
PATHS = {
    "plain": {},
    "hot": {"temperature": 2.0},
    "cold": {"temperature": 0.5},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.88},
    "min_p": {"min_p": 0.35},
    "all-filters": {"temperature": 1.4, "top_k": 8, "top_p": 0.93, "min_p": 0.1},
    "repetition": {"repetition_penalty": 1.4},
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": -0.9},
    "penalties": {"repetition_penalty": 0.7, "frequency_penalty": -0.2, "presence_penalty": 1.0},
    "bias": {"logit_bias": {9: 3.0, 0: -1.0}},
    "allowed": {"allowed_token_ids": [0, 3, 5, 7]},
    "bad-words": {"token_rules": TokenRules(bad_words=[[0], [1, 2, 4], [2, 1, 5]])},
    "min-tokens": {"min_tokens": 5, "stop_token_ids": (1, 2)},
    "everything": {
        "temperature": 1.3,
        "top_k": 7,
        "top_p": 0.95,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "logit_bias": {4: 1.0},
        "allowed_token_ids": [0, 1, 2, 3, 4, 6, 7, 8, 9],
        "min_tokens": 5,
        "stop_token_ids": (3,),
        "token_rules": TokenRules(bad_words=[[2, 6]]),
    },
}
COUNT = 4000
QUANTILE = 3.719
"""Of the normal distribution, exceeded once in 10,000; draws are fixed, so this says how unlucky
they may be."""


def _choice_of(params):
    names = ("temperature", "top_k", "top_p", "min_p")
    return {name: params[name] for name in names if name in params}


def chi_square_limit(freedom):
    """By Wilson and Hilferty (1931), within 5% for two degrees of freedom or more."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + QUANTILE * spread**0.5) ** 3


@pytest.mark.parametrize(
    ("path", "vary"),
    [(path, "seed") for path in PATHS]
    # All that looks at the tokens so far is in these paths' logits already.
    + [(path, "position") for path in PATHS if _choice_of(PATHS[path]) or path == "plain"],
)
def test_draws_follow_the_distribution(path, vary):
    """Over seeds at one place, and over places with one seed."""
    params = {"temperature": 1.0, **PATHS[path]}
    logits = np.log(PROBABILITIES)
    rows = torch.tensor(logits, dtype=torch.float32).expand(COUNT, -1)
    requests = [
        new_request(
            row,
            seed=row if vary == "seed" else 42,
            token_ids=TOKENS,
            num_prompt_tokens=2,
            **params,
        )
        for row in range(COUNT)
    ]
    behind_edits = edited(logits, requests[0], TOKENS)
    scaled = filtered(behind_edits, requests[0].sampling_params)
    if vary == "seed":
        tokens = run_sampler(rows, requests).token_ids
    else:
        # Places of their own leave the edits as they are only if nothing looks at the tokens.
        tokens = run_sampler(
            torch.tensor(behind_edits, dtype=torch.float32).expand(COUNT, -1),
            [new_request(row, seed=42, **_choice_of(params)) for row in range(COUNT)],
            positions=range(COUNT),
        ).token_ids
    kept = np.flatnonzero(scaled > -INF)
    expected = COUNT * np.exp(scaled[kept]) / np.exp(scaled[kept]).sum()
    observed = np.bincount(tokens, minlength=len(PROBABILITIES))
    assert observed[kept].sum() == COUNT
    assert len(kept) >= 3
    statistic = ((observed[kept] - expected) ** 2 / expected).sum()
    assert statistic < chi_square_limit(len(kept) - 1)


def test_forced_tokens_are_drawn_whatever_the_seed():
    request = {
        "token_ids": [1, 6, 2, 2],
        "num_prompt_tokens": 1,
        "thinking_token_budget": 2,
        "token_rules": TokenRules(reasoning=ONE_MARK),
    }
    requests = [new_request(row, seed=row, temperature=1.0, **request) for row in range(50)]
    rows = torch.tensor(np.log(PROBABILITIES), dtype=torch.float32).expand(50, -1)
    assert set(run_sampler(rows, requests).token_ids.tolist()) == {7}


# ---- masks ---------------------------------------------------------------------------------------

CHOOSERS: list[TokenChooser] = [TorchChooser()]
if native.is_available():
    CHOOSERS.append(NativeChooser())

each_chooser = pytest.mark.parametrize("chooser", CHOOSERS, ids=lambda each: type(each).__name__)


def filter_rows(chooser, logits, **params):
    """The rows as tokens are drawn from them."""
    count = len(logits)
    asked = SamplingParams(**{"temperature": 1.0, **params})
    columns = RandomColumns(
        temperature=np.full(count, asked.temperature, np.float32),
        top_k=np.full(count, asked.top_k, np.int64),
        top_p=np.full(count, asked.top_p, np.float64),
        min_p=np.full(count, asked.min_p, np.float32),
        seed=np.zeros(count, np.uint64),
        position=np.zeros(count, np.int64),
    )
    if asked.top_k >= logits.shape[1]:
        columns.top_k[:] = 0
    return chooser.filtered(logits, np.full(count, asked.greedy), columns)


@each_chooser
@settings(deadline=None)
@given(st.data())
def test_masks_equal_brute_force_on_ties_and_rows_of_bans(chooser, data):
    """Few distinct logits; shares that no sum of them meets exactly."""
    vocab_size = data.draw(st.integers(1, 70))
    values = st.sampled_from([-INF, -40.0, -3.0, -1.0, 0.0, 0.5, 1.5, 2.0, 2.25, 80.0])
    logits = data.draw(st.lists(values, min_size=vocab_size, max_size=vocab_size))
    if max(logits) == -INF:
        logits[data.draw(st.integers(0, vocab_size - 1))] = 0.0
    params = {
        "top_k": data.draw(st.integers(0, 75)),
        "top_p": data.draw(st.sampled_from([1e-9, 0.123, 0.37, 0.5017, 0.811, 0.9503, 1.0])),
        "min_p": data.draw(st.sampled_from([0.0, 0.011, 0.17, 0.43, 1.0])),
    }
    want = filtered(logits, SamplingParams(temperature=1.0, **params)) > -INF
    found = filter_rows(chooser, torch.tensor([logits]), **params)[0]
    assert (found > -INF).tolist() == want.tolist()
    assert found[want].tolist() == [logits[i] for i in np.flatnonzero(want)]


@each_chooser
@pytest.mark.parametrize("vocab_size", [100, 4099, 49_153])
@pytest.mark.parametrize(
    "params", [{"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.01}, {"top_k": 1}, {"temperature": 0.01}]
)
def test_masks_equal_brute_force_on_rows_as_models_make_them(chooser, vocab_size, params):
    logits = 4 * torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    logits[1] = logits[1].round()
    logits[2, ::3] = -INF
    found = filter_rows(chooser, logits, **params)
    asked = SamplingParams(**{"temperature": 1.0, **params})
    for row, kept in zip(logits, found, strict=True):
        want = filtered(row.tolist(), asked) > -INF
        assert np.array_equal((kept > -INF).numpy(), want)
        np.testing.assert_allclose(kept[want], row[want] / asked.temperature, rtol=1e-6)


@each_chooser
def test_greedy_and_unusable_rows_stay_as_they_are(chooser):
    logits = torch.randn(4, 33)
    logits[1, 5] = INF
    logits[2] = -INF
    for params in ({"temperature": 0.0}, {"top_k": 3}):
        found = filter_rows(chooser, logits, **params)
        rows = range(4) if params.get("temperature") == 0.0 else (1, 2)
        for row in rows:
            assert torch.equal(found[row], logits[row])
