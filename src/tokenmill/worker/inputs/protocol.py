"""What the runner expects of whoever prepares its steps."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.sampling.sampler import Samples
from tokenmill.worker.batch import (
    BatchShape,
    BatchTensors,
    InputBatch,
    IntArray,
    NewTokens,
)
from tokenmill.worker.rows import RowTable


class StepInputs(Protocol):
    """The rows, and the buffers that steps are prepared in."""

    rows: RowTable
    token_ids: torch.Tensor
    """int32 [max_num_seqs, max_model_len]: the rows' tokens as the device knows them, those just
    sampled included."""

    def warm_up(self) -> None:
        """Make ready for the first step; before any plan."""
        ...

    def update(self, plan: SchedulerOutput) -> None:
        """Apply a plan's differences to the rows."""
        ...

    def fill(self, batch: InputBatch, shape: BatchShape) -> BatchTensors:
        """The batch's tensors, padded to `shape`."""
        ...

    def blank(self, shape: BatchShape) -> BatchTensors:
        """Tensors of a step that touches no request, for a recording."""
        ...

    def stage(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        """A host array on the device; not to be kept beyond the step."""
        ...

    def write_tokens(self, samples: Samples, new: NewTokens) -> None:
        """Put the new tokens into their rows, for the next step to read."""
        ...

    def settle_tokens(self, token_ids: IntArray, new: NewTokens) -> None:
        """Tell the host's rows of the ids that `write_tokens` wrote, now that they are known."""
        ...
