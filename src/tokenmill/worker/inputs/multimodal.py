"""Steps of a model that takes images, on the host (`worker/items.py` says what is different)."""

from __future__ import annotations

import torch

from tokenmill.config.engine_config import EngineConfig
from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.models.base import CausalLM
from tokenmill.worker.batch import BatchShape, BatchTensors, InputBatch
from tokenmill.worker.inputs.host import HostInputs
from tokenmill.worker.items import RowItems
from tokenmill.worker.limits import RunnerLimits
from tokenmill.worker.rows import RowTable


class MultiModalInputs(HostInputs):
    """`HostInputs` with the rows' items."""

    def __init__(
        self,
        model: CausalLM,
        rows: RowTable,
        max_num_batched_tokens: int,
        *,
        is_bidirectional: bool = False,
    ) -> None:
        """To be made before anything of the model is recorded; see `RowItems`."""
        self.items = RowItems(
            model,
            len(rows.num_tokens),
            max_num_batched_tokens,
            torch.from_numpy,
            is_bidirectional=is_bidirectional,
        )
        super().__init__(rows, max_num_batched_tokens, self.items.position_offsets)

    def update(self, plan: SchedulerOutput) -> None:
        """Apply a plan's differences to the rows."""
        super().update(plan)
        self.items.update(plan)

    def are_text(self, plan: SchedulerOutput) -> bool:
        """Not where a token's embedding is an image's, or its position not one of text."""
        return self.items.are_text(plan.rows, self.rows.num_computed_tokens)

    def fill(self, batch: InputBatch, shape: BatchShape) -> BatchTensors:
        """The batch's tensors. Raises what the model's encoder raises."""
        return self.items.put(batch, super().fill(batch, shape))


def multimodal_inputs(
    config: EngineConfig,
    model: CausalLM,
    limits: RunnerLimits,
    num_kv_groups: int,
) -> MultiModalInputs | None:
    """How the steps of a model that takes images are prepared; None for others."""
    if config.encoder is None:
        return None
    return MultiModalInputs(
        model,
        limits.make_rows(num_kv_groups),
        limits.max_num_batched_tokens,
        is_bidirectional=config.encoder.is_bidirectional,
    )
