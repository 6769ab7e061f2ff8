"""Penalties: the native kernel has the bits of the torch reference, whatever the tokens are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tokenmill.kernels import native
from tokenmill.kernels.penalties import apply_penalties, apply_penalties_reference


def case(seed, vocab_size, *, num_rows=5, width=200):
    rng = np.random.default_rng(seed)
    num_tokens = rng.integers(0, width + 1, num_rows)
    num_tokens[0] = width
    return {
        "logits_rows": rng.permutation(num_rows + 3)[:num_rows],
        "token_ids": torch.from_numpy(
            rng.integers(0, min(vocab_size, 50), (num_rows, width)).astype(np.int32)
        ),
        "table_rows": rng.permutation(num_rows),
        "num_prompt_tokens": (num_tokens * rng.random(num_rows)).astype(np.int64),
        "num_tokens": num_tokens,
        "repetition": rng.choice([1.0, 0.5, 1.3, 2.0], num_rows).astype(np.float32),
        "frequency": rng.choice([0.0, -2.0, 0.3], num_rows).astype(np.float32),
        "presence": rng.choice([0.0, 1.7, -0.4], num_rows).astype(np.float32),
    }


@pytest.mark.parametrize("vocab_size", [1, 17, 4096, 49_153])
@pytest.mark.parametrize("seed", range(3))
def test_the_bits_of_the_reference(seed, vocab_size):
    columns = case(seed, vocab_size)
    logits = 5 * torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(seed))
    logits[::3, ::2] = -torch.inf
    logits[1] = 0.0
    found, want = logits.clone(), logits.clone()
    apply_penalties(found, **columns)
    apply_penalties_reference(want, **columns)
    assert torch.equal(found, want)
    untouched = sorted(set(range(8)) - set(columns["logits_rows"].tolist()))
    assert torch.equal(found[untouched], logits[untouched])


def test_bits_do_not_depend_on_threads_and_company():
    columns = case(7, 997, num_rows=12)
    logits = torch.randn(15, 997)
    whole = logits.clone()
    apply_penalties(whole, **columns)
    module, before = native.module(), native.module().num_threads()
    try:
        for num_threads in (1, 3):
            module.set_num_threads(num_threads)
            found = logits.clone()
            for i in range(12):
                part = {
                    name: value if name == "token_ids" else value[i : i + 1]
                    for name, value in columns.items()
                }
                apply_penalties(found, **part)
            assert torch.equal(found, whole)
    finally:
        module.set_num_threads(before)


def test_rows_and_tokens_that_are_not_there_are_refused():
    columns = case(0, 60)
    for name, index, value in (
        ("logits_rows", 1, 8),
        ("table_rows", 1, 5),
        ("num_tokens", 1, 201),
        ("num_prompt_tokens", 0, 201),
    ):
        wrong = {**columns, name: columns[name].copy()}
        wrong[name][index] = value
        with pytest.raises(ValueError, match=r"rows|num_tokens"):
            apply_penalties(torch.randn(8, 60), **wrong)
    with pytest.raises(ValueError, match="columns of logits"):
        apply_penalties(torch.randn(8, 20), **columns)
