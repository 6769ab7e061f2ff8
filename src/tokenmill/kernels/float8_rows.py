"""Activations in float8, each row on its own scale: what products with float8 weights read."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Float8Rows:
    """Rows [M, K]; value = code * scale of its row."""

    codes: torch.Tensor
    """float8_e4m3fn [M, K]."""
    scales: torch.Tensor
    """float32 [M]."""

    def __len__(self) -> int:
        return len(self.codes)

    @classmethod
    def empty(cls, num_rows: int, num_columns: int, device: torch.device) -> Float8Rows:
        """A place for so many rows."""
        return cls(
            torch.empty(num_rows, num_columns, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(num_rows, dtype=torch.float32, device=device),
        )
