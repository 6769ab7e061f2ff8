"""What a GPU's tokens are drawn from, for engines whose log-probabilities are the processed ones.

The kernels that draw write no such distribution, so it is made here a second time, by torch.
"""

from __future__ import annotations

import torch


def filtered(
    logits: torch.Tensor, chosen: torch.Tensor, columns: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Logits / temperature, and -inf where a filter drops a token, of float32 logits
    [n, vocab_size].

    Rows that are greedy, or have no finite best logit, stay as they are. `columns` are those of
    `sampling/metadata.py`, [n]. The chosen ids, [n], are kept: where sums meet top-p within their
    rounding, the kernels may take one token more than this does.
    """
    best = logits.amax(1, keepdim=True)
    drawn = best.isfinite() & ~columns["is_greedy"].unsqueeze(1)
    temperature = torch.where(drawn, columns["temperature"].unsqueeze(1), 1.0)
    scaled = (logits - best) / temperature
    ordered, order = scaled.sort(dim=1, descending=True, stable=True)

    top_k = columns["top_k"].unsqueeze(1).long()
    last = (top_k - 1).clamp(0, logits.shape[1] - 1)
    lowest = torch.where(top_k > 0, ordered.gather(1, last), -torch.inf)
    min_p = columns["min_p"].unsqueeze(1)
    lowest = torch.maximum(lowest, min_p.double().log().float())
    stays = ordered >= lowest

    weights = torch.where(stays, ordered.double().exp(), 0.0)
    mass = weights.cumsum(1)
    asked = columns["top_p"].unsqueeze(1).double()
    stays &= (mass - weights < asked * mass[:, -1:]) | (asked >= 1)
    kept = torch.zeros_like(stays).scatter_(1, order, stays)
    kept.scatter_(1, chosen.long().unsqueeze(1), True)
    return torch.where(drawn, torch.where(kept, logits / temperature, -torch.inf), logits)
