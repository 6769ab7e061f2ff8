"""Which adapters are kept, and which slot each row uses: the device half's state.

    a directory --read, checked--> the host's memory --copied--> a slot of every layer
                                   max_cpu_loras, LRU            max_loras, LRU of those not in use

The scheduler lets no more than `max_loras` adapters run, so there is a slot for each row's.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.config.engine_config import LoRAConfig
from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.contracts.request import AdapterInfo, AdapterRef
from tokenmill.errors import AdapterError
from tokenmill.features.lora.adapter import Adapter, AdapterReader
from tokenmill.features.lora.tables import NativeStepRows, Numbers, SiteTables, StepRows

logger = logging.getLogger(__name__)

NO_SLOT = -1
_NOT_THERE = -2


class HostCache:
    """Adapters in the host's memory, those used last. Threads may share it."""

    def __init__(self, reader: AdapterReader, tables: Sequence[SiteTables], size: int) -> None:
        self._reader = reader
        self._tables = tables
        self._size = size
        self._kept: OrderedDict[str, Adapter] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, directory: str) -> Adapter:
        """Read an adapter and keep it. Raises `AdapterError`; then nothing has changed."""
        adapter = self._reader.read(Path(directory))
        packed = {site: self._tables[site].packed(each) for site, each in adapter.changes.items()}
        adapter = replace(adapter, changes=packed)
        with self._lock:
            self._keep(adapter)
        return adapter

    def get(self, ref: AdapterRef) -> Adapter:
        """An adapter that was read before; read again if it is not kept any more.

        Raises `AdapterError` if it cannot be, or its files have changed.
        """
        with self._lock:
            kept = self._kept.get(ref.load_id)
            if kept is not None:
                self._kept.move_to_end(ref.load_id)
                return kept
        adapter = self.read(ref.path)
        if adapter.load_id != ref.load_id:
            raise AdapterError(
                f"The files of the adapter {ref.name!r} in {ref.path} have changed since it was"
                f" loaded; load it again."
            )
        return adapter

    def _keep(self, adapter: Adapter) -> None:
        self._kept[adapter.load_id] = adapter
        self._kept.move_to_end(adapter.load_id)
        while len(self._kept) > self._size:
            self._kept.popitem(last=False)


class Adapters:
    """Keeps the layers' slots and the rows' column up with the plans."""

    def __init__(
        self,
        config: LoRAConfig,
        host: HostCache,
        tables: Sequence[SiteTables],
        step: StepRows,
        slot_of_row: Any,
    ) -> None:
        """`slot_of_row` is int32 [max_num_seqs], the column that `step` reads."""
        self._host = host
        self._tables = tables
        self._step = step
        self._slot_of_row = slot_of_row
        self._load_ids: list[str | None] = [None] * config.max_loras
        """What each slot holds."""
        self._num_rows = [0] * config.max_loras
        """Rows that use it."""
        self._used = list(range(config.max_loras))
        """Slots, the one that was taken last at the end."""
        self._failures: dict[int, str] = {}
        """Why a row's adapter could not be had."""

    @property
    def native_rows(self) -> Any:
        """What a native step tells its rows; None without native kernels."""
        return self._step.rows.handle if isinstance(self._step, NativeStepRows) else None

    def load(self, directory: str) -> AdapterInfo:
        """Read an adapter and check it. From any thread. Raises `AdapterError`."""
        adapter = self._host.read(directory)
        return AdapterInfo(adapter.load_id, adapter.rank, adapter.num_modules)

    def update(self, plan: SchedulerOutput) -> None:
        """Apply a plan's differences; once for each plan, in order. Never raises: a row whose
        adapter cannot be had fails when it computes.
        """
        for row in plan.finished_rows:
            self._release(row)
        for request in plan.scheduled_new_reqs:
            self._release(request.row)
            if request.adapter is not None:
                self._slot_of_row[request.row] = self._take(request.row, request.adapter)

    def check(self, plan: SchedulerOutput) -> None:
        """Raise `AdapterError` if a row of a plan has an adapter that could not be had."""
        for row in self._failures.keys() & set(plan.rows) if self._failures else ():
            raise AdapterError(self._failures[row])

    def fill(self, rows: Numbers, counts: Numbers, num_tokens: int) -> None:
        """Tell the layers of a step: request i has counts[i] tokens of row rows[i], and with its
        padding it has `num_tokens`.
        """
        self._step.fill(rows, counts, num_tokens)

    def _release(self, row: int) -> None:
        slot = int(self._slot_of_row[row])
        if slot >= 0:
            self._num_rows[slot] -= 1
        self._slot_of_row[row] = NO_SLOT
        self._failures.pop(row, None)

    def _take(self, row: int, adapter: AdapterRef) -> int:
        """The slot of an adapter for one more row."""
        try:
            slot = self._slot_with(adapter)
        except Exception as error:  # noqa: BLE001 - whatever the file does, one request pays
            logger.warning("The adapter %r could not be had: %s", adapter.name, error)
            self._failures[row] = str(error)
            return _NOT_THERE
        self._num_rows[slot] += 1
        self._used.remove(slot)
        self._used.append(slot)
        return slot

    def _slot_with(self, ref: AdapterRef) -> int:
        if ref.load_id in self._load_ids:
            return self._load_ids.index(ref.load_id)
        adapter = self._host.get(ref)
        slot = next(slot for slot in self._used if not self._num_rows[slot])
        self._load_ids[slot] = None  # until all layers have it
        for site, tables in enumerate(self._tables):
            parts = adapter.changes.get(site)
            if parts is None:
                tables.clear(slot)
            else:
                tables.put(slot, parts)
        self._load_ids[slot] = ref.load_id
        return slot


def new_column(num_rows: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The slots of so many rows, none of which uses one."""
    return np.full(num_rows, NO_SLOT, np.int32)
