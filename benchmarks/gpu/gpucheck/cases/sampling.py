"""Tokens drawn from the logits of a large vocabulary, and edits of logits before that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpucheck.cases import logprobs
from gpucheck.cases.case import SAME, Case, Place, Result

MANNERS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 1.0},
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 0.8, "top_k": 50},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
    "all filters": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
}


def cases(place: Place) -> Iterator[Case]:
    vocab_size = 700 if place.small else 128_256
    for manner in place.pick(list(MANNERS), ["greedy", "all filters"]):
        for num_rows in place.pick([1, 64, 256], [2]):
            yield _sample(place, manner, num_rows, vocab_size)
    for num_rows in place.pick([1, 256], [3]):
        yield _apply_bitmask(place, num_rows, vocab_size)
        yield from _edits(place, num_rows, vocab_size)
    yield from logprobs.cases(place)


def _sample(place: Place, manner: str, num_rows: int, vocab_size: int) -> Case:
    from tokenmill.kernels.gpu.sampling import SamplingWorkspace, sample
    from tokenmill.kernels.gpu.sampling_reference import sample_reference

    asked = MANNERS[manner]
    scale = 3.0  # as peaked as a model's
    logits = [
        place.randn(num_rows, vocab_size, dtype=torch.float32, scale=scale)
        for _ in place.sets(num_rows * vocab_size * 4)
    ]

    def column(value: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=place.device)

    columns = {
        "is_greedy": column(manner == "greedy", torch.bool),
        "temperature": column(asked["temperature"], torch.float32),
        "min_p": column(asked.get("min_p", 0.0), torch.float32),
        "top_k": column(int(asked.get("top_k", 0)), torch.int64),
        "top_p": column(asked.get("top_p", 1.0), torch.float64),
        "seed": place.integers(1 << 40, num_rows, dtype=torch.int64),
        "position": place.integers(8_192, num_rows, dtype=torch.int64),
    }
    found = {
        "token_ids": place.poisoned(num_rows, dtype=torch.int64),
        "is_valid": column(False, torch.bool),
    }
    workspace = SamplingWorkspace.allocate(num_rows, vocab_size, place.device)

    def launch(i: int) -> None:
        sample(
            logits[i % len(logits)],
            **columns,
            **found,
            workspace=workspace,
            any_random=manner != "greedy",
            any_filter=len(asked) > 1,
        )

    def results() -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
        expected = {name: torch.empty_like(tensor) for name, tensor in found.items()}
        sample_reference(logits[0], **columns, **expected)
        for name, tensor in found.items():
            yield tensor, expected[name], SAME

    return Case(
        "sample",
        f"{manner}, {num_rows} x {vocab_size}",
        launch,
        results,
        num_bytes=num_rows * vocab_size * 4,
    )


def _apply_bitmask(place: Place, num_rows: int, vocab_size: int) -> Case:
    """Of all rows but the last, in another order."""
    from tokenmill.kernels.gpu.bitmask import apply_bitmask

    logits = place.randn(num_rows, vocab_size, dtype=torch.float32)
    rows = torch.randperm(num_rows, device=place.device)[: max(num_rows - 1, 1)]
    words = place.integers(1 << 31, len(rows), -(-vocab_size // 32))
    before = logits.clone()

    def results() -> Iterator[Result]:
        bits = words[:, :, None] >> torch.arange(32, device=place.device) & 1
        allowed = bits.flatten(1)[:, :vocab_size].bool()
        before[rows] = before[rows].masked_fill(~allowed, -torch.inf)
        yield logits, before, SAME

    return Case(
        "apply_bitmask",
        f"{len(rows)} x {vocab_size}",
        lambda i: apply_bitmask(logits, words, rows),
        results,
        num_bytes=len(rows) * vocab_size * (4 + 1 / 8),
    )


def _edits(place: Place, num_rows: int, vocab_size: int) -> Iterator[Case]:
    """Bans and biases of some tokens of every row; the last entry is padding."""
    from tokenmill.kernels.gpu.bitmask import add_bias, ban_tokens

    each = 20
    rows = torch.arange(num_rows, device=place.device).repeat_interleave(each)
    ids = torch.cat(
        [torch.randperm(vocab_size, device=place.device)[:each] for _ in range(num_rows)]
    )
    rows[-1] = -1
    bias = place.randn(len(rows), dtype=torch.float32)

    def case(op: str, launch: Callable[[torch.Tensor], None], edit: torch.Tensor) -> Case:
        logits = place.randn(num_rows, vocab_size, dtype=torch.float32)
        expected = logits.clone()
        expected[rows[:-1], ids[:-1]] += edit[:-1]
        return Case(
            op,
            f"{len(rows)} in {num_rows} x {vocab_size}",
            lambda i: launch(logits),
            lambda: [(logits, expected, SAME)],
        )

    banned = torch.full_like(bias, -torch.inf)
    yield case("ban_tokens", lambda logits: ban_tokens(logits, rows, ids), banned)
    yield case("add_bias", lambda logits: add_bias(logits, rows, ids, bias), bias)
