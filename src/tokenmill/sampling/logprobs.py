"""Log-probabilities of tokens, from logits: how they are found, and of which distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.contracts.request import TokenLogprobs
from tokenmill.kernels import fused, native
from tokenmill.sampling.metadata import IntArray


@dataclass(frozen=True, slots=True)
class LogprobsMode:
    """Which numbers callers get, by the name that the setting `logprobs_mode` has."""

    is_processed: bool = False
    """Of what tokens are drawn from: behind edits, temperature and filters. Else (raw) of the
    model's own distribution, behind the grammar's mask only."""
    are_logits: bool = False
    """Logits as they are, not log-probabilities."""

    @classmethod
    def named(cls, name: str) -> LogprobsMode:
        """One of `LOGPROBS_MODES` of `config/engine_config.py`."""
        source, kind = name.split("_")
        return cls(source == "processed", kind == "logits")


class TokenScorer(Protocol):
    """Log-probabilities of tokens, from the logits of their rows; a row's bits depend on that row
    only.
    """

    def score(
        self, logits: torch.Tensor, chosen: IntArray, num_best: IntArray
    ) -> tuple[list[TokenLogprobs], list[bool]]:
        """What a caller gets of each row of float32 logits [n, vocab_size], and whether its best
        logit is finite.

        The token `chosen[i]` comes first, then the `num_best[i]` best ones in falling order, those
        with equal logits by their ids. Its rank counts the logits that are at least as large.
        """
        ...


class TorchScorer:
    """The plain way: what the native one is compared with."""

    def score(
        self, logits: torch.Tensor, chosen: IntArray, num_best: IntArray
    ) -> tuple[list[TokenLogprobs], list[bool]]:
        logprobs = logits.log_softmax(-1).numpy()
        rows = zip(logits, logprobs, chosen.tolist(), num_best.tolist(), strict=True)
        return [_score(*row) for row in rows], logits.amax(-1).isfinite().tolist()


class NativeScorer:
    """One native call, which writes no distribution and sorts no vocabulary."""

    def score(
        self, logits: torch.Tensor, chosen: IntArray, num_best: IntArray
    ) -> tuple[list[TokenLogprobs], list[bool]]:
        scores = fused.score_tokens(logits, chosen, num_best)
        rows = zip(
            scores.token_ids.tolist(), scores.logprobs.tolist(), num_best.tolist(), strict=True
        )
        entries = [
            TokenLogprobs(token_ids[: n + 1], logprobs[: n + 1], rank)
            for (token_ids, logprobs, n), rank in zip(rows, scores.ranks.tolist(), strict=True)
        ]
        return entries, scores.is_finite.tolist()


def token_scorer() -> TokenScorer:
    """The native one where it can be had."""
    return NativeScorer() if native.is_available() else TorchScorer()


def _score(
    logits: torch.Tensor, logprobs: npt.NDArray[np.float32], chosen: int, num_best: int
) -> TokenLogprobs:
    """One row's, from logits and log-probabilities [vocab_size]."""
    values: npt.NDArray[np.float32] = logits.numpy()
    token_ids = [chosen, *_best(logits, values, num_best)]
    return TokenLogprobs(
        token_ids=token_ids,
        logprobs=logprobs[token_ids].tolist(),
        rank=int(np.count_nonzero(values >= values[chosen])),
    )


def _best(logits: torch.Tensor, values: npt.NDArray[np.float32], num_best: int) -> Sequence[int]:
    """Ids of the best tokens; topk alone leaves open which of equal ones it takes."""
    if num_best == 0:
        return ()
    lowest = logits.topk(num_best).values[-1].item()
    candidates = np.flatnonzero(values >= lowest)
    order = np.argsort(-values[candidates], kind="stable")[:num_best]
    best: list[int] = candidates[order].tolist()
    return best
