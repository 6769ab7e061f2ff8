"""What the runner tells of its rows, so that layers know whose weights are changed."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.contracts.request import AdapterInfo
from tokenmill.errors import AdapterError

Numbers = npt.NDArray[np.int64]


class RowAdapters(Protocol):
    """Follows the rows' adapters."""

    @property
    def native_rows(self) -> Any:
        """What a native step tells its rows; None if there is nothing to tell."""
        ...

    def load(self, directory: str) -> AdapterInfo:
        """Read an adapter and check it. From any thread. Raises `AdapterError`."""
        ...

    def update(self, plan: SchedulerOutput) -> None:
        """Apply a plan's differences; once for each plan, in order."""
        ...

    def check(self, plan: SchedulerOutput) -> None:
        """Raise `AdapterError` if a row of a plan has an adapter that could not be had."""
        ...

    def fill(self, rows: Numbers, counts: Numbers, num_tokens: int) -> None:
        """A step begins in which request i has counts[i] tokens of row rows[i]; with its padding it
        has `num_tokens`.
        """
        ...


class NoAdapters:
    """All rows run on the model as it is."""

    native_rows = None

    def load(self, directory: str) -> AdapterInfo:
        raise AdapterError(
            "this engine takes no adapters; start it with enable_lora=True.",
            parameter="lora_request",
        )

    def update(self, plan: SchedulerOutput) -> None:
        """No row has one."""

    def check(self, plan: SchedulerOutput) -> None:
        """No row has one."""

    def fill(self, rows: Numbers, counts: Numbers, num_tokens: int) -> None:
        """No row has one."""
