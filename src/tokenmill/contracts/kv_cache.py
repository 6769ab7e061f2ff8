"""What the KV cache holds, in numbers."""

from __future__ import annotations

import enum
from bisect import bisect_right
from dataclasses import dataclass
from typing import ClassVar

from tokenmill.config.dtypes import kv_head_bytes
from tokenmill.config.state_space import MOST_STATE_BLOCKS, STATE_BYTES, STATE_PLACES


class KVCacheKind(enum.Enum):
    """What a group of layers keeps of a sequence."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    CROSS = "cross"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What one attention layer keeps per token."""

    num_kv_heads: int
    head_size: int
    dtype: str
    """`float32`, `bfloat16`, `float16`, or `int8` with a scale per token and head."""
    kind: KVCacheKind = KVCacheKind.FULL
    sliding_window: int | None = None
    """Tokens that a query sees, itself included; None sees all."""
    stores_values: bool = True
    """Whether values are stored; else they are parts of keys."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's K and V in this layer."""
        parts = 2 if self.stores_values else 1
        return parts * self.num_kv_heads * kv_head_bytes(self.head_size, self.dtype)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What one state-space layer keeps of a sequence, of any length; all float32."""

    num_channels: int
    """Of the convolution in front."""
    num_past_inputs: int
    """Inputs of the convolution before the next token."""
    num_heads: int
    head_size: int
    state_size: int
    """A head's state is a matrix [head_size, state_size]."""

    kind: ClassVar[KVCacheKind] = KVCacheKind.STATE
    sliding_window: ClassVar[int] = 2
    """A token needs the state behind the one before it."""

    @property
    def num_values(self) -> int:
        """Of one state."""
        matrices = self.num_heads * self.head_size * self.state_size
        return self.num_channels * self.num_past_inputs + matrices

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in this layer."""
        return STATE_PLACES * STATE_BYTES * self.num_values


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share one block table, since they keep the same of each sequence."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec | StateSpec

    @property
    def keeps_states(self) -> bool:
        """Whether its blocks hold states, and not the KV of tokens."""
        return self.spec.kind is KVCacheKind.STATE

    def blocks_needed(self, num_tokens: int, block_size: int, max_step_tokens: int) -> int:
        """Most blocks that a sequence of `num_tokens` tokens holds at the same time.

        A windowed group keeps what the next step's first query sees, and the step's own tokens.
        """
        num_blocks = -(-num_tokens // block_size)
        if self.keeps_states:
            return min(num_blocks, MOST_STATE_BLOCKS)
        window = self.spec.sliding_window
        if self.spec.kind is not KVCacheKind.SLIDING_WINDOW or window is None:
            return num_blocks
        # One more, as these tokens begin and end anywhere in a block.
        return min(num_blocks, -(-(window - 1 + max_step_tokens) // block_size) + 1)


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The pool: `num_blocks` blocks of `block_size` tokens.

        slot        0      1      2
        group 0     a      e      i     layers that keep all tokens
        group 1     b      f      j     layers with a window
        group 2     c      g

    A block belongs to one group at a time, and to all its layers. So the n-th layers of all groups
    share the memory of `num_blocks` blocks, the n-th slot, where they keep as many bytes per token;
    groups that keep another number have slots of their own.

    Block 0 is the null block: never handed out, stands for blocks that are not needed.

    Groups of states are the last ones. Their blocks are numbers of their own, with a null block of
    their own, as a state is as large as the KV of hundreds of tokens. In a model without attention
    they are all there is; `num_blocks` is then 1.
    """

    num_blocks: int
    block_size: int
    groups: tuple[KVCacheGroup, ...]
    num_state_blocks: int = 0

    @property
    def token_groups(self) -> tuple[KVCacheGroup, ...]:
        """Those that keep KV."""
        return tuple(group for group in self.groups if not group.keeps_states)

    @property
    def bytes_per_block(self) -> int:
        """Of one that holds KV."""
        num_slots: dict[int, int] = {}
        for group in self.token_groups:
            assert isinstance(group.spec, KVCacheSpec)
            size = group.spec.bytes_per_token
            num_slots[size] = max(num_slots.get(size, 0), len(group.layer_names))
        return self.block_size * sum(size * count for size, count in num_slots.items())

    @property
    def num_usable_blocks(self) -> int:
        """All but the null block."""
        return self.num_blocks - 1

    @property
    def num_usable_tokens(self) -> int:
        """Tokens that fit if every group keeps them all."""
        return self.num_usable_blocks // len(self.token_groups) * self.block_size

    def blocks_needed(self, num_tokens: int, max_step_tokens: int) -> int:
        """Most blocks with KV that a sequence of `num_tokens` tokens holds at the same time."""
        return sum(
            group.blocks_needed(num_tokens, self.block_size, max_step_tokens)
            for group in self.token_groups
        )

    def longest_sequence(self, max_model_len: int, max_step_tokens: int) -> int:
        """Tokens, at most `max_model_len`, of a sequence that has the whole pool to itself."""
        return bisect_right(
            range(1, max_model_len + 1),
            self.num_usable_blocks,
            key=lambda num_tokens: self.blocks_needed(num_tokens, max_step_tokens),
        )
