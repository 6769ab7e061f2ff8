"""Which tokens a grammar allows at some of the logits rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.kernels.bitmask import apply_bitmask


@dataclass(frozen=True, slots=True)
class GrammarMask:
    """Bits of allowed tokens; by default of no row."""

    logits_rows: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """[n], the logits rows that are restricted"""
    bitmask: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 0), np.int32))
    """[n, ceil(vocab_size / 32)], bit t % 32 of word t // 32 allows token t"""

    def apply(self, logits: torch.Tensor) -> None:
        """Set the logits [num_rows, vocab_size] of tokens that are not allowed to -inf."""
        apply_bitmask(logits, self.bitmask, self.logits_rows)
