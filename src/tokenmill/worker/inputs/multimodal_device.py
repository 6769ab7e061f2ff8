"""Steps of a model that takes images, on a GPU (`worker/items.py` says what is different)."""

from __future__ import annotations

import numpy as np
import torch

from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.models.base import CausalLM
from tokenmill.worker.batch import BatchShape, BatchTensors, InputBatch
from tokenmill.worker.inputs.device import DeviceInputs
from tokenmill.worker.inputs.staging import Staging
from tokenmill.worker.items import RowItems
from tokenmill.worker.rows import RowTable


class MultiModalDeviceInputs(DeviceInputs):
    """`DeviceInputs` with the rows' items."""

    def __init__(
        self,
        model: CausalLM,
        rows: RowTable,
        max_num_batched_tokens: int,
        max_num_padded_reqs: int,
        staging: Staging,
        device: torch.device,
        *,
        is_bidirectional: bool = False,
    ) -> None:
        """To be made before anything of the model is captured; see `RowItems`."""
        super().__init__(rows, max_num_batched_tokens, max_num_padded_reqs, staging, device)
        self.items = RowItems(
            model,
            len(rows.num_tokens),
            max_num_batched_tokens,
            self.stage,
            is_bidirectional=is_bidirectional,
        )

    def update(self, plan: SchedulerOutput) -> None:
        """Apply a plan's differences to the rows, here and on the device."""
        super().update(plan)
        self.items.update(plan)

    def fill(self, batch: InputBatch, shape: BatchShape) -> BatchTensors:
        """The batch's tensors. Raises what the model's encoder raises."""
        tensors = super().fill(batch, shape)
        if self.items.position_offsets is not None:
            offsets = self.items.position_offsets[batch.rows]
            if offsets.any():
                of_tokens = np.repeat(offsets, batch.num_scheduled_tokens)
                tensors.positions[: len(of_tokens)] += self.stage(of_tokens)
        return self.items.put(batch, tensors)
