"""What rows that draw at random ask for, on a GPU.

The same rows decode step after step, and ask for the same but for the position. So what has come
twice is kept on the device, and a step sends positions only.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.sampling.metadata import SamplingMetadata

HostArray = npt.NDArray[np.generic]

POSITION = "position"
COLUMNS = ("is_greedy", "temperature", "min_p", "top_k", "top_p", "seed", POSITION)
"""What `kernels/gpu/sampling.py` reads of a row."""


class ColumnsOnDevice:
    """Says what is to be sent of a step's rows, and what is there already.

    Rows are known again by their arrays, which nobody changes: `RowSamplingParams` gives the same
    ones until other rows are asked about.
    """

    def __init__(self) -> None:
        self._last: dict[str, HostArray] = {}
        self._kept: dict[str, torch.Tensor] = {}
        self._is_known = False
        self._any_random = False
        self.any_filter = False
        """Whether a random row of the last step has a filter."""

    def arrays(self, metadata: SamplingMetadata) -> dict[str, HostArray]:
        """What is to be sent of a step's rows, by name; nothing if all are greedy."""
        given = _lasting_columns(metadata)
        self._is_known = bool(self._last) and all(
            given[name] is array for name, array in self._last.items()
        )
        if not self._is_known:
            self._last, self._kept = given, {}
            self._any_random = not metadata.is_greedy.all()
            self.any_filter = self._any_random and _any_filter(metadata)
        if not self._any_random:
            return {}
        position: dict[str, HostArray] = {POSITION: metadata.random.position}
        if self._kept:
            return position
        # Kernels read the bits of a seed.
        return given | {"seed": metadata.random.seed.view(np.int64)} | position

    def complete(self, staged: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What was sent, and what was there; for the step that `arrays` was asked about last."""
        if POSITION not in staged:
            return dict(staged)
        if self._is_known and not self._kept:
            # What is staged lies there for this step only.
            self._kept = {name: staged[name].clone() for name in COLUMNS if name != POSITION}
        return self._kept | dict(staged)


def _lasting_columns(metadata: SamplingMetadata) -> dict[str, HostArray]:
    columns = metadata.random
    return {
        "is_greedy": metadata.is_greedy,
        "temperature": columns.temperature,
        "min_p": columns.min_p,
        "top_k": columns.top_k,
        "top_p": columns.top_p,
        "seed": columns.seed,
    }


def _any_filter(metadata: SamplingMetadata) -> bool:
    columns = metadata.random
    is_filtered = (columns.top_k > 0) | (columns.top_p < 1) | (columns.min_p > 0)
    return bool((is_filtered & ~metadata.is_greedy).any())
