"""Edits of single logits touch what they name, and nothing else."""

from __future__ import annotations

import pytest
import torch

from tokenmill.kernels.gpu import bitmask

INF = float("inf")


def logits_apart(num_rows: int, vocab_size: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(wide, its middle): what lies around the logits must stay as it is."""
    wide = torch.randn(num_rows + 1, vocab_size + 24, device=device)
    return wide, wide[1:, 8:-16]


def random_bits(num_masks: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(bool [num_masks, vocab_size], int32 words); bits behind the vocabulary are set."""
    num_words = -(-vocab_size // 32)
    is_allowed = torch.rand(num_masks, num_words * 32) < 0.5
    is_allowed[:, vocab_size:] = True
    bits = is_allowed.view(num_masks, num_words, 32).long() << torch.arange(32)
    words = bits.sum(-1)
    return is_allowed[:, :vocab_size], torch.where(words < 2**31, words, words - 2**32).int()


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 2048, 2500])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bitmask(device: str, vocab_size: int, dtype: torch.dtype) -> None:
    wide, logits = logits_apart(5, vocab_size, device)
    is_allowed, words = random_bits(4, vocab_size)
    rows = torch.tensor([3, -1, 0, 4], dtype=dtype)
    expected = wide.clone()
    for mask, row in enumerate(rows.tolist()):
        for token in range(vocab_size):
            if row >= 0 and not is_allowed[mask, token]:
                expected[1 + row, 8 + token] = -INF
    again = logits.clone()
    bitmask.apply_bitmask(logits, words.to(device), rows.to(device))
    assert torch.equal(wide, expected)
    bitmask.apply_bitmask_reference(again, words.to(device), rows.to(device))
    assert torch.equal(again, logits)


@pytest.mark.parametrize("num_pairs", [0, 1, 127, 300])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pairs(device: str, num_pairs: int, dtype: torch.dtype) -> None:
    wide, logits = logits_apart(7, 90, device)
    place = torch.randperm(7 * 90)[:num_pairs]
    rows, token_ids = (place // 90).to(device, dtype), (place % 90).to(device, dtype)
    rows[2::5] = -1
    bias = torch.randn(num_pairs, device=device)
    expected = wide.clone()
    for row, token, added in zip(rows.tolist(), token_ids.tolist(), bias, strict=True):
        if row >= 0:
            expected[1 + row, 8 + token] += added
    again = logits.clone()
    bitmask.add_bias(logits, rows, token_ids, bias)
    assert torch.equal(wide, expected)
    bitmask.add_bias_reference(again, rows, token_ids, bias)
    assert torch.equal(again, logits)

    for row, token in zip(rows.tolist(), token_ids.tolist(), strict=True):
        if row >= 0:
            expected[1 + row, 8 + token] = -INF
    bitmask.ban_tokens(logits, rows.repeat(2), token_ids.repeat(2))
    assert torch.equal(wide, expected)
    bitmask.ban_tokens_reference(again, rows, token_ids)
    assert torch.equal(again, logits)


def test_the_ops_edit_as_the_functions_do(device: str) -> None:
    logits = torch.randn(3, 40, device=device)
    edited, by_ops = logits.clone(), logits.clone()
    _, words = random_bits(2, 40)
    words, rows = words.to(device), torch.tensor([2, 0], device=device)
    token_ids, bias = torch.tensor([5, 6], device=device), torch.tensor([0.5, -0.25], device=device)
    bitmask.apply_bitmask(edited, words, rows)
    bitmask.ban_tokens(edited, rows, token_ids)
    bitmask.add_bias(edited, rows, token_ids + 1, bias)
    torch.ops.tokenmill.apply_bitmask(by_ops, words, rows)
    torch.ops.tokenmill.ban_tokens(by_ops, rows, token_ids)
    torch.ops.tokenmill.add_bias(by_ops, rows, token_ids + 1, bias)
    torch.testing.assert_close(by_ops, edited, rtol=0, atol=0)
    assert not torch.equal(edited, logits)
