"""Tokens drawn from the logits of a large vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gpucheck.cases.case import SAME, Case, Place

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
