"""Sizes of state-space layers, and how many of their states there is room for."""

from __future__ import annotations

from dataclasses import dataclass

STATE_PLACES = 2
"""States in a block: the one that a step reads, and the one that it writes."""
STATE_BYTES = 4
"""Of a value: float32."""
MOST_STATE_BLOCKS = 3
"""That a sequence holds: the state before a step, behind its last whole block, and behind it."""
_CHECKPOINTS = 2
"""States for prefix hits, for each of the sequences that run."""
_LARGEST_SHARE = 0.4
"""Of the memory that is left, for states."""


@dataclass(frozen=True, slots=True)
class StateSizes:
    """The state-space layers of a model, all alike."""

    num_layers: int
    num_heads: int
    head_size: int
    state_size: int
    num_groups: int
    kernel_size: int

    @property
    def num_channels(self) -> int:
        """Of the convolution in front of a layer's states."""
        return self.num_heads * self.head_size + 2 * self.num_groups * self.state_size

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of states, in all layers."""
        matrices = self.num_heads * self.head_size * self.state_size
        values = self.num_channels * (self.kernel_size - 1) + matrices
        return self.num_layers * STATE_PLACES * STATE_BYTES * values


def num_state_blocks(sizes: StateSizes, max_num_seqs: int, room: int) -> int:
    """Blocks of states, the null block among them.

    As many as the running sequences need and some for prefix hits, but at most a share of `room`,
    bytes; fewer sequences run then.
    """
    wanted = 1 + (MOST_STATE_BLOCKS + _CHECKPOINTS) * max_num_seqs
    fits = int(room * _LARGEST_SHARE) // sizes.bytes_per_block
    return max(min(wanted, fits), 1 + MOST_STATE_BLOCKS)
