"""From hidden states to results: dimensions and norm of embeddings, head and activation of scores.

Every request is computed by itself, so that its bits do not depend on the others of its step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from tokenmill.config.engine_config import PoolingConfig
from tokenmill.contracts.request import PoolingRequest, TensorData
from tokenmill.models.pooling import classify
from tokenmill.worker.pooling.states import STATES, EveryToken, PoolState


class Pooler:
    """One model's way to pool."""

    def __init__(self, config: PoolingConfig, model: object) -> None:
        """`model` has the head, if results are scores."""
        self._config = config
        self._model = model

    def start(self, request: PoolingRequest) -> PoolState:
        """The state of a request none of whose tokens is computed."""
        if request.task.startswith("token_"):
            return EveryToken()
        return STATES[self._config.pooling_type]()

    def finish(self, request: PoolingRequest, state: PoolState) -> torch.Tensor:
        """The result, float32 [size] or [num_prompt_tokens, size]."""
        hidden = state.result()
        rows = hidden if hidden.ndim == 2 else hidden[None]
        cut = self._config.embeds
        rows = rows[:, : request.dimensions] if cut else classify(self._model, rows)
        if request.use_activation:
            rows = _ACTIVATIONS[self._config.activation](rows)
        return rows if hidden.ndim == 2 else rows[0]


def to_host(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results where the front end reads them: of a GPU in one copy, so it is awaited once."""
    if not results:
        return []
    sizes = [result.numel() for result in results]
    parts = torch.split(torch.cat([result.flatten() for result in results]).cpu(), sizes)
    return [part.view(result.shape) for part, result in zip(parts, results, strict=True)]


def as_data(result: torch.Tensor) -> TensorData:
    """A result on its way to the front end."""
    return TensorData("float32", tuple(result.shape), result.contiguous().numpy().tobytes())


def _normalize(rows: torch.Tensor) -> torch.Tensor:
    return functional.normalize(rows, dim=-1, eps=1e-12)


def _identity(rows: torch.Tensor) -> torch.Tensor:
    return rows


def _softmax(rows: torch.Tensor) -> torch.Tensor:
    return torch.softmax(rows, dim=-1)


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normalize": _normalize,
    "identity": _identity,
    "sigmoid": torch.sigmoid,
    "softmax": _softmax,
}
