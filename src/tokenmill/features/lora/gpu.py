"""Adapters on an NVIDIA GPU: `kernels/gpu/lora.py`, on tables whose ranks are all the largest one.

The kernels are launched in every step, whether or not a row has an adapter: so a captured step has
them, and reads the slots of its tokens from a buffer that is filled before each replay.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.features.lora.sites import Site
from tokenmill.features.lora.tables import Numbers, Parts
from tokenmill.kernels.gpu.lora import lora_expand, lora_shrink, shrink_segments
from tokenmill.kernels.lora import LowRank
from tokenmill.layers.linear_method import Activations, LinearMethod

StageInto = Callable[[npt.NDArray[np.generic], torch.Tensor], None]
"""Copies a host array into a tensor of its shape and type on the device."""


class GpuStepRows:
    """A slot for each token, on the device."""

    def __init__(
        self,
        slot_of_row: npt.NDArray[np.int32],
        max_num_tokens: int,
        stage_into: StageInto,
        device: torch.device,
    ) -> None:
        self._slot_of_row = slot_of_row
        self._stage_into = stage_into
        self.slot_of_token = torch.full((max_num_tokens,), -1, dtype=torch.int32, device=device)
        self._num_told = 0
        """Tokens of the last step that had adapters: others are -1."""

    def fill(self, rows: Numbers, counts: Numbers, num_tokens: int) -> None:
        given = np.repeat(self._slot_of_row[rows], counts)
        num_used = len(given) if (given >= 0).any() else 0
        slots = np.full(max(num_used, self._num_told), -1, np.int32)
        slots[:num_used] = given[:num_used]
        if len(slots):
            self._stage_into(slots, self.slot_of_token[: len(slots)])
        self._num_told = num_used


class GpuTables:
    """The adapters of one layer, zeros behind their ranks."""

    def __init__(
        self, site: Site, step: GpuStepRows, num_slots: int, max_rank: int, dtype: torch.dtype
    ) -> None:
        self._step = step
        self._widths = site.widths
        self._max_rank = max_rank
        device, num_parts = step.slot_of_token.device, len(site.widths)
        self._a = torch.zeros(
            num_slots, num_parts * max_rank, site.in_features, dtype=dtype, device=device
        )
        self._b = torch.zeros(num_slots, sum(site.widths), max_rank, dtype=dtype, device=device)
        self._scales = torch.zeros(num_slots, dtype=torch.float32, device=device)

    def packed(self, parts: Parts) -> Parts:
        """On one scale, which a slot has for all its projections."""
        common = next((part.scale for part in parts if part is not None), 1.0) or 1.0
        return [
            None if part is None else LowRank(part.a, part.b * (part.scale / common), common)
            for part in parts
        ]

    def put(self, slot: int, parts: Parts) -> None:
        self.clear(slot)
        start = 0
        for index, (width, part) in enumerate(zip(self._widths, parts, strict=True)):
            if part is not None:
                first = index * self._max_rank
                self._a[slot, first : first + part.rank] = part.a.to(self._a.device)
                self._b[slot, start : start + width, : part.rank] = part.b.to(self._b.device)
                self._scales[slot] = part.scale
            start += width

    def clear(self, slot: int) -> None:
        self._a[slot].zero_()
        self._b[slot].zero_()

    def empty_input(self, method: LinearMethod, num_rows: int) -> torch.Tensor:
        """Plain: beside weights in float8 the matrix makes what it reads of it."""
        return self._a.new_empty(num_rows, self._a.shape[2])

    def add(self, x: Activations, out: torch.Tensor) -> None:
        assert isinstance(x, torch.Tensor)
        slots = self._step.slot_of_token[: len(x)]
        shape = shrink_segments(x.shape[1]), len(x), self._a.shape[1]
        low = torch.empty(shape, dtype=torch.float32, device=x.device)
        lora_shrink(x, self._a, slots, low)
        lora_expand(low, self._b, slots, self._scales, out, slices=self._widths)
