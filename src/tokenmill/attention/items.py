"""Attention in both directions among the tokens of an item, such as an image, within a text.

    tokens            t t [ i i i i ] t t          i sees all of t t i i i i, t what is before it
    causal            1 2   3 4 5 6   7 8          keys that each sees, as in any text
    in both ways            6 6 6 6                computed again, over the same cache

Every token of a step attends as in a text; those of items then attend again, as short requests of
their own that end where their item ends, by the same backend's attention without causality. What it
makes replaces what was there. So kernels know nothing of items, and text is computed as ever. A
window begins where it does without an item: at a token's own position.

An item's tokens need the keys of all of it, so a step has all of them, or those that the prefix
cache has not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.attention.backend import (
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    Rotation,
)

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ItemRuns:
    """The items of a step, or their last parts. Tensors are on the device."""

    max_query_len: int
    max_seq_len: int
    tokens: torch.Tensor
    """int64 [num_tokens], their places in the flat batch"""
    reqs: torch.Tensor
    """int64 [num_runs], the requests in the batch that they belong to"""
    query_start_loc: torch.Tensor
    """int32 [num_runs + 1], of `tokens`"""
    seq_lens: torch.Tensor
    """int32 [num_runs], the positions behind the items' last tokens"""

    @classmethod
    def of(
        cls,
        starts: IntArray,
        counts: IntArray,
        reqs: IntArray,
        ends: IntArray,
        stage: Callable[[npt.NDArray[np.generic]], torch.Tensor],
    ) -> ItemRuns:
        """Runs of `counts` tokens, at least one, from the places `starts` of the flat batch on;
        `stage` brings an array to the device.
        """
        query_start_loc = np.concatenate(([0], np.cumsum(counts)))
        before = np.repeat(starts - query_start_loc[:-1], counts)
        return cls(
            max_query_len=int(counts.max()),
            max_seq_len=int(ends.max()),
            tokens=stage(before + np.arange(len(before))),
            reqs=stage(reqs),
            query_start_loc=stage(query_start_loc.astype(np.int32)),
            seq_lens=stage(ends.astype(np.int32)),
        )

    def within(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """The step that has the items' tokens alone, each seeing all up to its item's end."""
        return CommonAttentionMetadata(
            num_reqs=len(self.reqs),
            num_tokens=len(self.tokens),
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            block_table=common.block_table[self.reqs],
            slot_mapping=common.slot_mapping[self.tokens],
            causal=False,
        )


@dataclass(frozen=True, slots=True)
class ItemMetadata:
    """What a backend's two builders make of a step with items."""

    causal: AttentionMetadata
    """Of the whole step."""
    items: AttentionMetadata
    """Of the items' tokens."""
    tokens: torch.Tensor
    """int64, places of these in the flat batch"""


def build_metadata(
    builder: AttentionMetadataBuilder,
    item_builder: AttentionMetadataBuilder | None,
    common: CommonAttentionMetadata,
    runs: ItemRuns | None,
) -> AttentionMetadata:
    """A step's metadata; of an `ItemMetadata` where it has runs."""
    metadata = builder.build(common)
    if runs is None:
        return metadata
    assert item_builder is not None
    return ItemMetadata(metadata, item_builder.build(runs.within(common)), runs.tokens)


def attend_items(
    impl: AttentionImpl,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotation: Rotation | None,
    kv_cache: torch.Tensor,
    metadata: ItemMetadata,
    out: torch.Tensor,
) -> None:
    """Write what the items' tokens attend to over `out`; other arguments are as of
    `AttentionImpl.forward`. K and V are stored once more, with the same bits.
    """
    tokens = metadata.tokens
    if rotation is not None:
        rotation = Rotation(rotation.positions[tokens], rotation.cos, rotation.sin)
    out[tokens] = impl.forward(
        query[tokens], key[tokens], value[tokens], rotation, kv_cache, metadata.items
    )
