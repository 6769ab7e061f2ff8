"""Prompts with images, without pixels: an image is a content and a number of placeholders."""

from __future__ import annotations

import hashlib
import itertools
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokenmill.contracts.plan import NewRequestData
from tokenmill.contracts.request import EngineCoreRequest, MultiModalFeature, TensorData

PLACEHOLDER = 7
"""The same id for every image: only features tell them apart."""
BREAK = 8


@dataclass(frozen=True)
class Image:
    """What stands for one image; `spans` as in `MultiModalFeature.embed_spans`."""

    content: str
    length: int
    spans: tuple[tuple[int, int], ...] = ()
    inputs: tuple[tuple[str, TensorData], ...] = ()

    def at(self, offset: int) -> MultiModalFeature:
        digest = hashlib.sha256(self.content.encode()).hexdigest()
        return MultiModalFeature(
            digest, "image", offset, self.length, dict(self.inputs), list(self.spans)
        )

    @property
    def token_ids(self) -> list[int]:
        taken = embed_places([self.at(0)])
        return [PLACEHOLDER if place in taken else BREAK for place in range(self.length)]


Piece = int | Image


def prompt_of(pieces: Iterable[Piece]) -> tuple[list[int], list[MultiModalFeature]]:
    """Ids and features of tokens and images in a row."""
    token_ids: list[int] = []
    features = []
    for piece in pieces:
        if isinstance(piece, Image):
            features.append(piece.at(len(token_ids)))
            token_ids += piece.token_ids
        else:
            token_ids.append(piece)
    return token_ids, features


def embed_places(features: Sequence[MultiModalFeature]) -> dict[int, str]:
    """Position -> hash of the content whose embedding stands there, and which of them it is."""
    places = {}
    for feature in features:
        spans = feature.embed_spans or [(0, feature.length)]
        runs = (range(start, start + count) for start, count in spans)
        for number, place in enumerate(itertools.chain(*runs)):
            places[feature.offset + place] = f"{feature.content_hash}:{number}"
    return places


def model_inputs(request: EngineCoreRequest | NewRequestData, token_ids: list[int]) -> list[int]:
    """What a model sees at each position: a token's id, or an image's embedding."""
    if not request.mm_features:
        return list(token_ids)
    embeds = {
        at: zlib.crc32(b"image" + name.encode())
        for at, name in embed_places(request.mm_features).items()
    }
    return [embeds.get(position, token_id) for position, token_id in enumerate(token_ids)]
