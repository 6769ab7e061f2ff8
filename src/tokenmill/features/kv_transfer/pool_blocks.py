"""Blocks of the KV pool as bytes: all that the layers of a group keep of a block's tokens.

group 0, block 7:   | layer 0: K V of 16 tokens | layer 2: K V | ... |      one row of bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True, slots=True)
class LayerBlocks:
    """One tensor that holds something of every block."""

    tensor: torch.Tensor
    dim: int
    """Which of its dimensions counts blocks."""

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Of what one block has in it."""
        shape = tuple(self.tensor.shape)
        return shape[: self.dim] + shape[self.dim + 1 :]

    @property
    def block_bytes(self) -> int:
        return prod(self.block_shape) * self.tensor.element_size()


class PoolBlocks:
    """Reads and writes blocks by group and number, several of a group at once.

    On a GPU copies run in a stream of their own; a call returns when they are done.
    """

    def __init__(self, groups: Sequence[Sequence[LayerBlocks]]) -> None:
        """`groups` has the tensors of each KV cache group, in the order of its layers."""
        self._groups = groups
        self._device = groups[0][0].tensor.device
        self._stream = (
            torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            if self._device.type == "cuda"
            else None
        )

    def block_bytes(self, group: int) -> int:
        """Bytes of one block of the group."""
        return sum(layer.block_bytes for layer in self._groups[group])

    @torch.inference_mode()
    def read(self, group: int, block_ids: Sequence[int]) -> torch.Tensor:
        """uint8 [len(block_ids), block_bytes], on the host."""
        with torch.cuda.stream(self._stream):
            return self._read(group, self._indices(block_ids))

    @torch.inference_mode()
    def write(self, group: int, block_ids: Sequence[int], data: torch.Tensor) -> None:
        """Fill blocks with what `read` has given: uint8 [len(block_ids), block_bytes]."""
        assert data.shape == (len(block_ids), self.block_bytes(group)), data.shape
        with torch.cuda.stream(self._stream):
            self._write(group, self._indices(block_ids), data)
            if self._stream is not None:
                self._stream.synchronize()

    def _read(self, group: int, indices: torch.Tensor) -> torch.Tensor:
        data = torch.empty(len(indices), self.block_bytes(group), dtype=torch.uint8)
        for layer, part in zip(self._groups[group], self._parts(group, data), strict=True):
            chosen = layer.tensor.index_select(layer.dim, indices).movedim(layer.dim, 0)
            part.copy_(_as_bytes(chosen, len(indices)))
        return data

    def _write(self, group: int, indices: torch.Tensor, data: torch.Tensor) -> None:
        for layer, part in zip(self._groups[group], self._parts(group, data), strict=True):
            values = part.contiguous().view(layer.tensor.dtype)
            blocks = values.view(len(indices), *layer.block_shape).to(self._device)
            layer.tensor.index_copy_(layer.dim, indices, blocks.movedim(0, layer.dim))

    def _parts(self, group: int, data: torch.Tensor) -> list[torch.Tensor]:
        """The columns of each layer."""
        return list(torch.split(data, [layer.block_bytes for layer in self._groups[group]], dim=1))

    def _indices(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(block_ids, dtype=torch.int64).to(self._device)


def _as_bytes(blocks: torch.Tensor, count: int) -> torch.Tensor:
    return blocks.contiguous().view(count, -1).view(torch.uint8)
