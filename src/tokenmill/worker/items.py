"""Images of the rows: embeddings in the place of tokens, and their positions.

    token ids     t  t  [ i  i  i  i ]  t   t        a prompt with an image of 2 x 2
    positions     0  1  2,2,2 ... 2,3,3 4   5        of models with three for each token
    in the step   0  1  rows behind the table's end  places in the table of angles

Attention knows one position a token, and reads the row of the table of angles that it names. Where
all three are the same, that is the position itself. Other tokens get rows of their own for the
step, behind the end of the table, put together of what the table has for each of the three. So
neither kernels nor recordings know of it, and text goes its quick ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.attention.items import ItemRuns
from tokenmill.contracts.plan import NewRequestData, SchedulerOutput
from tokenmill.contracts.request import MultiModalFeature
from tokenmill.features.multimodal.embedder import Chunk, Embedder
from tokenmill.layers.rope import RotaryEmbedding
from tokenmill.models.base import CausalLM, SupportsMultiModal
from tokenmill.worker.batch import BatchTensors, InputBatch
from tokenmill.worker.encoder import ItemEncoder

IntArray = npt.NDArray[np.int64]
Stage = Callable[[npt.NDArray[np.generic]], torch.Tensor]
"""Brings an array to where the model is."""


@dataclass(frozen=True, slots=True)
class _Items:
    """What a row has besides text."""

    features: Sequence[MultiModalFeature]
    end: int
    """Behind the last token that is not plain text, in the prompt."""
    positions: IntArray | None
    """[3, number of prompt tokens], of a model with three for each token."""


class RowItems:
    """The items of every row, and what a model's encoder makes of them."""

    def __init__(
        self,
        model: CausalLM,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        stage: Stage,
        *,
        is_bidirectional: bool = False,
    ) -> None:
        """To be made before anything of the model is recorded. With `is_bidirectional`, tokens of
        an item see all of it.
        """
        assert isinstance(model, SupportsMultiModal)
        self._model: SupportsMultiModal = model
        self._stage = stage
        self._is_bidirectional = is_bidirectional
        self._angles = _StepAngles(model, max_num_batched_tokens)
        self.position_offsets = np.zeros(max_num_seqs, np.int64) if self._angles.has_axes else None
        """By row, what positions behind the prompt are greater by than the tokens' places; None
        where they never are."""
        self.encoder = ItemEncoder(model, stage)
        self._embedder = Embedder(model.embed_input_ids, self.encoder.embeds)
        self._items: dict[int, _Items] = {}
        """By row."""
        self._pending: set[int] = set()
        """Rows that are not known to be behind their items."""
        self.are_embedded = True
        """Whether this rank encodes items, and puts embeddings in their places; False in stages of
        a pipeline behind the first, which only have to know of their positions."""

    def update(self, plan: SchedulerOutput) -> None:
        """Apply a plan's differences; once for each plan, in order."""
        self.encoder.update(plan)
        for row in plan.finished_rows:
            self._items.pop(row, None)
            self._pending.discard(row)
            if self.position_offsets is not None:
                self.position_offsets[row] = 0
        for request in plan.scheduled_new_reqs:
            if request.mm_features:
                self._items[request.row] = self._enter(request)
                self._pending.add(request.row)

    def are_text(self, rows: Sequence[int], num_computed_tokens: IntArray) -> bool:
        """Whether all that is left to compute of these rows is text, with positions of text; given
        what is computed of every row.
        """
        if not self._pending:
            return True
        behind = [row for row in self._pending if num_computed_tokens[row] >= self._items[row].end]
        self._pending.difference_update(behind)
        return self._pending.isdisjoint(rows)

    def put(self, batch: InputBatch, tensors: BatchTensors) -> BatchTensors:
        """A step's tensors with embeddings where a token needs them, and its positions written over
        those of text.

        Items are encoded here: it may raise what the model raises.
        """
        chunks = self._chunks(batch) if self._items else []
        if not chunks:
            return tensors
        for items, chunk in chunks:
            if items.positions is not None:
                self._place(items.positions, chunk, tensors.positions)
        parts = [chunk for _, chunk in chunks]
        embeds = self._embedder.embed(tensors.input_ids, parts) if self.are_embedded else None
        runs = self._runs(batch, parts) if self._is_bidirectional else None
        return replace(tensors, inputs_embeds=embeds, item_runs=runs)

    def _enter(self, request: NewRequestData) -> _Items:
        num_tokens, offsets = request.num_prompt_tokens, self.position_offsets
        if offsets is not None:
            positions = self._model.mrope_positions(
                request.token_ids[:num_tokens], request.mm_features
            )
            if positions is not None:
                assert positions.shape == (3, num_tokens)
                offsets[request.row] = int(positions.max()) + 1 - num_tokens
                return _Items(request.mm_features, num_tokens, positions)
        end = max(each.embeds_end for each in request.mm_features)
        return _Items(request.mm_features, end, None)

    def _chunks(self, batch: InputBatch) -> list[tuple[_Items, Chunk]]:
        """Parts of prompts that are not plain text."""
        chunks = []
        starts = batch.query_start_loc
        for place, row in enumerate(batch.rows.tolist()):
            items = self._items.get(row)
            first = int(batch.num_computed_tokens[place])
            if items is not None and first < items.end:
                count = min(int(batch.num_scheduled_tokens[place]), items.end - first)
                chunks.append((items, Chunk(items.features, first, count, int(starts[place]))))
        return chunks

    def _runs(self, batch: InputBatch, chunks: Sequence[Chunk]) -> ItemRuns | None:
        """Tokens of items in the step."""
        found = [
            (chunk.start + begin - chunk.first, end - begin, end)
            for chunk in chunks
            for begin, end in chunk.item_runs
        ]
        if not found:
            return None
        starts, counts, ends = np.array(found, np.int64).T
        reqs = np.searchsorted(batch.query_start_loc, starts, "right") - 1
        assert (ends <= batch.seq_lens[reqs]).all(), "an item was cut"
        return ItemRuns.of(starts, counts, reqs, ends, self._stage)

    def _place(self, positions: IntArray, chunk: Chunk, of_step: torch.Tensor) -> None:
        """Write the chunk's positions over those of the step."""
        of_chunk = positions[:, chunk.first : chunk.first + chunk.num_tokens]
        places = of_chunk[0].copy()
        (apart,) = np.nonzero((of_chunk != places).any(0))
        if len(apart):
            rows = places[apart] = self._angles.first + chunk.start + apart
            self._angles.write(self._stage(rows), self._stage(of_chunk[:, apart]))
        of_step[chunk.start : chunk.start + chunk.num_tokens] = self._stage(places)


class _StepAngles:
    """Rows of the tables of angles, one for each token of a step, behind their ends."""

    def __init__(self, model: CausalLM, max_num_batched_tokens: int) -> None:
        rotaries = {id(layer.rotary): layer.rotary for layer in model.attention_layers().values()}
        self._rotaries: list[RotaryEmbedding] = [
            rotary for rotary in rotaries.values() if rotary is not None and rotary.axes is not None
        ]
        firsts = {rotary.reserve(max_num_batched_tokens) for rotary in self._rotaries}
        assert len(firsts) <= 1, "tables of angles differ in length"
        self.first = min(firsts, default=0)

    @property
    def has_axes(self) -> bool:
        """Whether there are three positions for each token."""
        return bool(self._rotaries)

    def write(self, rows: torch.Tensor, positions: torch.Tensor) -> None:
        """Fill rows, int64 [N], for tokens with three positions, int64 [3, N]."""
        for rotary in self._rotaries:
            rotary.write(rows, positions)
