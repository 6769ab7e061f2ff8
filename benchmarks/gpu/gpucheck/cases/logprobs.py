"""Log-probabilities of a large vocabulary, and penalties on tokens that were there before."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpucheck.cases.case import SAME, SUMMED, Case, Place, Result


def cases(place: Place) -> Iterator[Case]:
    vocab_size = 700 if place.small else 128_256
    for num_rows in place.pick([1, 64, 256], [3]):
        yield _row_logprobs(place, num_rows, vocab_size)
        yield _log_normalizer(place, num_rows, vocab_size)
    for num_rows in place.pick([1, 256], [3]):
        yield _count_row_tokens(place, num_rows, vocab_size)
        yield _count_tokens(place, num_rows, vocab_size)
        yield _apply_penalties(place, num_rows, vocab_size)


def _row_logprobs(place: Place, num_rows: int, vocab_size: int) -> Case:
    from tokenmill.kernels.gpu.logprobs import row_logprobs

    logits = _logits(place, num_rows, vocab_size)
    ids = place.integers(vocab_size, num_rows, dtype=torch.int64)
    normalizer = place.poisoned(num_rows, 2, dtype=torch.float32)
    logprob = place.poisoned(num_rows, dtype=torch.float32)
    rank = place.poisoned(num_rows, dtype=torch.int32)

    def results() -> Iterator[Result]:
        exact = logits[0].double()
        chosen = exact.gather(1, ids[:, None])
        yield normalizer, _normalizer(exact), SUMMED
        yield logprob, (chosen - exact.logsumexp(-1, keepdim=True)).squeeze(1), SUMMED
        # Of many, some are as probable as the chosen one after rounding alone.
        yield rank, (exact >= chosen).sum(-1), SUMMED

    return Case(
        "row_logprobs",
        f"{num_rows} x {vocab_size}",
        lambda i: row_logprobs(logits[i % len(logits)], ids, normalizer, logprob, rank),
        results,
        num_bytes=num_rows * vocab_size * 4,
        other=lambda i: torch.log_softmax(logits[i % len(logits)], -1),
    )


def _log_normalizer(place: Place, num_rows: int, vocab_size: int) -> Case:
    from tokenmill.kernels.gpu.logprobs import log_normalizer

    logits = _logits(place, num_rows, vocab_size)
    out = place.poisoned(num_rows, 2, dtype=torch.float32)
    return Case(
        "log_normalizer",
        f"{num_rows} x {vocab_size}",
        lambda i: log_normalizer(logits[i % len(logits)], out),
        lambda: [(out, _normalizer(logits[0].double()), SUMMED)],
        num_bytes=num_rows * vocab_size * 4,
        other=lambda i: torch.logsumexp(logits[i % len(logits)], -1),
    )


def _logits(place: Place, num_rows: int, vocab_size: int) -> list[torch.Tensor]:
    return [
        place.randn(num_rows, vocab_size, dtype=torch.float32, scale=3.0)
        for _ in place.sets(num_rows * vocab_size * 4)
    ]


def _normalizer(exact: torch.Tensor) -> torch.Tensor:
    best = exact.amax(-1)
    return torch.stack((best, exact.logsumexp(-1) - best), dim=-1)


def _count_row_tokens(place: Place, num_rows: int, vocab_size: int) -> Case:
    """Of all rows of a state but one, in another order; the last entry is padding."""
    from tokenmill.kernels.gpu.penalties import PenaltyState, count_row_tokens

    length = 1_500 if place.small else 8_192
    token_ids = place.integers(vocab_size, num_rows + 1, length)
    rows = torch.randperm(num_rows + 1, device=place.device)
    rows[-1] = -1
    num_tokens = place.integers(length, num_rows + 1) + 1
    num_prompt = (num_tokens * 0.7).int()
    state = PenaltyState.allocate(num_rows + 1, vocab_size, place.device)
    state.prompt_bits.fill_(-7)
    state.output_counts.fill_(-7)

    def results() -> Iterator[Result]:
        has = torch.zeros(num_rows, vocab_size, dtype=torch.bool, device=place.device)
        counts = torch.full_like(state.output_counts, -7)
        for i, row in enumerate(rows[:-1].tolist()):
            ids = token_ids[row, : num_tokens[i]].long()
            has[i, ids[: num_prompt[i]]] = True
            counts[row] = torch.bincount(ids[num_prompt[i] :], minlength=vocab_size)
        yield state.output_counts, counts, SAME
        yield _unpacked(state.prompt_bits[rows[:-1]], vocab_size), has, SAME

    return Case(
        "count_row_tokens",
        f"{num_rows} x {vocab_size}, up to {length} tokens",
        lambda i: count_row_tokens(token_ids, rows, num_prompt, num_tokens, *state),
        results,
        num_bytes=num_rows * vocab_size * (4 + 1 / 8) + 4 * int(num_tokens[:-1].sum()),
    )


def _count_tokens(place: Place, num_rows: int, vocab_size: int) -> Case:
    """Four tokens of a row, among them equal ones; the last entry is padding."""
    from tokenmill.kernels.gpu.penalties import count_tokens

    rows = torch.arange(num_rows, device=place.device).repeat_interleave(4)
    ids = place.integers(vocab_size, num_rows, 4, dtype=torch.int64)
    ids[:, 1] = ids[:, 0]
    ids = ids.flatten()
    rows[-1] = -1
    counts = place.integers(3, num_rows, vocab_size)
    places = rows[:-1] * vocab_size + ids[:-1]
    added = torch.bincount(places, minlength=counts.numel()).view_as(counts)
    expected = counts + added
    return Case(
        "count_tokens",
        f"{len(rows)} in {num_rows} x {vocab_size}",
        lambda i: count_tokens(rows, ids, counts),
        lambda: [(counts, expected, SAME)],
    )


def _apply_penalties(place: Place, num_rows: int, vocab_size: int) -> Case:
    """The last row is padding, and stays."""
    from tokenmill.kernels.gpu.penalties import apply_penalties

    logits = place.randn(num_rows, vocab_size, dtype=torch.float32, scale=3.0)
    rows = torch.randperm(num_rows, device=place.device)
    if num_rows > 1:
        rows[-1] = -1
    bits = place.integers(1 << 31, num_rows, -(-vocab_size // 32))
    counts = (place.integers(20, num_rows, vocab_size) - 16).clamp(min=0)
    penalties = [
        place.randn(num_rows, dtype=torch.float32).abs() + least for least in (1.0, 0.0, 0.0)
    ]
    before = logits.double()

    def results() -> list[Result]:
        repetition, frequency, presence = (p.double()[:, None] for p in penalties)
        own = counts[rows]
        is_known = _unpacked(bits[rows], vocab_size) | (own > 0)
        factor = torch.where(before > 0, 1 / repetition, repetition)
        after = before * torch.where(is_known, factor, 1.0)
        after -= own * frequency + (own > 0) * presence
        return [(logits, torch.where((rows >= 0)[:, None], after, before), SUMMED)]

    return Case(
        "apply_penalties",
        f"{num_rows} x {vocab_size}",
        lambda i: apply_penalties(logits, rows, *penalties, bits, counts),
        results,
        num_bytes=num_rows * vocab_size * (4 + 4 + 4 + 1 / 8),
    )


def _unpacked(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Whether each token's bit is set."""
    bits = words[:, :, None] >> torch.arange(32, device=words.device) & 1
    return bits.flatten(1)[:, :vocab_size].bool()
