"""Embeddings of images in their places, and the angles of tokens with three positions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.contracts.plan import EncoderWork, SchedulerOutput
from tokenmill.contracts.request import MultiModalFeature, TensorData
from tokenmill.features.multimodal.embedder import Chunk, Embedder
from tokenmill.layers.rope import RopeConfig, RotaryEmbedding
from tokenmill.worker.encoder import ItemEncoder

ROPE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]},
    "max_position_embeddings": 50,
}


def embed_tokens(ids: torch.Tensor) -> torch.Tensor:
    return torch.stack([-ids.float(), torch.zeros(len(ids))], dim=1)


def item_embeds(feature: MultiModalFeature) -> torch.Tensor:
    """Which item, and which of its embeddings."""
    numbers = torch.arange(feature.num_embeds).float()
    return torch.stack([torch.full_like(numbers, int(feature.content_hash)), numbers], dim=1)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, list[MultiModalFeature]]:
    """A length, and features one behind the other."""
    features, end = [], draw(st.integers(0, 2))
    for number in range(draw(st.integers(1, 3))):
        length = draw(st.integers(1, 7))
        edges = sorted(draw(st.sets(st.integers(0, length), min_size=2, max_size=6)))
        spans = [(start, stop - start) for start, stop in itertools.pairwise(edges)][::2]
        if draw(st.booleans()):
            spans = []
        features.append(MultiModalFeature(str(number + 1), "image", end, length, {}, spans))
        end += length + draw(st.integers(0, 2))
    return end + draw(st.integers(0, 3)), features


def expected(length: int, features: list[MultiModalFeature]) -> list[list[float]]:
    """Embeddings of a whole prompt whose ids are its positions, one by one."""
    rows = [[-float(position), 0.0] for position in range(length)]
    for feature in features:
        number = 0
        for start, count in feature.embed_spans or [(0, feature.length)]:
            for place in range(start, start + count):
                rows[feature.offset + place] = [float(feature.content_hash), float(number)]
                number += 1
    return rows


@settings(deadline=None)
@given(st.lists(prompts(), min_size=1, max_size=3), st.data())
def test_each_embedding_stands_where_it_belongs(given_prompts, data):
    chunks, ids, rows = [], [], []
    for length, features in given_prompts:
        if not length:
            continue
        first = data.draw(st.integers(0, length - 1))
        count = data.draw(st.integers(1, length - first))
        chunks.append(Chunk(features, first, count, len(ids)))
        ids += range(first, first + count)
        rows += expected(length, features)[first : first + count]
    found = Embedder(embed_tokens, item_embeds).embed(torch.tensor(ids, dtype=torch.int32), chunks)
    if found is None:
        assert all(row[0] <= 0 for row in rows)
    else:
        assert found.tolist() == rows


class Model:
    """Encodes an item to the values that it brings."""

    def __init__(self) -> None:
        self.num_encoded = 0

    def encode(self, modality, inputs):
        assert modality == "image"
        self.num_encoded += 1
        return inputs["values"][:, None]


def feature(content_hash: str, length: int, *values: float) -> MultiModalFeature:
    array = np.array(values, np.float32)
    data = TensorData("float32", array.shape, array.tobytes())
    return MultiModalFeature(content_hash, "image", 0, length, {"values": data})


def test_items_are_encoded_once_and_until_they_are_forgotten():
    model = Model()
    encoder = ItemEncoder(model)
    for _ in range(2):
        assert encoder.embeds(feature("a", 2, 1.0, 2.0)).tolist() == [[1.0], [2.0]]
        assert encoder.embeds(feature("b", 1, 3.0)).tolist() == [[3.0]]
    assert (model.num_encoded, len(encoder)) == (2, 2)
    encoder.update(SchedulerOutput(0, encoder=EncoderWork([], ["a", "never there"])))
    assert len(encoder) == 1
    encoder.embeds(feature("a", 2, 1.0, 2.0))
    assert model.num_encoded == 3


def test_other_numbers_of_embeddings_than_placeholders_are_an_error():
    encoder = ItemEncoder(Model())
    with pytest.raises(ValueError, match=r"has made 2 embeddings .*'image' that stands for 3"):
        encoder.embeds(feature("a", 3, 1.0, 2.0))
    assert len(encoder) == 0


def test_rows_behind_the_table_rotate_as_three_positions_say():
    rotary = RotaryEmbedding(RopeConfig.from_hf(ROPE), 8, max_model_len=50)
    cos, sin = rotary.cos.clone(), rotary.sin.clone()
    positions = torch.tensor([[3, 3, 7], [3, 9, 8], [3, 4, 49]])
    axes = [0, 0, 1, 2]  # of the four frequencies, as `mrope_section` counts them
    first = rotary.reserve(6)
    assert first == 50
    rotary.write(torch.tensor([50, 53, 55]), positions)
    for row, of_token in zip([50, 53, 55], positions.t().tolist(), strict=True):
        for frequency, axis in enumerate(axes):
            assert rotary.cos[row, frequency] == cos[of_token[axis], frequency]
            assert rotary.sin[row, frequency] == sin[of_token[axis], frequency]
    assert torch.equal(rotary.cos[50], cos[3])  # three times the same is as one
    assert torch.equal(rotary.cos[:50], cos)
    assert torch.equal(rotary.sin[:50], sin)
