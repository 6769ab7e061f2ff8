"""The sampler of a GPU gives what the host's gives: tokens, validity, log-probabilities."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.asked import EDITS, OTHER_MARKS
from helpers.sampling import edited, filtered, metadata_of, new_request
from helpers.triton_interpreter import adapt_interpreter
from tokenmill.kernels.gpu import sampling
from tokenmill.sampling.choosers import TorchChooser
from tokenmill.sampling.gpu import GpuSampler
from tokenmill.sampling.grammar_mask import GrammarMask
from tokenmill.sampling.logprobs import LogprobsMode
from tokenmill.sampling.sampler import Sampler, SamplerOutput
from tokenmill.worker.inputs.staging import NUM_BUFFERS, Results, Staging

IS_INTERPRETED = os.environ["TRITON_INTERPRET"] == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
if IS_INTERPRETED:
    adapt_interpreter()


class CountedStaging:
    """Counts the copies to the device."""

    def __init__(self):
        self._staging = Staging(DEVICE)
        self.num_copies = 0
        self.num_arrays = 0
        """Of the last copy."""

    def stage(self, arrays):
        self.num_copies += 1
        self.num_arrays = len(arrays)
        return self._staging.stage(arrays)


def gpu_sampler(vocab_size, staging=None, max_num_rows=4, mode=None):
    return GpuSampler(
        (staging or CountedStaging()).stage,
        Results(DEVICE).fetch,
        max_num_rows=max_num_rows,
        vocab_size=vocab_size,
        device=DEVICE,
        mode=mode,
    )


def check(requests, vocab_size, *, seed=0, staging=None, mode=None, **asked) -> SamplerOutput:
    """Both samplers agree on random logits, some of them equal."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(requests), vocab_size, generator=generator) * 4
    logits[1::2] = logits[1::2].round()
    metadata = metadata_of(requests, vocab_size, **asked)
    want = Sampler(chooser=TorchChooser(), mode=mode).forward(logits.clone(), metadata)
    samples = gpu_sampler(vocab_size, staging, mode=mode).forward(
        logits.to(DEVICE), on_device(metadata)
    )
    found = samples.to_host()
    assert found.is_valid.tolist() == want.is_valid.tolist()
    assert found.token_ids.tolist() == want.token_ids.tolist()
    assert samples.token_ids.tolist() == found.token_ids.tolist()
    assert samples.to_host() is found
    check_scores(found.logprobs, want.logprobs)
    return found


def on_device(metadata):
    return replace(metadata, token_ids=metadata.token_ids.to(DEVICE))


def check_scores(found, want):
    assert list(found) == list(want)
    for row, entry in want.items():
        assert found[row].token_ids == entry.token_ids
        assert found[row].logprobs == pytest.approx(entry.logprobs, abs=1e-5)
        assert found[row].rank == entry.rank
        assert found[row].ranks == entry.ranks


def test_rows_that_ask_for_different_things():
    """The workspace grows when a step has more rows than were foreseen."""
    requests = [
        new_request(0, temperature=0.0, logprobs=3),
        new_request(1, seed=5, temperature=1.0),
        new_request(2, seed=-7, temperature=0.7, top_k=9, logprobs=0),
        new_request(3, seed=8, temperature=1.2, top_p=0.7, min_p=0.01, logprobs=-1),
        new_request(4, seed=2**63, temperature=2.0, logprobs=3),
        new_request(5, temperature=0.0),
    ]
    found = check(requests, 150, positions=[3, 1, 4, 1, 5, 9])
    assert [len(entry.token_ids) for entry in found.logprobs.values()] == [4, 1, 151, 4]


@pytest.mark.parametrize("logprobs", [None, 2])
def test_greedy_rows(logprobs):
    staging = CountedStaging()
    check(
        [new_request(row, temperature=0.0, logprobs=logprobs) for row in range(3)],
        70,
        staging=staging,
    )
    assert staging.num_copies == (logprobs is not None)


def test_masks_and_bans_come_in_one_copy():
    """Log-probabilities are those behind the grammar's mask, but before bans."""
    requests = [
        new_request(0, temperature=0.0, logprobs=6, min_tokens=3, stop_token_ids=(1, 6, 2)),
        new_request(1, seed=1, temperature=1.0, top_k=4),
        new_request(2, seed=2, temperature=1.0, min_tokens=4, stop_token_ids=(0, 69), logprobs=2),
    ]
    words = np.array([[0x5F, 0, 0], [0xF0F0F0F, 3, 0x3F]], "<i4")
    staging = CountedStaging()
    found = check(
        requests,
        70,
        seed=3,
        staging=staging,
        num_output_tokens=[1, 9, 4],
        grammar=GrammarMask(np.array([0, 2]), words),
    )
    assert staging.num_copies == 1
    assert found.token_ids[0] in (0, 3, 4)
    assert {1, 2, 6} <= set(found.logprobs[0].token_ids)


def test_all_rows_ask_and_some_are_banned():
    requests = [
        new_request(row, seed=row, temperature=1.0, logprobs=1, min_tokens=1, stop_token_ids=(4,))
        for row in range(3)
    ]
    check(requests, 40, num_output_tokens=[0, 1, 0])


@pytest.mark.parametrize("edits", EDITS + OTHER_MARKS, ids=lambda edits: "+".join(edits))
def test_edits_are_those_of_the_host(edits):
    """Rows that ask beside rows that do not; one row's tokens are many."""
    rng = np.random.default_rng(3)
    requests = []
    for row in range(6):
        tokens = rng.integers(0, 10, 40 if row == 2 else int(rng.integers(2, 9))).tolist()
        requests.append(
            new_request(
                row,
                seed=row,
                temperature=row % 2,
                token_ids=tokens,
                num_prompt_tokens=1,
                logprobs=1 if row == 4 else None,
                **(edits if row % 3 != 1 else {}),
            )
        )
    check(requests, 70)
    metadata = on_device(metadata_of(requests, 70))
    logits = torch.randn(6, 70, generator=torch.Generator().manual_seed(4)) * 3
    found = logits.clone().to(DEVICE)
    gpu_sampler(70).forward(found, metadata)
    for row, request in enumerate(requests):
        want = edited(logits[row].tolist(), request, request.token_ids)
        np.testing.assert_allclose(found[row].cpu().numpy(), want, rtol=1e-5, atol=1e-5)


def test_edits_of_many_rows_come_in_one_copy():
    rng = np.random.default_rng(5)
    requests = [
        new_request(
            row,
            seed=row,
            temperature=1.0,
            token_ids=rng.integers(0, 10, 9).tolist(),
            num_prompt_tokens=3,
            **EDITS[row % len(EDITS)],
        )
        for row in range(len(EDITS))
        if "thinking_token_budget" not in EDITS[row]
    ]
    staging = CountedStaging()
    requests = [replace(request, row=row) for row, request in enumerate(requests)]
    check(requests, 40, staging=staging)
    assert staging.num_copies == 1


@pytest.mark.parametrize(
    "mode",
    [LogprobsMode(False, True), LogprobsMode(True, False), LogprobsMode(True, True)],
    ids=["raw_logits", "processed_logprobs", "processed_logits"],
)
def test_other_numbers_than_raw_log_probabilities(mode):
    requests = [
        new_request(0, temperature=0.0, logprobs=3, presence_penalty=1.0),
        new_request(1, seed=5, temperature=0.6),
        new_request(2, seed=7, temperature=0.7, top_k=9, logprobs=4),
        new_request(3, seed=8, temperature=1.2, top_p=0.7, min_p=0.01, logprobs=8),
        new_request(4, seed=9, temperature=1.2, min_p=0.2, top_k=3, logprob_token_ids=[3, 0, 9]),
    ]
    check(requests, 150, mode=mode)
    greedy = [new_request(row, temperature=0.0, logprobs=2) for row in range(2)]
    check(greedy, 40, mode=mode)


@pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_draws_follow_the_distribution(count):
    """Behind penalties and all filters, over seeds at one place. The host's sampler draws the same,
    and is tested with thousands.
    """
    tokens = [1, 0, 3, 1, 1, 2]
    logits = np.log([0.25, 0.2, 0.15, 0.12, 0.1, 0.08, 0.04, 0.03, 0.02, 0.01])
    requests = [
        new_request(
            row,
            seed=row,
            token_ids=tokens,
            num_prompt_tokens=2,
            temperature=1.4,
            top_k=8,
            top_p=0.93,
            min_p=0.1,
            frequency_penalty=0.3,
            logit_bias={9: 1.0},
        )
        for row in range(count)
    ]
    rows = torch.tensor(logits, dtype=torch.float32).repeat(count, 1).to(DEVICE)
    metadata = on_device(metadata_of(requests, len(logits)))
    found = gpu_sampler(len(logits), max_num_rows=count).forward(rows, metadata).to_host()
    scaled = filtered(edited(logits, requests[0], tokens), requests[0].sampling_params)
    kept = np.flatnonzero(scaled > -np.inf)
    expected = count * np.exp(scaled[kept]) / np.exp(scaled[kept]).sum()
    observed = np.bincount(found.token_ids, minlength=len(logits))[kept]
    assert observed.sum() == count
    assert len(kept) == 7
    assert ((observed - expected) ** 2 / expected).sum() < 22.46  # once in a thousand


def test_ids_that_were_named_have_their_ranks():
    requests = [
        new_request(0, temperature=0.0, logprob_token_ids=[5, 1]),
        new_request(1, temperature=0.0, logprobs=2),
        new_request(2, temperature=0.0),
        new_request(3, temperature=0.0, logprob_token_ids=list(range(40))),
    ]
    found = check(requests, 60)
    assert [len(entry.ranks) for entry in found.logprobs.values()] == [2, 0, 40]


def test_rows_that_come_again_send_their_positions_only():
    requests = [
        new_request(row, temperature=1.0 if row else 0.0, seed=row, top_k=3 * row, top_p=0.9)
        for row in range(3)
    ]
    metadata = metadata_of(requests, 64)
    staging = CountedStaging()
    sampler = gpu_sampler(64, staging)
    nums_arrays = []
    for step in range(5):
        if step == 4:  # other rows
            metadata = metadata_of(requests[::-1], 64)
        position = np.full(3, 10 + step)
        metadata = replace(metadata, random=replace(metadata.random, position=position))
        generator = torch.Generator().manual_seed(step)
        logits = torch.randn(3, 64, generator=generator) * 3
        found = sampler.forward(logits.clone().to(DEVICE), on_device(metadata)).to_host()
        want = Sampler(TorchChooser()).forward(logits, metadata)
        assert found.token_ids.tolist() == want.token_ids.tolist()
        nums_arrays.append(staging.num_arrays)
        for _ in range(NUM_BUFFERS):  # what is staged later lands where this step's numbers were
            staging._staging.stage([np.full(1000, -1)])
    assert nums_arrays == [7, 7, 1, 1, 7]


def test_rows_without_usable_logits():
    logits = torch.zeros(4, 20)
    logits[0, 5] = float("nan")
    logits[1] = -float("inf")
    logits[2, 7] = float("inf")
    logits[3, 9] = 1.0
    requests = [new_request(row, temperature=row % 2, seed=row, logprobs=2) for row in range(4)]
    found = gpu_sampler(20).forward(logits.to(DEVICE), metadata_of(requests, 20)).to_host()
    assert found.is_valid.tolist() == [False, False, False, True]
    assert len(found.logprobs) == 4
    assert found.logprobs[3].token_ids[1:] == [9, 0]


def test_no_rows():
    found = gpu_sampler(20).forward(torch.empty(0, 20, device=DEVICE), metadata_of([], 20))
    assert found.to_host().token_ids.tolist() == []
    assert found.to_host().logprobs == {}


def test_scores_of_given_tokens():
    """More rows than are listed at once, listing different numbers of tokens."""
    vocab_size, n = 90, 75
    logits = torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(1)).mul(3).round()
    logits[4, 3] = float("nan")
    logits[6, ::2] = -float("inf")
    token_ids = np.arange(n, dtype=np.int64) % vocab_size
    num_best = np.array([0, 5, 1, 5, 5] * (n // 5))
    found, is_finite = gpu_sampler(vocab_size).score(logits.to(DEVICE), token_ids, num_best)
    want, want_finite = Sampler().score(logits, token_ids, num_best)
    assert is_finite == want_finite
    assert not is_finite[4]
    check_scores(
        {row: entry for row, entry in enumerate(found) if row != 4},
        {row: entry for row, entry in enumerate(want) if row != 4},
    )


def test_warming_up_leaves_nothing_behind(monkeypatch):
    """It samples from as many rows as each size of chunks is for."""
    monkeypatch.setattr(sampling, "_NUM_PROGRAMS", 3)
    assert sampling.num_rows_of_variants(5, 40) == [1, 3]
    assert sampling.num_rows_of_variants(2, 40) == [1]
    sampler = gpu_sampler(40, max_num_rows=5)
    sampler.warm_up()
    requests = [new_request(0, temperature=0.0), new_request(1, seed=3, temperature=1.0)]
    logits = torch.randn(2, 40)
    metadata = metadata_of(requests, 40)
    want = Sampler(chooser=TorchChooser()).forward(logits.clone(), metadata)
    found = sampler.forward(logits.to(DEVICE), metadata).to_host()
    assert found.token_ids.tolist() == want.token_ids.tolist()


def test_nothing_is_compiled_behind_the_warm_up():
    """A variant that is compiled while requests are served stops them for a second."""
    done = subprocess.run(
        [sys.executable, "-m", "helpers.sampling_launches"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
    )
    assert done.returncode == 0, done.stderr
    warm, *steps = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(steps) == 21
    assert len(warm) == 10, sorted(warm)
    for step in steps:
        assert step == warm
