"""Penalties against their definition, token by token, and the counts that they rest on."""

from __future__ import annotations

import pytest
import torch

from tokenmill.kernels.gpu import penalties
from tokenmill.kernels.gpu.penalties import PenaltyState

MAX_ROWS = 5


def poisoned_state(vocab_size: int, device: str) -> PenaltyState:
    state = PenaltyState.allocate(MAX_ROWS, vocab_size, device)
    for tensor in state:
        tensor.fill_(-77)
    return state


def bit_of(state: PenaltyState, row: int, token: int) -> bool:
    return bool(int(state.prompt_bits[row, token // 32]) >> (token % 32) & 1)


@pytest.mark.parametrize(("vocab_size", "max_len"), [(1, 3), (33, 40), (1100, 2500)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_counts_of_rows(device: str, vocab_size: int, max_len: int, dtype: torch.dtype) -> None:
    wide = torch.full((MAX_ROWS, max_len + 7), 2**30, dtype=torch.int32, device=device)
    token_ids = wide[:, 3 : 3 + max_len]
    token_ids.copy_(torch.randint(0, vocab_size, (MAX_ROWS, max_len)))
    token_ids[2, : max_len // 2] = vocab_size - 1  # one token many times
    rows = torch.tensor([4, -1, 2, 0], dtype=dtype, device=device)
    num_prompt = torch.tensor([max_len // 3, 1, 1, max_len], dtype=dtype, device=device)
    num_tokens = torch.tensor([max_len, 2, max_len - 1, max_len], dtype=dtype, device=device)
    state = poisoned_state(vocab_size, device)
    again = poisoned_state(vocab_size, device)
    penalties.count_row_tokens(token_ids, rows, num_prompt, num_tokens, *state)

    for entry in (0, 2, 3):
        row, start, end = (int(x[entry]) for x in (rows, num_prompt, num_tokens))
        prompt, output = token_ids[row, :start].tolist(), token_ids[row, start:end].tolist()
        counts = [output.count(token) for token in range(vocab_size)]
        assert state.output_counts[row].tolist() == counts
        found = [token for token in range(vocab_size) if bit_of(state, row, token)]
        assert found == sorted(set(prompt))
    for row in (1, 3):
        assert (state.prompt_bits[row] == -77).all()
        assert (state.output_counts[row] == -77).all()
    penalties.count_row_tokens_reference(token_ids, rows, num_prompt, num_tokens, *again)
    assert torch.equal(again.prompt_bits, state.prompt_bits)
    assert torch.equal(again.output_counts, state.output_counts)


@pytest.mark.parametrize("num_tokens", [0, 1, 128, 300])
def test_new_tokens_are_added(device: str, num_tokens: int) -> None:
    """A row may have gained several tokens, equal ones too."""
    rows = torch.randint(-1, MAX_ROWS, (num_tokens,), device=device)
    token_ids = torch.randint(0, 7, (num_tokens,), device=device)
    counts = torch.randint(0, 100, (MAX_ROWS, 40), dtype=torch.int32, device=device)
    expected, again = counts.clone(), counts.clone()
    for row, token in zip(rows.tolist(), token_ids.tolist(), strict=True):
        if row >= 0:
            expected[row, token] += 1
    penalties.count_tokens(rows, token_ids, counts)
    assert torch.equal(counts, expected)
    penalties.count_tokens_reference(rows, token_ids, again)
    assert torch.equal(again, expected)


@pytest.mark.parametrize("vocab_size", [1, 33, 1500])
def test_penalties_by_definition(device: str, vocab_size: int) -> None:
    token_ids = torch.randint(0, vocab_size, (MAX_ROWS, 60), dtype=torch.int32, device=device)
    rows = torch.tensor([3, -1, 0, 1], device=device)
    state = poisoned_state(vocab_size, device)
    penalties.count_row_tokens(
        token_ids,
        torch.arange(MAX_ROWS, device=device),
        torch.full((MAX_ROWS,), 20, device=device),
        torch.full((MAX_ROWS,), 60, device=device),
        *state,
    )
    repetition = torch.tensor([1.3, 9.0, 0.7, 1.0], device=device)
    frequency = torch.tensor([0.5, 9.0, -0.25, 0.0], device=device)
    presence = torch.tensor([-1.5, 9.0, 0.125, 0.0], device=device)
    wide = torch.randn(4, vocab_size + 20, device=device) * 5
    logits = wide[:, 4 : 4 + vocab_size]
    logits[2, 0] = -torch.inf
    expected, again = wide.double(), wide.clone()[:, 4 : 4 + vocab_size]
    for i, row in enumerate(rows.tolist()):
        if row < 0:
            continue
        known, output = set(token_ids[row].tolist()), token_ids[row, 20:].tolist()
        for token in range(vocab_size):
            value = float(logits[i, token])
            if token in known:
                value = value / float(repetition[i]) if value > 0 else value * float(repetition[i])
            value -= float(frequency[i]) * output.count(token)
            value -= float(presence[i]) * (token in output)
            expected[i, 4 + token] = value
    asked = (rows, repetition, frequency, presence, *state)
    before = wide.clone()
    penalties.apply_penalties(logits, *asked)
    torch.testing.assert_close(wide.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(wide[1], before[1])
    assert torch.equal(wide[3], before[3]), "1, 0 and 0 change no bit"
    penalties.apply_penalties_reference(again, *asked)
    torch.testing.assert_close(again, logits, rtol=1e-6, atol=1e-6)


def test_the_ops_do_what_the_functions_do(device: str) -> None:
    ops = torch.ops.tokenmill
    token_ids = torch.randint(0, 50, (MAX_ROWS, 12), dtype=torch.int32, device=device)
    rows = torch.arange(MAX_ROWS, device=device)
    counted = (token_ids, rows, rows, rows + 7)
    penalty = torch.rand(MAX_ROWS, device=device) + 0.5
    mine, theirs = poisoned_state(50, device), poisoned_state(50, device)
    logits = torch.randn(MAX_ROWS, 50, device=device)
    by_ops = logits.clone()
    penalties.count_row_tokens(*counted, *mine)
    ops.count_row_tokens(*counted, *theirs)
    penalties.count_tokens(rows, rows + 40, mine.output_counts)
    ops.count_tokens(rows, rows + 40, theirs.output_counts)
    assert torch.equal(mine.output_counts, theirs.output_counts)
    assert (mine.output_counts.sum(1) == 8).all()
    penalties.apply_penalties(logits, rows, penalty, penalty, penalty, *mine)
    ops.apply_penalties(by_ops, rows, penalty, penalty, penalty, *theirs)
    torch.testing.assert_close(by_ops, logits, rtol=1e-6, atol=1e-6)


def test_no_rows(device: str) -> None:
    none = torch.empty(0, dtype=torch.int64, device=device)
    state = poisoned_state(9, device)
    penalties.count_row_tokens(state.output_counts, none, none, none, *state)
    penalties.apply_penalties(torch.empty(0, 9, device=device), none, *[none.float()] * 3, *state)
    assert (state.output_counts == -77).all()
