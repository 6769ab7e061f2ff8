"""Sampling in plain torch, row by row: what the kernels of `sampling.py` are compared with."""

from __future__ import annotations

from typing import Any

import torch

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def sample_reference(
    logits: torch.Tensor,
    *,
    is_greedy: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    token_ids: torch.Tensor,
    is_valid: torch.Tensor,
    **_: Any,
) -> None:
    """`sample` in torch; needs no workspace, and finds out itself what the rows ask for."""
    for row, row_logits in enumerate(logits):
        best = row_logits.max()
        is_valid[row] = best.isfinite()
        token_ids[row] = row_logits.argmax()
        if is_greedy[row] or not best.isfinite():
            ties = (row_logits == best).nonzero()
            token_ids[row] = ties[0, 0] if len(ties) else 0
            continue
        scaled = (row_logits - best) / temperature[row]
        keep_candidates(scaled, min_p[row], int(top_k[row]), float(top_p[row]))
        noisy = scaled + _gumbel_noise(seed[row], position[row], len(scaled))
        token_ids[row] = (noisy == noisy.max()).nonzero()[0, 0]


def keep_candidates(scaled: torch.Tensor, min_p: torch.Tensor, top_k: int, top_p: float) -> None:
    """Set what the filters drop of float32 logits [vocab_size], with maximum 0, to -inf."""
    scaled[scaled < min_p.double().log().float()] = -torch.inf
    if 0 < top_k < len(scaled):
        scaled[scaled < scaled.sort(descending=True).values[top_k - 1]] = -torch.inf
    if top_p < 1:
        order = scaled.argsort(descending=True, stable=True)
        mass = scaled[order].double().exp()
        mass_before = mass.cumsum(0) - mass
        is_dropped = mass_before >= top_p * mass.sum()
        is_dropped[0] = False
        scaled[order[is_dropped]] = -torch.inf


def _gumbel_noise(seed: torch.Tensor, position: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Float32 noise of every token id, [vocab_size]; int64 arithmetic wraps as uint64 does."""
    ids = torch.arange(vocab_size, device=seed.device)
    key = _mix64(_mix64(seed.long() + _GOLDEN) + (position.long() + 1) * _GOLDEN)
    bits = _shift(_mix64((ids + 1) * _GOLDEN + key), 12)
    return -(-((bits.double() + 0.5) * 2.0**-52).log()).log().float()


def _mix64(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return z ^ _shift(z, 31)


def _shift(z: torch.Tensor, count: int) -> torch.Tensor:
    """To the right; zeros come in."""
    return (z >> count) & ((1 << (64 - count)) - 1)
