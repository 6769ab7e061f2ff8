"""The slots of one layer, and the call that adds what their adapters make of its input.

native    a native kernel, recordable: nothing is computed where no row has an adapter
torch     the same in torch, for processors and types that have no kernels of ours
gpu       Triton's kernels; launched in every step, so that a captured step has them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.features.lora.sites import Site
from tokenmill.kernels.gemm import QuantizedRows
from tokenmill.kernels.lora import (
    AdapterRows,
    AdapterTables,
    LowRank,
    add_adapters,
    add_adapters_reference,
    pack_columns,
)
from tokenmill.layers.linear_method import Activations, LinearMethod
from tokenmill.layers.weights import WeightSlot

Numbers = npt.NDArray[np.int64]
Parts = Sequence[LowRank | None]


class StepRows(Protocol):
    """Which tokens of a step use which slot; layers read it when they compute."""

    def fill(self, rows: Numbers, counts: Numbers, num_tokens: int) -> None:
        """Request i has counts[i] tokens of row rows[i]; `num_tokens` counts padding, too."""
        ...


class SiteTables(Protocol):
    """The adapters of one layer, by slot."""

    def packed(self, parts: Parts) -> Parts:
        """An adapter's matrices in the form that `put` takes."""
        ...

    def put(self, slot: int, parts: Parts) -> None:
        """Fill a slot; None is a projection that stays as it is."""
        ...

    def clear(self, slot: int) -> None:
        """Let the slot's adapter change nothing here."""
        ...

    def empty_input(self, method: LinearMethod, num_rows: int) -> Activations:
        """Where the layer's input may be written, in a form that `add` and `method` both read."""
        ...

    def add(self, x: Activations, out: torch.Tensor) -> None:
        """Add to out [N, columns] what the adapters of its rows make of x [N, in_features]."""
        ...


class NativeStepRows:
    """For the native kernel."""

    def __init__(self, slot_of_row: npt.NDArray[np.int32], num_slots: int) -> None:
        self.rows = AdapterRows(slot_of_row, num_slots)

    def fill(self, rows: Numbers, counts: Numbers, num_tokens: int) -> None:
        self.rows.fill(rows, counts)


class NativeTables:
    """For the native kernel."""

    def __init__(
        self, site: Site, step: NativeStepRows, num_slots: int, max_rank: int, dtype: torch.dtype
    ) -> None:
        self._rows = step.rows
        self._tables = AdapterTables(num_slots, max_rank, site.in_features, site.widths, dtype)

    def packed(self, parts: Parts) -> Parts:
        return [
            None if part is None else replace(part, a=part.a.contiguous(), b=pack_columns(part.b))
            for part in parts
        ]

    def put(self, slot: int, parts: Parts) -> None:
        self._tables.put(slot, parts)

    def clear(self, slot: int) -> None:
        self._tables.put(slot, [None] * self._tables.num_parts)

    def empty_input(self, method: LinearMethod, num_rows: int) -> Activations:
        return method.empty_input(num_rows)

    def add(self, x: Activations, out: torch.Tensor) -> None:
        assert isinstance(x, torch.Tensor | QuantizedRows)
        add_adapters(self._rows, self._tables, x, out)


class TorchStepRows:
    """A slot for each token, as a tensor."""

    def __init__(self, slot_of_row: npt.NDArray[np.int32]) -> None:
        self._slot_of_row = slot_of_row
        self.slot_of_token = torch.full((0,), -1, dtype=torch.int32)

    def fill(self, rows: Numbers, counts: Numbers, num_tokens: int) -> None:
        slots = np.full(num_tokens, -1, np.int32)
        given = np.repeat(self._slot_of_row[rows], counts)
        slots[: len(given)] = given
        self.slot_of_token = torch.from_numpy(slots)


class TorchTables:
    """In torch, row by row as far as sums go."""

    def __init__(self, site: Site, step: TorchStepRows, num_slots: int) -> None:
        self._widths = site.widths
        self._step = step
        self._adapters: list[Parts] = [[None] * len(site.widths) for _ in range(num_slots)]

    def packed(self, parts: Parts) -> Parts:
        return parts

    def put(self, slot: int, parts: Parts) -> None:
        self._adapters[slot] = parts

    def clear(self, slot: int) -> None:
        self._adapters[slot] = [None] * len(self._widths)

    def empty_input(self, method: LinearMethod, num_rows: int) -> Activations:
        return method.empty_input(num_rows)

    def add(self, x: Activations, out: torch.Tensor) -> None:
        assert isinstance(x, torch.Tensor)
        add_adapters_reference(self._step.slot_of_token, self._adapters, self._widths, x, out)


class AdaptedLinearMethod:
    """A matrix whose products some rows have changed."""

    def __init__(self, method: LinearMethod, tables: SiteTables) -> None:
        self._method = method
        self._tables = tables
        self.bias_dtype = method.bias_dtype

    def slot(self, name: str, rows: slice) -> WeightSlot:
        return self._method.slot(name, rows)

    def empty_input(self, num_rows: int) -> Activations:
        return self._tables.empty_input(self._method, num_rows)

    def project(
        self, x: Activations, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        out = self._method.project(x, bias, out_dtype)
        self._tables.add(x, out)
        return out

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return self._method.gather(ids)
