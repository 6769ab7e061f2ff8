"""Embeddings of a step's tokens, with those of images in their places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from tokenmill.contracts.request import MultiModalFeature

ItemEmbeds = Callable[[MultiModalFeature], torch.Tensor]
"""What the encoder makes of an item, [feature.num_embeds, hidden_size]."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of a prompt with images, in a step."""

    features: Sequence[MultiModalFeature]
    """Of the whole prompt, in order."""
    first: int
    """Position of the chunk's first token in the prompt."""
    num_tokens: int
    start: int
    """Place of that token in the flat batch."""

    @property
    def reached(self) -> list[MultiModalFeature]:
        """Items whose embeddings may stand in the chunk."""
        end = self.first + self.num_tokens
        return [
            each for each in self.features if each.offset < end and self.first < each.embeds_end
        ]

    @property
    def item_runs(self) -> list[tuple[int, int]]:
        """The positions [begin, end) in the prompt of embeddings that stand side by side, from the
        chunk's first token on; the last may reach beyond the chunk.
        """
        last = self.first + self.num_tokens
        return [
            (max(begin, self.first), end)
            for feature in self.reached
            for begin, end in feature.runs
            if begin < last and self.first < end
        ]


class Embedder:
    """Puts embeddings of images over those of the tokens that stand for them."""

    def __init__(
        self, embed_tokens: Callable[[torch.Tensor], torch.Tensor], item_embeds: ItemEmbeds
    ) -> None:
        """`embed_tokens` maps ids, int32 [N], to embeddings [N, hidden_size]."""
        self._embed_tokens = embed_tokens
        self._item_embeds = item_embeds

    def embed(self, input_ids: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor | None:
        """Embeddings of a step's tokens, int32 [N]; None if all of them are those of their ids.

        They are as wide as the items': zeros follow those of text where an encoder makes more than
        hidden_size values.

        Raises what `item_embeds` raises.
        """
        embeds = None
        for chunk in chunks:
            for feature in chunk.reached:
                pieces = _pieces(feature, chunk)
                if not pieces:
                    continue
                if embeds is None:
                    embeds = self._embed_tokens(input_ids)
                item = self._item_embeds(feature)
                if item.shape[1] > embeds.shape[1]:
                    embeds = functional.pad(embeds, (0, item.shape[1] - embeds.shape[1]))
                for place, begin, count in pieces:
                    embeds[place : place + count] = item[begin : begin + count]
        return embeds


def _pieces(feature: MultiModalFeature, chunk: Chunk) -> list[tuple[int, int, int]]:
    """Runs of a chunk's embeddings: place in the flat batch, the first of the item, how many."""
    pieces, begin = [], 0
    for start, count in feature.spans:
        place = feature.offset + start - chunk.first  # in the chunk; may lie before or behind it
        skipped = max(-place, 0)
        taken = min(count, chunk.num_tokens - place) - skipped
        if taken > 0:
            pieces.append((chunk.start + place + skipped, begin + skipped, taken))
        begin += count
    return pieces
