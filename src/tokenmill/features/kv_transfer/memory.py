"""Blocks of a GPU's pool in the host's memory, of which there is more."""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch


class MemoryStore:
    """Keeps the blocks that were used last. Called from any thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._blocks: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def has(self, key: bytes) -> bool:
        """Whether the block is kept."""
        return key in self._blocks

    def read(self, key: bytes, num_bytes: int) -> torch.Tensor | None:
        """uint8 [num_bytes], not to be written to; None if it is not kept."""
        with self._lock:
            data = self._blocks.get(key)
            if data is None or data.numel() != num_bytes:
                return None
            self._blocks.move_to_end(key)
            return data

    def write(self, key: bytes, data: torch.Tensor) -> None:
        """Keep a copy of a block, uint8 [num_bytes], in place of those used least lately."""
        if data.numel() > self._max_bytes:
            return
        with self._lock:
            if key in self._blocks:
                return
            self._blocks[key] = data.clone()
            self._num_bytes += data.numel()
            while self._num_bytes > self._max_bytes:
                _, oldest = self._blocks.popitem(last=False)
                self._num_bytes -= oldest.numel()
