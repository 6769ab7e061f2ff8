"""Log-probabilities and ranks against float64."""

from __future__ import annotations

import pytest
import torch

from tokenmill.kernels.gpu import logprobs

INF = float("inf")
NAN = float("nan")


def rows_of(n: int, vocab_size: int, device: str) -> torch.Tensor:
    """Rows of several scales, some with equal and with banned logits, longer than they seem."""
    wide = torch.full((n, vocab_size + 16), NAN, device=device)
    logits = wide[:, 4 : 4 + vocab_size]
    scale = torch.tensor([1.0, 5.0, 0.01, 20.0], device=device).repeat(n)[:n, None]
    logits.copy_(torch.randn(n, vocab_size, device=device) * scale + 7)
    logits[1::4] = logits[1::4].round()
    logits[3::4, ::3] = -INF
    return logits


def poisoned(n: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.full((n, 2), NAN, device=device),
        torch.full((n,), NAN, device=device),
        torch.full((n,), -5, dtype=torch.int32, device=device),
    )


@pytest.mark.parametrize("vocab_size", [1, 2, 100, 4096, 9000])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_against_float64(device: str, vocab_size: int, dtype: torch.dtype) -> None:
    logits = rows_of(6, vocab_size, device)
    logits[:, 0] = 8.0
    token_ids = torch.randint(0, vocab_size, (6,), device=device, dtype=dtype)
    token_ids[0] = logits[0].argmax()
    token_ids[1] = 0
    token_ids[3] = 3 % vocab_size  # a banned one
    normalizer, chosen, rank = poisoned(6, device)
    logprobs.row_logprobs(logits, token_ids, normalizer, chosen, rank)

    exact = logits.double().log_softmax(-1)
    expected = exact.gather(1, token_ids.long()[:, None]).squeeze(1)
    torch.testing.assert_close(chosen.double(), expected, rtol=1e-6, atol=2e-6)
    assert (chosen <= 1e-6).all()
    assert torch.equal(normalizer[:, 0], logits.amax(-1))
    torch.testing.assert_close(
        normalizer.double().sum(1), logits.double().logsumexp(-1), rtol=1e-6, atol=2e-6
    )
    # Where float32 makes two probabilities equal, either rank is right.
    slack = 4e-6 * (1 + expected.abs().clamp(max=100))[:, None]
    least = (exact >= expected[:, None] + slack).sum(-1)
    most = (exact >= expected[:, None] - slack).sum(-1)
    assert ((rank >= least) & (rank <= most) & (rank >= 1)).all()
    assert rank[0] == 1
    assert rank[1] == (logits[1] >= logits[1, 0]).sum()

    again = torch.full_like(normalizer, NAN)
    logprobs.log_normalizer(logits, again)
    assert torch.equal(again, normalizer)


def test_against_the_reference(device: str) -> None:
    logits = rows_of(5, 700, device)
    token_ids = torch.randint(0, 700, (5,), device=device)
    found, expected = poisoned(5, device), poisoned(5, device)
    logprobs.row_logprobs(logits, token_ids, *found)
    logprobs.row_logprobs_reference(logits, token_ids, *expected)
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-6, atol=2e-6)
    by_op = poisoned(5, device)
    torch.ops.tokenmill.row_logprobs(logits, token_ids, *by_op)
    torch.testing.assert_close(by_op[:2], found[:2], rtol=1e-6, atol=2e-6)
    normalizer = torch.full((5, 2), NAN, device=device)
    torch.ops.tokenmill.log_normalizer(logits, normalizer)
    torch.testing.assert_close(normalizer, found[0], rtol=1e-6, atol=2e-6)


def test_rows_that_are_not_finite_say_so(device: str) -> None:
    logits = torch.zeros(6, 5000, device=device)
    logits[0] = -INF
    logits[1, 4999] = INF
    logits[2, 17] = NAN
    logits[3, :4998] = -INF
    logits[4, 0] = -INF
    logits[5] = torch.where(torch.arange(5000, device=device) % 2 == 0, INF, NAN)
    normalizer, chosen, rank = poisoned(6, device)
    token_ids = torch.full((6,), 4999, device=device)
    logprobs.row_logprobs(logits, token_ids, normalizer, chosen, rank)
    assert normalizer[:, 0].isfinite().tolist() == [False, False, False, True, True, False]
    torch.testing.assert_close(
        chosen[3:5].double(), -torch.tensor([2.0, 4999.0], device=device).double().log()
    )
    assert rank[3:5].tolist() == [2, 4999]


def test_a_row_does_not_depend_on_the_others(device: str) -> None:
    logits = rows_of(5, 4500, device)
    token_ids = torch.randint(0, 4500, (5,), device=device)
    whole = poisoned(5, device)
    logprobs.row_logprobs(logits, token_ids, *whole)
    for row in range(5):
        alone = poisoned(1, device)
        logprobs.row_logprobs(logits[row : row + 1], token_ids[row : row + 1], *alone)
        for part, all_rows in zip(alone, whole, strict=True):
            assert torch.equal(part, all_rows[row : row + 1])


def test_no_rows(device: str) -> None:
    logits = torch.empty(0, 9, device=device)
    logprobs.row_logprobs(logits, torch.empty(0, dtype=torch.int64), *poisoned(0, device))
    logprobs.log_normalizer(logits, torch.empty(0, 2, device=device))
