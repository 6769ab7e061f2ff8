"""Tokens sampled by the GPU kernels are those of the host's chooser, whatever shares the work."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.kernels.gpu import sampling
from tokenmill.kernels.gpu.sampling import SamplingWorkspace
from tokenmill.kernels.gpu.sampling_reference import keep_candidates, sample_reference
from tokenmill.sampling.choosers import TorchChooser
from tokenmill.sampling.metadata import RandomColumns, SamplingMetadata
from tokenmill.sampling.random import gumbel_noise, stream_keys

INF = float("inf")
NAN = float("nan")

GREEDY: dict[str, Any] = {"is_greedy": True}
KINDS: list[dict[str, Any]] = [
    GREEDY,
    {},
    {"temperature": 0.6, "top_k": 5},
    {"temperature": 1.4, "top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"top_p": 0.9, "min_p": 0.05},
    {"top_k": 30, "min_p": 0.3},
    {"temperature": 0.01},
    {"top_k": 40, "top_p": 0.5, "temperature": 0.8},
    {"top_p": 0.999999},
]


def random_columns(rows: Sequence[dict[str, Any]], seed: int = 0) -> SamplingMetadata:
    """What `rows` ask for; what they do not name is off."""
    rng = np.random.default_rng(seed)

    def column(name: str, default: float, dtype: type) -> np.ndarray:
        return np.array([row.get(name, default) for row in rows], dtype)

    n = len(rows)
    return SamplingMetadata(
        is_greedy=column("is_greedy", False, np.bool_),
        random=RandomColumns(
            temperature=column("temperature", 1.0, np.float32),
            top_k=column("top_k", 0, np.int64),
            top_p=column("top_p", 1.0, np.float64),
            min_p=column("min_p", 0.0, np.float32),
            seed=rng.integers(0, 2**64, n, np.uint64),
            position=rng.integers(0, 2**40, n, np.int64),
        ),
        wants_logprobs=np.zeros(n, np.bool_),
        num_logprobs=np.zeros(n, np.int64),
    )


def on_host(logits: torch.Tensor, columns: SamplingMetadata) -> tuple[list[int], list[bool]]:
    columns = deepcopy(columns)
    columns.random.top_k[columns.random.top_k >= logits.shape[1]] = 0  # as RowSamplingParams does
    token_ids, is_valid = TorchChooser().choose(logits.cpu().clone(), columns)
    return token_ids.tolist(), is_valid.tolist()


def tensors_of(columns: SamplingMetadata, device: str) -> dict[str, torch.Tensor]:
    arrays = {
        "is_greedy": columns.is_greedy,
        "temperature": columns.random.temperature,
        "min_p": columns.random.min_p,
        "top_k": columns.random.top_k,
        "top_p": columns.random.top_p,
        "seed": columns.random.seed.view(np.int64),
        "position": columns.random.position,
    }
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def poisoned_workspace(num_rows: int, vocab_size: int, device: str) -> SamplingWorkspace:
    workspace = SamplingWorkspace.allocate(num_rows, vocab_size, device)
    for tensor in workspace:
        tensor.fill_(NAN if tensor.is_floating_point() else -77)
    return workspace


def on_device(
    logits: torch.Tensor,
    columns: SamplingMetadata,
    device: str,
    workspace: SamplingWorkspace | None = None,
    **changes: Any,
) -> tuple[list[int], list[bool]]:
    n = len(logits)
    named = tensors_of(columns, device) | changes
    named.setdefault("token_ids", torch.full((n,), -5, dtype=torch.int64, device=device))
    is_valid = torch.zeros(n, dtype=torch.bool, device=device)
    workspace = workspace or poisoned_workspace(n + 3, logits.shape[1], device)
    before = logits.clone()
    sampling.sample(logits.to(device), **named, is_valid=is_valid, workspace=workspace)
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))
    return named["token_ids"].tolist(), is_valid.tolist()


def rows_of(n: int, vocab_size: int) -> torch.Tensor:
    """Logits like a model's: of one scale, of large and small ones, and many equal ones."""
    logits = torch.randn(n, vocab_size) * torch.tensor([1.0, 4.0, 0.05, 10.0]).repeat(n)[:n, None]
    logits[1::4] = logits[1::4].bfloat16().float()
    return logits


@pytest.mark.parametrize("vocab_size", [1, 2, 97, 1030])
def test_rows_of_all_kinds(device: str, vocab_size: int) -> None:
    rows = KINDS + KINDS[2:4]
    logits = rows_of(len(rows), vocab_size)
    columns = random_columns(rows, vocab_size)
    expected = on_host(logits, columns)
    assert on_device(logits, columns, device) == expected
    assert all(expected[1])


@pytest.mark.parametrize("max_listed", [1, 64, 2048])
def test_chunks_of_several_tiles_and_lists_that_overflow(
    device: str, monkeypatch: pytest.MonkeyPatch, max_listed: int
) -> None:
    monkeypatch.setattr(sampling, "_NUM_PROGRAMS", 1)
    rows = [KINDS[3], KINDS[5], {"top_k": 900}, {"top_p": 0.7, "temperature": 2.0}]
    logits = rows_of(len(rows), 1700)
    logits[3] = (logits[3] / 8).round()
    columns = random_columns(rows)
    assert sampling.chunk_of(len(rows), 1700) == 4096
    workspace = poisoned_workspace(len(rows), 1700, device)
    workspace = workspace._replace(listed=workspace.listed[:, :, :max_listed].contiguous())
    assert on_device(logits, columns, device, workspace) == on_host(logits, columns)


def test_what_is_known_to_be_off_is_not_read(device: str) -> None:
    logits = rows_of(6, 300)
    poison = {"top_p": torch.zeros(6, device=device), "min_p": torch.ones(6, device=device)}
    plain = random_columns([{}, GREEDY] * 3)
    found = on_device(logits, plain, device, **poison, any_filter=False)
    assert found == on_host(logits, plain)
    greedy = random_columns([GREEDY] * 6)
    poison["is_greedy"] = torch.zeros(6, dtype=torch.bool, device=device)
    found = on_device(logits, greedy, device, **poison, any_random=False)
    assert found == on_host(logits, greedy)
    assert found[0] == logits.argmax(-1).tolist()


def test_a_row_without_a_finite_best_logit_is_not_valid(device: str) -> None:
    logits = torch.zeros(12, 40)
    logits[0] = -INF
    logits[1, 7] = INF
    logits[2, 3] = NAN
    logits[3, 1:] = -INF
    logits[4, ::2] = -INF
    logits[5, 39] = NAN
    logits[6:] = logits[:6]
    columns = random_columns([GREEDY] * 6 + [{"top_k": 3, "top_p": 0.9}] * 6)
    token_ids, is_valid = on_device(logits, columns, device)
    expected_ids, expected_valid = on_host(logits, columns)
    assert is_valid == expected_valid == [False, False, False, True, True, False] * 2
    assert all(0 <= token < 40 for token in token_ids)
    for row in (3, 4, 9, 10):
        assert token_ids[row] == expected_ids[row]


def test_banned_tokens_are_never_drawn(device: str) -> None:
    """Neither where fewer than k are left, nor where the difference to the best overflows."""
    logits = torch.full((4, 50), -INF)
    logits[:, 10] = 2.0
    logits[:, 12] = 1.5
    logits[2] = -3e38
    logits[2, 5] = 3e38
    logits[3, 20:] = -1e30  # a mask of a model of its own: a number, and above top-k's last
    rows = [{"top_k": 30}, {"top_p": 0.99999}, {"temperature": 2.0}, {"top_k": 3}]
    columns = random_columns(rows, seed=5)
    found = on_device(logits, columns, device)
    assert found == on_host(logits, columns)
    assert found[0][0] in (10, 12)
    assert found[0][2] == 5


EXTREMES: list[dict[str, Any]] = [
    {"top_k": 1, "temperature": 2.0},
    {"top_k": 199},
    {"top_k": 200, "temperature": 1e30},
    {"top_k": 2**40, "temperature": 1.5},
    {"top_p": 1e-300, "temperature": 2.0},
    {"top_p": 1 - 2**-53, "temperature": 2.0},
    {"min_p": 1.0, "temperature": 2.0},
    {"min_p": 1e-45, "temperature": 2.0},
    {"temperature": 1e-30},
    {"temperature": 1e-30, "top_k": 9, "top_p": 0.5},
    {"temperature": 1e30, "top_p": 0.4},
    {"temperature": 1e38, "top_k": 100},
]


def test_extreme_parameters(device: str) -> None:
    logits = rows_of(len(EXTREMES), 200) + 3
    logits[10] = 1e-42 * torch.arange(200) - 1e-40  # differences are denormal
    columns = random_columns(EXTREMES)
    assert on_device(logits, columns, device) == on_host(logits, columns)


def test_flat_rows(device: str) -> None:
    """All logits are equal: only ids say which tokens top-p keeps."""
    rows = [GREEDY, {}, {"top_k": 3}, {"top_p": 0.3051}, {"top_k": 50, "top_p": 0.00501}]
    logits = torch.full((5, 333), -1.25)
    columns = random_columns(rows)
    found = on_device(logits, columns, device)
    assert found == on_host(logits, columns)
    assert found[0][0] == 0
    assert found[0][3] <= 101
    assert found[0][4] <= 1


def test_a_mass_that_meets_top_p_exactly_suffices(device: str) -> None:
    """Two of eight equal tokens are a quarter; seeds draw the second of them, and the third."""
    logits = [0.5] * 8
    seeds = [seed_that_draws(1, [0, 1], logits), seed_that_draws(2, [0, 1, 2], logits)]
    columns = random_columns([{"top_p": 0.25}, {"top_p": 0.25, "top_k": 8}])
    columns.random.position[:] = 0
    columns.random.seed[:] = seeds
    found = on_device(torch.tensor([logits] * 2), columns, device)
    assert found == on_host(torch.tensor([logits] * 2), columns)
    assert found[0][0] == 1
    assert found[0][1] in (0, 1)


def test_zeros_of_either_sign_are_one_number(device: str) -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0], [-2.0, -1.0, 0.0, -0.0]])
    columns = random_columns([GREEDY, GREEDY])
    assert on_device(logits, columns, device)[0] == [1, 2]
    columns = random_columns([{"top_k": 1}, {"top_p": 0.2}])
    assert on_device(logits, columns, device) == on_host(logits, columns)


def test_a_row_does_not_depend_on_the_others(device: str) -> None:
    rows = [KINDS[1], KINDS[3], KINDS[5], KINDS[9]]
    logits = rows_of(len(rows), 1100)
    columns = random_columns(rows)
    whole, _ = on_device(logits, columns, device)
    named = tensors_of(columns, device)
    for row in range(len(rows)):
        wide = torch.full((2, 1100 + 12), NAN, device=device)
        wide[1:, 4:-8] = logits[row]
        token_ids = torch.full((1,), -5, dtype=torch.int32, device=device)
        alone = {name: column[row : row + 1] for name, column in named.items()}
        alone["top_k"] = alone["top_k"].int()
        on_device_rows = wide[1:, 4:-8]
        sampling.sample(
            on_device_rows,
            **alone,
            token_ids=token_ids,
            is_valid=torch.zeros(1, dtype=torch.bool, device=device),
            workspace=poisoned_workspace(1, 1100, device),
        )
        assert token_ids.tolist() == [whole[row]]


def test_no_rows(device: str) -> None:
    assert on_device(torch.empty(0, 64), random_columns([]), device) == ([], [])


def test_the_op_samples_as_the_function_does(device: str) -> None:
    logits = rows_of(len(KINDS), 77)
    columns = random_columns(KINDS)
    token_ids = torch.full((len(KINDS),), -5, device=device)
    is_valid = torch.zeros(len(KINDS), dtype=torch.bool, device=device)
    torch.ops.tokenmill.sample(
        logits.to(device),
        **tensors_of(columns, device),
        token_ids=token_ids,
        is_valid=is_valid,
        workspace=list(poisoned_workspace(len(KINDS), 77, device)),
    )
    assert (token_ids.tolist(), is_valid.tolist()) == on_host(logits, columns)


def test_the_reference_samples_what_the_host_samples() -> None:
    logits = torch.cat([rows_of(len(KINDS), 500), rows_of(len(EXTREMES), 500)])
    columns = random_columns(KINDS + EXTREMES)
    n = len(logits)
    token_ids = torch.full((n,), -5)
    is_valid = torch.zeros(n, dtype=torch.bool)
    sample_reference(logits, **tensors_of(columns, "cpu"), token_ids=token_ids, is_valid=is_valid)
    assert (token_ids.tolist(), is_valid.tolist()) == on_host(logits, columns)


def test_draws_follow_the_probabilities(device: str) -> None:
    """Chi-square with two degrees of freedom, under 18.4 with probability 0.9999."""
    n = 80 if device == "cpu" else 20_000
    logits = torch.tensor([0.3, -0.4, 1.1])
    columns = random_columns([{"temperature": 1.2}] * n, seed=3)
    rows = logits.expand(n, -1).contiguous()
    found, _ = on_device(rows, columns, device, any_filter=False)
    expected = n * (logits.double() / np.float32(1.2)).softmax(0).numpy()
    assert ((np.bincount(found, minlength=3) - expected) ** 2 / expected).sum() < 18.4


# ---- exactly the right tokens are kept ----------------------------------------------------------


def kept_tokens(logits: list[float], min_p: float, top_k: int, top_p: float) -> list[int]:
    """By the definitions, in falling order; exact integers where float64 would round."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = [i for i in order if logits[i] > -INF]
    best = logits[order[0]]
    if min_p > 0:
        order = [i for i in order if np.float32(logits[i] - best) >= np.log(np.float32(min_p))]
    if 0 < top_k < len(order):
        order = [i for i in order if logits[i] >= logits[order[top_k - 1]]]
    if top_p < 1:
        masses = [float(np.exp(np.float64(logits[i] - best))) for i in order]
        num_kept = 1
        while sum(masses[:num_kept]) < top_p * sum(masses):
            num_kept += 1
        order = order[:num_kept]
    return order


def seed_that_draws(token: int, candidates: list[int], logits: list[float]) -> int | None:
    """A seed for position 0 with which `token` is the best of the candidates."""
    ids = np.array(candidates)
    scaled = np.array([logits[i] for i in candidates], np.float32) - np.float32(max(logits))
    for seed in range(3000):
        key = stream_keys(np.array([seed], np.uint64), np.array([0]))[0]
        if ids[np.argmax(scaled + gumbel_noise(key, ids))] == token:
            return seed
    return None


LEVELS = [-INF, -40.0, -3.0, -2.0, -1.0, 0.0, 0.5, 1.5, 2.0, 2.25]


@settings(deadline=None, max_examples=20, derandomize=True)
@given(
    logits=st.lists(st.sampled_from(LEVELS), min_size=1, max_size=40),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.01, 0.123, 0.37, 0.5017, 0.811, 0.9503, 1.0]),
    min_p=st.sampled_from([0.0, 0.011, 0.17, 0.43, 1.0]),
)
def test_the_last_kept_token_and_the_first_dropped_one(
    device: str, logits: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    """With seeds that draw the last kept token, and the first one behind it if it were kept."""
    if max(logits) == -INF:
        logits[0] = 0.0
    kept = kept_tokens(logits, min_p, top_k, top_p)
    others = [i for i in range(len(logits)) if i not in kept and logits[i] > -INF]
    first_dropped = min(others, key=lambda i: (-logits[i], i), default=None)
    seeds = [seed_that_draws(kept[-1], kept, logits)]
    if first_dropped is not None:
        seeds.append(seed_that_draws(first_dropped, [*kept, first_dropped], logits))
    seeds = [seed for seed in seeds if seed is not None]  # none for a token of -40
    rows = [{"top_k": top_k, "top_p": top_p, "min_p": min_p}] * len(seeds)
    columns = random_columns(rows)
    columns.random.seed[:] = seeds
    columns.random.position[:] = 0
    found, _ = on_device(torch.tensor([logits] * len(seeds)), columns, device)
    expected = []
    for seed in seeds:
        key = stream_keys(np.array([seed], np.uint64), np.array([0]))[0]
        ids = np.sort(np.array(kept))
        scaled = np.array([logits[i] for i in ids], np.float32) - np.float32(max(logits))
        expected.append(int(ids[np.argmax(scaled + gumbel_noise(key, ids))]))
    assert found == expected
    scaled_row = torch.tensor(logits) - max(logits)
    keep_candidates(scaled_row, torch.tensor(min_p), top_k, top_p)
    assert scaled_row.isfinite().nonzero().flatten().tolist() == sorted(kept)
