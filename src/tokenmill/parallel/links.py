"""The stages of a pipeline: what one hands to the next.

    stage 0                     stage 1                    tensor_parallel_size=2
    rank 0   layers 0 to 11  -> rank 2   layers 12 to 23   each rank to the one in its place
    rank 1                   -> rank 3

The residual stream is handed over, float32 [num_tokens, hidden_size]. A stage goes on with its next
step while this one is on its way.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from tokenmill.config.parallel import RankPlace


class StageLinks(Protocol):
    """To the stages beside this one."""

    def receive(self, num_tokens: int, hidden_size: int) -> torch.Tensor:
        """What the stage before this one has made of the same step: float32
        [num_tokens, hidden_size]. Waits for it; raises `RuntimeError` if it has gone.
        """
        ...

    def send(self, stream: torch.Tensor) -> None:
        """Give the next stage what this one has made, float32 [num_tokens, hidden_size]."""
        ...


class ProcessGroupLinks:
    """Over the process group that all ranks have joined."""

    def __init__(self, place: RankPlace) -> None:
        self._before = place.rank - place.tp_size
        self._behind = place.rank + place.tp_size
        self._sent: torch.Tensor | None = None
        self._sending: dist.Work | None = None

    def receive(self, num_tokens: int, hidden_size: int) -> torch.Tensor:
        stream = torch.empty(num_tokens, hidden_size, dtype=torch.float32)
        dist.recv(stream, src=self._before)
        return stream

    def send(self, stream: torch.Tensor) -> None:
        if self._sending is not None:
            self._sending.wait()
        self._sent = stream.clone()  # the step's buffers serve the next one meanwhile
        self._sending = dist.isend(self._sent, dst=self._behind)
