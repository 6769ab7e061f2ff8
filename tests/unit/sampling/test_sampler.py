"""The sampler against float64 arithmetic written down a second time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.sampling import filtered, metadata_of, new_request, run_sampler, sample
from tokenmill.sampling.grammar_mask import GrammarMask
from tokenmill.sampling.transforms import MinP, TopK, TopP
from tokenmill.sampling_params import SamplingParams

INF = float("inf")


def random_logits(rows, vocab_size, *, scale=3.0, seed=0):
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def kept_tokens(logits, **params):
    """Per row the ids that the filters keep, of logits [n, vocab_size] at temperature 1."""
    requests = [new_request(row, temperature=1.0, **params) for row in range(len(logits))]
    columns = metadata_of(requests, logits.shape[1]).random
    scaled = logits - logits.max(-1, keepdim=True).values
    for candidate_filter in (MinP(), TopK(), TopP()):
        candidate_filter.apply(scaled, columns)
    return [np.flatnonzero(row > -INF).tolist() for row in scaled.numpy()]


MIXED = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.01},
    {"temperature": 1.0, "top_p": 1e-6},
]


@pytest.mark.parametrize("vocab_size", [2, 97, 1000, 4099])
def test_mixed_rows_sample_what_the_reference_samples(vocab_size):
    logits = random_logits(64, vocab_size)
    requests = [
        new_request(row, seed=row * 7919 - 5, **MIXED[row % len(MIXED)]) for row in range(64)
    ]
    positions = list(range(100, 164))
    got = run_sampler(logits, requests, positions=positions)
    want = [
        sample(row.tolist(), request.sampling_params, request.seed, position)
        for row, request, position in zip(logits, requests, positions, strict=True)
    ]
    assert got.token_ids.tolist() == want
    assert got.is_valid.all()


@pytest.mark.parametrize("vocab_size", [7, 997, 4096, 49_153])
@pytest.mark.parametrize("params", [MIXED[0], MIXED[1], MIXED[5]])
def test_a_row_gives_the_same_bits_alone_and_among_others(vocab_size, params):
    """B010: neighbours and their order change nothing."""
    rows = 16 if vocab_size > 10_000 else 64
    logits = random_logits(rows, vocab_size)
    requests = [
        new_request(row, seed=row, logprobs=3, **(params if row % 2 else MIXED[row % 8]))
        for row in range(rows)
    ]
    whole = run_sampler(logits, requests, positions=range(rows))
    order = np.random.default_rng(1).permutation(rows)
    for some in ([3], [rows - 1, 0], order.tolist(), order[: rows // 3].tolist()):
        part = run_sampler(logits[some], [requests[i] for i in some], positions=some)
        assert part.token_ids.tolist() == whole.token_ids[some].tolist()
        assert list(part.logprobs.values()) == [whole.logprobs[i] for i in some]


def test_seed_and_position_decide_and_nothing_else():
    logits = random_logits(1, 500, scale=1.0).expand(40, -1)
    requests = [new_request(row, seed=row // 20, temperature=1.0) for row in range(40)]
    tokens = run_sampler(logits, requests, positions=[row % 20 for row in range(40)]).token_ids
    again = run_sampler(logits, requests, positions=[row % 20 for row in range(40)]).token_ids
    assert tokens.tolist() == again.tolist()
    assert len(set(tokens[:20].tolist())) > 10
    assert tokens[:20].tolist() != tokens[20:].tolist()


def test_seeds_are_64_bits_whatever_their_sign():
    logits = random_logits(3, 500, scale=1.0)[:1].expand(3, -1)
    seeds = [-1, 2**64 - 1, 2**63]
    requests = [new_request(row, seed=seed, temperature=1.0) for row, seed in enumerate(seeds)]
    tokens = run_sampler(logits, requests).token_ids
    assert tokens[0] == tokens[1] != tokens[2]


# ---- filters ------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.data())
def test_filters_keep_what_the_reference_keeps(data):
    """Few distinct logits, so that ties abound; shares that no sum of them meets exactly."""
    vocab_size = data.draw(st.integers(1, 40))
    values = st.sampled_from([-INF, -40.0, -3.0, -1.0, 0.0, 0.5, 1.5, 2.0, 2.25, 80.0])
    logits = data.draw(st.lists(values, min_size=vocab_size, max_size=vocab_size))
    if max(logits) == -INF:
        logits[0] = 0.0
    params = {
        "top_k": data.draw(st.integers(0, 45)),
        "top_p": data.draw(st.sampled_from([0.01, 0.123, 0.37, 0.5017, 0.811, 0.9503, 1.0])),
        "min_p": data.draw(st.sampled_from([0.0, 0.011, 0.17, 0.43, 1.0])),
    }
    want = filtered(logits, SamplingParams(temperature=1.0, **params))
    assert kept_tokens(torch.tensor([logits]), **params) == [np.flatnonzero(want > -INF).tolist()]


def test_top_k_keeps_ties_with_the_last_of_them():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    assert kept_tokens(logits, top_k=2) == [[1, 2, 3, 4]]
    assert kept_tokens(logits, top_k=10**9) == [[0, 1, 2, 3, 4, 5]]


def test_top_p_keeps_the_smallest_set_and_smaller_ids_of_ties():
    logits = torch.tensor([[0.1, 0.2, 0.4, 0.2, 0.1]]).log()
    assert kept_tokens(logits, top_p=0.39) == [[2]]
    assert kept_tokens(logits, top_p=0.55) == [[1, 2]]
    assert kept_tokens(logits, top_p=0.75) == [[1, 2, 3]]
    assert kept_tokens(logits, top_p=1e-300) == [[2]]


@pytest.mark.parametrize("vocab_size", [3, 50, 3000])
@pytest.mark.parametrize("top_p", [1e-300, 1e-4, 0.5, 0.999999])
def test_top_p_on_a_flat_row_keeps_its_share(vocab_size, top_p):
    kept = kept_tokens(torch.zeros(1, vocab_size), top_p=top_p)[0]
    assert kept == list(range(len(kept)))
    assert len(kept) == pytest.approx(max(1, top_p * vocab_size), abs=1)


def test_top_p_counts_what_top_k_left():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Of 0.4 and 0.3 the first is 57%.
    assert kept_tokens(logits, top_k=2, top_p=0.5) == [[0]]
    assert kept_tokens(logits, top_p=0.5) == [[0, 1]]


def test_min_p_one_is_the_best_token():
    logits = random_logits(32, 200)
    requests = [new_request(row, seed=row, temperature=2.0, min_p=1.0) for row in range(32)]
    assert run_sampler(logits, requests).token_ids.tolist() == logits.argmax(-1).tolist()


# ---- extremes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 0.0])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_tiny_temperatures_give_the_best_token(temperature, scale):
    """B013: no NaN, no infinity, no other token."""
    logits = torch.linspace(-2, 2, 300)[torch.randperm(300)].round(decimals=2).unsqueeze(0) * scale
    logits[0, 17] = 3.0 * scale
    request = new_request(temperature=temperature, top_p=1e-4)
    output = run_sampler(logits, [request])
    assert output.token_ids.tolist() == [17]
    assert output.is_valid.all()


@pytest.mark.parametrize(
    "params",
    [
        {"top_p": 1e-300},
        {"top_p": 1.0},
        {"top_k": -1},
        {"top_k": 10**9},
        {"top_k": 1},
        {"min_p": 1.0},
        {"min_p": 1e-300},
        {"temperature": 2.0},
        {"temperature": 1e-2},
        {"logprobs": -1},
    ],
)
def test_accepted_edge_values_give_a_token_of_the_vocabulary(params):
    """B015."""
    for scale in (0.0, 1e-30, 1.0, 1e4, 1e30):
        logits = random_logits(1, 50, scale=scale)
        output = run_sampler(logits, [new_request(**params)])
        assert output.is_valid.all()
        assert 0 <= output.token_ids[0] < 50


def test_huge_differences_do_not_overflow_into_nan():
    logits = torch.tensor([[-3e38, 3e38, 0.0, -INF]])
    for temperature in (0.01, 1.0, 2.0):
        output = run_sampler(logits, [new_request(temperature=temperature)])
        assert output.token_ids.tolist() == [1]


def test_rows_with_corrupt_logits_are_told_apart():
    logits = random_logits(6, 30)
    logits[1, 3] = float("nan")
    logits[2] = -INF
    logits[3, 0] = INF
    logits[4] = float("nan")
    for params in MIXED:
        requests = [new_request(row, seed=row, logprobs=2, **params) for row in range(6)]
        output = run_sampler(logits, requests)
        assert output.is_valid.tolist() == [True, False, False, False, False, True]
        for row in (0, 5):
            alone = run_sampler(logits[[row]], [requests[row]])
            assert alone.token_ids[0] == output.token_ids[row]


def test_no_rows_is_no_work():
    output = run_sampler(torch.empty(0, 30), [])
    assert output.token_ids.tolist() == []
    assert output.logprobs == {}


def test_greedy_takes_the_smallest_id_of_ties():
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0], [2.0, 2.0, 2.0, 2.0]])
    requests = [new_request(row, temperature=0.0) for row in range(2)]
    assert run_sampler(logits, requests).token_ids.tolist() == [1, 0]


# ---- distribution -------------------------------------------------------------------------------

CHI_SQUARE_999 = {4: 18.47, 5: 20.52, 9: 27.88}
"""Values that chi-square with so many degrees of freedom exceeds once in a thousand."""


@pytest.mark.parametrize(
    ("params", "freedom"),
    [
        ({"temperature": 1.0}, 9),
        ({"temperature": 2.0}, 9),
        ({"temperature": 1.0, "top_k": 5}, 4),
        ({"temperature": 1.0, "top_p": 0.88}, 5),
    ],
)
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_draws_follow_the_distribution(params, freedom, vary):
    """Over seeds at one position, and over positions with one seed."""
    logits = np.log([0.25, 0.2, 0.15, 0.12, 0.1, 0.08, 0.04, 0.03, 0.02, 0.01])
    count = 4000
    rows = torch.tensor(logits, dtype=torch.float32).expand(count, -1)
    requests = [
        new_request(row, seed=row if vary == "seed" else 42, **params) for row in range(count)
    ]
    positions = [5] * count if vary == "seed" else range(count)
    tokens = run_sampler(rows, requests, positions=positions).token_ids
    scaled = filtered(logits, SamplingParams(**params))
    kept = np.flatnonzero(scaled > -INF)
    expected = count * np.exp(scaled[kept]) / np.exp(scaled[kept]).sum()
    observed = np.bincount(tokens, minlength=10)
    assert observed[kept].sum() == count
    assert len(kept) == freedom + 1
    assert ((observed[kept] - expected) ** 2 / expected).sum() < CHI_SQUARE_999[freedom]


# ---- edits, masks and their order ---------------------------------------------------------------


def test_stop_ids_are_banned_until_min_tokens():
    """B030: all of them, greedy and random, and only while the output is short."""
    logits = torch.zeros(4, 10)
    logits[:, [2, 7]] = 50.0
    logits[:, 4] = 20.0
    requests = [
        new_request(row, temperature=row % 2, min_tokens=3, stop_token_ids=(2, 7, 99))
        for row in range(4)
    ]
    tokens = run_sampler(logits, requests, num_output_tokens=[2, 2, 3, 3]).token_ids
    assert tokens[:2].tolist() == [4, 4]
    assert set(tokens[2:].tolist()) <= {2, 7}


def test_a_grammar_mask_restricts_its_rows_only():
    logits = random_logits(3, 70)
    allowed = [[5, 31], [32, 63, 69]]
    bits = np.zeros((2, 3), np.uint32)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            bits[row, token // 32] |= np.uint32(1 << token % 32)
    grammar = GrammarMask(np.array([0, 2]), bits.view(np.int32))
    requests = [new_request(row, temperature=0.0) for row in range(3)]
    tokens = run_sampler(logits, requests, grammar=grammar).token_ids.tolist()
    assert tokens == [
        max(allowed[0], key=lambda t: logits[0, t]),
        logits[1].argmax().item(),
        max(allowed[1], key=lambda t: logits[2, t]),
    ]


def test_raw_logprobs_are_those_after_the_grammar_and_before_every_other_edit():
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]])
    grammar = GrammarMask(np.array([0]), np.array([[0b1110]], np.int32))
    request = new_request(temperature=0.5, top_k=1, logprobs=3, min_tokens=1, stop_token_ids=(1,))
    output = run_sampler(logits, [request], grammar=grammar)
    assert output.token_ids.tolist() == [2]
    want = np.array([3.0, 2.0, 1.0]) - np.log(np.exp([3.0, 2.0, 1.0]).sum())
    entry = output.logprobs[0]
    assert entry.token_ids == [2, 1, 2, 3]
    assert entry.logprobs == pytest.approx([want[1], *want], abs=1e-6)
    assert entry.rank == 2


def test_a_row_without_an_allowed_token_is_invalid():
    grammar = GrammarMask(np.array([0]), np.array([[0b10]], np.int32))
    request = new_request(min_tokens=1, stop_token_ids=(1,))
    assert run_sampler(torch.zeros(1, 4), [request], grammar=grammar).is_valid.tolist() == [False]
