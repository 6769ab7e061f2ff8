"""Low-rank adapters (Hu et al., 2021), several in one batch: out += scale * (x @ A.T) @ B.T.

    AdapterRows      which token of a step uses which slot; told once a step
    AdapterTables    the A and B of one layer, by slot
    add_adapters     the native kernel, recordable       torch reference: add_adapters_reference

A layer that merges several projections of one input has parts, columns of its result with an A and
a B of their own. A row's result has the same bits whatever the other rows are; rows without an
adapter are not touched, and where no row has one nothing is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from tokenmill.kernels import arena, native
from tokenmill.kernels.gemm import PANEL_COLUMNS, QuantizedRows
from tokenmill.kernels.linear import linear_float32

RANKS_AT_ONCE = 4
"""The tables' largest rank is a multiple of it."""

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to one projection."""

    a: torch.Tensor
    """[rank, in_features]"""
    b: torch.Tensor
    """[out_features, rank]"""
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


def padded_rank(rank: int) -> int:
    """The rank that tables have room for."""
    return -(-rank // RANKS_AT_ONCE) * RANKS_AT_ONCE


def pack_columns(b: torch.Tensor) -> torch.Tensor:
    """B [out_features, rank] as the kernel reads it: flat [panels of 32 columns, rank, 32], zeros
    behind the last column.
    """
    padded = functional.pad(b, (0, 0, 0, -b.shape[0] % PANEL_COLUMNS))
    return padded.view(-1, PANEL_COLUMNS, b.shape[1]).transpose(1, 2).reshape(-1)


class AdapterRows:
    """Tells the kernel which rows of a step's batch use which slot."""

    def __init__(self, slot_of_row: npt.NDArray[np.int32], num_slots: int) -> None:
        """`slot_of_row` [max_num_seqs] is the worker's column and keeps its place: -1 for no
        adapter, -2 where it could not be had.
        """
        self.handle: Any = native.module().AdapterRows(slot_of_row, num_slots)

    def fill(self, rows: Numbers, counts: Numbers) -> None:
        """Request i has counts[i] tokens of row rows[i]; both are int64 [num_reqs].

        Raises `ValueError` for a row whose adapter could not be had.
        """
        self.handle.fill(rows, counts)

    def clear(self) -> None:
        """No row has an adapter."""
        self.handle.clear()


class AdapterTables:
    """The adapters of one layer, in memory that keeps its place.

    Memory that no adapter was put into is never touched.
    """

    def __init__(
        self,
        num_slots: int,
        max_rank: int,
        in_features: int,
        widths: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        """`widths` are the columns of each part; the dtype is bfloat16 or float32."""
        self.max_rank = padded_rank(max_rank)
        self.num_parts = len(widths)
        panels = [-(-width // PANEL_COLUMNS) for width in widths]
        self._a = torch.zeros(num_slots, len(widths), self.max_rank, in_features, dtype=dtype)
        part_values = [count * self.max_rank * PANEL_COLUMNS for count in panels]
        self._b = torch.zeros(num_slots, sum(part_values), dtype=dtype)
        self._starts = np.cumsum([0, *part_values])
        self._ranks = np.zeros((num_slots, len(widths)), np.int32)
        self._scales = np.zeros((num_slots, len(widths)), np.float32)
        self.handle: Any = native.module().AdapterTables(
            self._a, self._b, self._ranks, self._scales, list(widths)
        )

    def put(self, slot: int, parts: Sequence[LowRank | None]) -> None:
        """Fill a slot. The B of each part is as `pack_columns` has made it; None is no adapter."""
        for index, part in enumerate(parts):
            self._ranks[slot, index] = 0 if part is None else part.rank
            if part is not None:
                self._scales[slot, index] = part.scale
                self._a[slot, index, : part.rank] = part.a
                start = int(self._starts[index])
                self._b[slot, start : start + part.b.numel()] = part.b


def add_adapters(
    rows: AdapterRows,
    tables: AdapterTables,
    x: torch.Tensor | QuantizedRows,
    out: torch.Tensor,
) -> None:
    """Add to out [N, columns of all parts] what the adapters of its rows make of x.

    x is bfloat16, float32 or quantised, [N, in_features], out bfloat16 or float32; rows of either
    may lie apart. Sums are float32, rounded once when they are added. `rows` may know fewer tokens
    than N, not more.
    """
    num_rows = len(out)
    data = x.buffer if isinstance(x, QuantizedRows) else x
    low = arena.empty(num_rows, tables.num_parts * tables.max_rank, dtype=torch.float32)
    native.module().add_adapters(rows.handle, tables.handle, data, num_rows, low, out)


def add_adapters_reference(
    slot_of_token: torch.Tensor,
    adapters: Sequence[Sequence[LowRank | None]],
    widths: Sequence[int],
    x: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """`add_adapters` in torch: slots are int [N], adapters[slot] has an entry for each part.

    Rows are computed in slabs of a fixed size, so that their bits do not depend on each other.
    """
    for slot, parts in enumerate(adapters):
        tokens = (slot_of_token == slot).nonzero().flatten()
        if not len(tokens):
            continue
        rows, start = x[tokens], 0
        for width, part in zip(widths, parts, strict=True):
            if part is not None:
                low = linear_float32(rows, part.a) * part.scale
                columns = slice(start, start + width)
                added = out[tokens, columns].float() + linear_float32(low, part.b)
                out[tokens, columns] = added.to(out.dtype)
            start += width
