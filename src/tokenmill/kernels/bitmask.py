"""Bans by a bitmask on the host. The GPU's kernel is in `gpu/bitmask.py`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.kernels import native


def apply_bitmask(
    logits: torch.Tensor, bitmask: npt.NDArray[np.int32], logits_rows: npt.NDArray[np.int64]
) -> None:
    """Set the logits of tokens that are not allowed to -inf.

    logits is float32 [N, vocab_size]; bitmask is [M, ceil(vocab_size / 32)], bit t % 32 of word
    t // 32 of row i allows token t in row logits_rows[i], [M]. A logits row stands there at most
    once.
    """
    if len(logits_rows) == 0:
        return
    if native.is_available() and logits.stride(1) == 1:
        native.module().apply_bitmask(logits, logits_rows, np.ascontiguousarray(bitmask))
    else:
        apply_bitmask_reference(logits, bitmask, logits_rows)


def apply_bitmask_reference(
    logits: torch.Tensor, bitmask: npt.NDArray[np.int32], logits_rows: npt.NDArray[np.int64]
) -> None:
    """`apply_bitmask` in torch."""
    words = np.ascontiguousarray(bitmask, dtype="<i4")
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    banned = torch.from_numpy(bits[:, : logits.shape[1]] == 0)
    rows = torch.from_numpy(logits_rows)
    logits[rows] = logits[rows].masked_fill_(banned, -torch.inf)
