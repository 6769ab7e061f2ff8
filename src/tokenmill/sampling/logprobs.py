"""Raw log-probabilities: of the model's own distribution, before temperature and filters."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.contracts.request import TokenLogprobs


def raw_logprobs(logits: torch.Tensor) -> torch.Tensor:
    """Float32 logits [n, vocab_size] to log-probabilities; a row's bits depend on that row only."""
    return logits.log_softmax(-1)


def token_logprobs(logprobs: torch.Tensor, chosen: int, num_best: int) -> TokenLogprobs:
    """What a caller gets of one position.

    `logprobs` is float32 [vocab_size]. The chosen token comes first, then the `num_best` best ones
    in falling order, those with equal values by their ids.
    """
    values: npt.NDArray[np.float32] = logprobs.numpy()
    best = _best(logprobs, values, num_best)
    return TokenLogprobs(
        token_ids=[chosen, *best.tolist()],
        logprobs=[float(values[chosen]), *values[best].tolist()],
        rank=int(np.count_nonzero(values >= values[chosen])),
    )


def _best(
    logprobs: torch.Tensor, values: npt.NDArray[np.float32], num_best: int
) -> npt.NDArray[np.int64]:
    """Ids of the best tokens; topk alone leaves open which of equal ones it takes."""
    if num_best == 0:
        return np.empty(0, np.int64)
    lowest = logprobs.topk(num_best).values[-1].item()
    candidates = np.flatnonzero(values >= lowest)
    return candidates[np.argsort(-values[candidates], kind="stable")[:num_best]]
