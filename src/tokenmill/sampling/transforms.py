"""Filters of random rows: which tokens may be drawn. A new one is a class here and a line in
`choosers.py`; it picks the rows that ask for it, and costs the others nothing.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from tokenmill.sampling.metadata import RandomColumns


class CandidateFilter(Protocol):
    """Drops tokens of random rows, never the best one."""

    def apply(self, logits: torch.Tensor, columns: RandomColumns) -> None:
        """Set dropped tokens to -inf in place.

        `logits` is float32 [n, vocab_size], divided by the temperature, with a maximum of 0 in
        each row.
        """
        ...


class MinP:
    """Keeps tokens of at least `min_p` times the best one's probability."""

    def apply(self, logits: torch.Tensor, columns: RandomColumns) -> None:
        asked = np.flatnonzero(columns.min_p > 0)
        if asked.size == 0:
            return
        # p / p_best is exp(logit), since the best logit is 0.
        lowest = torch.from_numpy(np.log(columns.min_p[asked])).unsqueeze(1)
        rows = torch.from_numpy(asked)
        kept = logits[rows]
        logits[rows] = kept.masked_fill_(kept < lowest, -torch.inf)


class TopK:
    """Keeps the k best tokens and those that tie with the last of them."""

    def apply(self, logits: torch.Tensor, columns: RandomColumns) -> None:
        for row in np.flatnonzero(columns.top_k > 0).tolist():
            kept = logits[row]
            lowest = kept.topk(int(columns.top_k[row])).values[-1]
            kept.masked_fill_(kept < lowest, -torch.inf)


class TopP:
    """Keeps the smallest set of best tokens whose probabilities reach `top_p`.

    A token stays if those before it, in falling order, sum to less than `top_p`; of tokens with
    equal logits the smaller id comes first.
    """

    def apply(self, logits: torch.Tensor, columns: RandomColumns) -> None:
        for row in np.flatnonzero(columns.top_p < 1).tolist():
            kept = _nucleus(logits[row], float(columns.top_p[row]))
            values = logits[row, kept]
            logits[row].fill_(-torch.inf)
            logits[row, kept] = values


def _nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Ids of the tokens that top-p keeps, of one row of logits [vocab_size]."""
    probabilities = logits.double().softmax(-1)
    # Tokens below this share sum to less than 1 - top_p, so all of them are dropped: only the few
    # others are sorted.
    share = min((1 - top_p) / logits.numel(), float(probabilities.max()))
    candidates = (probabilities >= share).nonzero().flatten()
    order = logits[candidates].argsort(descending=True, stable=True)
    mass = probabilities[candidates[order]].cumsum(-1)
    num_kept = 1 + int((mass[:-1] < top_p).sum())
    return candidates[order[:num_kept]]
