"""How a KV pool's blocks lie, by arithmetic: what `contracts/kv_groups.py` will make of the layers.

    layers      w w w f w w w f     w: with a window, f: sees everything
    groups      [w w][w w][w w][f f]    each with block tables of its own

A block holds `block_size` tokens of one group's layers. So a sequence that fits its windows takes
one block a group for so many tokens, and a longer one no more of windowed groups.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.checkpoint.nested_config import DECODER_ARCHITECTURE
from tokenmill.config.memory import StepShape, layer_kv_bytes
from tokenmill.config.parameters import ModelParameters
from tokenmill.config.state_space import MOST_STATE_BLOCKS
from tokenmill.config.windows import layer_windows

MAX_GROUPS = 8
"""Each group has block tables of its own, which every step prepares."""


def group_size(counts: Sequence[int]) -> int:
    """Layers of a group, for kinds with so many layers each.

    Slots that a smaller group leaves empty are lost, so groups are as small as the rarest kind, but
    larger where there would be too many.
    """
    return next(
        size
        for size in itertools.count(min(counts))
        if sum(-(-count // size) for count in counts) <= max(MAX_GROUPS, len(counts))
    )


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Of one model and its largest step."""

    block_size: int
    windows: tuple[int | None, ...]
    """Of each layer; None sees everything."""
    bytes_per_token: int
    """K and V of one token in one layer."""
    step: StepShape
    """The largest step, which tells the longest sequence as well."""
    draft_bytes_per_token: int = 0
    """K and V of one token in all layers of a model that drafts: it uses the same blocks."""

    @property
    def bytes_per_whole_block(self) -> int:
        """Bytes of `block_size` tokens in all layers: the unit of `num_kv_blocks`."""
        num_blocks = -(-len(self.windows) // self._group_size)
        draft = num_blocks * self.block_size * self.draft_bytes_per_token
        return self.block_size * self.bytes_per_token * len(self.windows) + draft

    @property
    def bytes_per_block(self) -> int:
        """Bytes of `block_size` tokens in the layers of a group."""
        of_group = self.bytes_per_token * self._group_size
        return self.block_size * (of_group + self.draft_bytes_per_token)

    def spread_over(self, num_stages: int) -> KVLayout:
        """What the stage with most layers keeps: each group's layers are spread over all stages."""
        if num_stages == 1:
            return self
        of_stage = -(-self._group_size // num_stages)
        return replace(
            self, bytes_per_token=-(-self.bytes_per_token * of_stage // self._group_size)
        )

    @property
    def has_windows(self) -> bool:
        """Whether some layers do not keep everything."""
        return any(window is not None for window in self._kinds)

    def num_groups(self) -> int:
        """Groups of all kinds."""
        return sum(self._groups.values())

    def blocks_needed(self, num_tokens: int) -> int:
        """Most blocks, of all groups, that a sequence of so many tokens holds at the same time."""
        whole = -(-num_tokens // self.block_size)
        return sum(
            count * min(whole, self._kept_blocks(window)) for window, count in self._groups.items()
        )

    def bytes_needed(self, num_tokens: int) -> int:
        """Bytes of these blocks."""
        return self.blocks_needed(num_tokens) * self.bytes_per_block

    def longest_sequence(self, num_blocks: int) -> int:
        """Tokens, at most the model's length, of a sequence that has so many blocks to itself."""
        lengths = range(1, self.step.max_model_len + 1)
        return bisect_right(lengths, num_blocks, key=self.blocks_needed)

    def capacity(self, num_blocks: int) -> int:
        """Tokens of sequences of full length that so many blocks hold at once, or, where all layers
        keep everything, tokens of any sequences.
        """
        if not self.has_windows:
            return num_blocks // self.num_groups() * self.block_size
        return num_blocks * self.step.max_model_len // self.blocks_needed(self.step.max_model_len)

    @property
    def _kinds(self) -> Counter[int | None]:
        """Layers by what they keep: a window as long as the context keeps everything."""
        return Counter(
            window if window is not None and window < self.step.max_model_len else None
            for window in self.windows
        )

    @property
    def _group_size(self) -> int:
        return group_size(list(self._kinds.values()))

    @property
    def _groups(self) -> dict[int | None, int]:
        """Groups of each kind."""
        size = self._group_size
        return {window: -(-count // size) for window, count in self._kinds.items()}

    def _kept_blocks(self, window: int | None) -> int:
        """Most blocks that a group keeps of any sequence: what the next step's first query sees,
        the step's own tokens, and one more as these begin and end anywhere in a block.
        """
        if window is None:
            return -(-self.step.max_model_len // self.block_size)
        return -(-(window - 1 + self.step.max_num_batched_tokens) // self.block_size) + 1


@dataclass(frozen=True, slots=True)
class StateLayout(KVLayout):
    """Of a model that keeps states and no KV: its blocks are those of states."""

    state_bytes: int = 0
    """Of a block, in all layers."""

    @property
    def bytes_per_whole_block(self) -> int:
        return self.state_bytes

    @property
    def bytes_per_block(self) -> int:
        return self.state_bytes

    def num_groups(self) -> int:
        return 1

    def blocks_needed(self, num_tokens: int) -> int:
        return min(-(-num_tokens // self.block_size), MOST_STATE_BLOCKS)

    def capacity(self, num_blocks: int) -> int:
        longest = self.step.max_model_len
        return num_blocks * longest // self.blocks_needed(longest)


def kv_layout(
    hf_config: Mapping[str, Any],
    parameters: ModelParameters,
    implementation: str,
    step: StepShape,
    block_size: int,
    kv_dtype: str,
) -> KVLayout:
    """Of the model of a config.json that runs on `implementation`'s code."""
    windows = model_windows(hf_config, parameters, implementation)
    bytes_per_token = layer_kv_bytes(parameters, kv_dtype)
    if parameters.states is not None and not windows:
        state_bytes = parameters.states.bytes_per_block
        return StateLayout(block_size, (), bytes_per_token, step, state_bytes=state_bytes)
    return KVLayout(block_size, windows, bytes_per_token, step)


def model_windows(
    hf_config: Mapping[str, Any], parameters: ModelParameters, implementation: str
) -> tuple[int | None, ...]:
    """The window of each layer that keeps KV, as far as it is known without the model: of native
    decoders.
    """
    if parameters.states is not None:
        return (None,) * parameters.num_kv_layers
    decoder = hf_config.get(DECODER_ARCHITECTURE, parameters.architecture)
    if implementation != "tokenmill" or "ForCausalLM" not in decoder:
        return (None,) * parameters.num_layers
    return layer_windows(hf_config)
