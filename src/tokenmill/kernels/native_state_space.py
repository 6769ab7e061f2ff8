"""State-space layers natively; `state_space.py` is the reference, and says what is computed.

A row's result has the same bits in any batch and chunk, and with any number of threads.
"""

from __future__ import annotations

import dataclasses

import torch

from tokenmill.kernels import arena, native
from tokenmill.kernels.gemm import QuantizedRows
from tokenmill.kernels.state_space import StateCache, StateSpaceShape, StateSpaceWeights


class StatePlan:
    """The states that a step reads and writes; one object, filled anew for each step."""

    def __init__(self) -> None:
        self.handle = native.module().StatePlan()

    def build(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        block_size: int,
        num_blocks: int,
    ) -> None:
        """Take over a step's tables, as described in `attention/backend.py`; all are int32.

        Raises `ValueError` if they contradict each other or name blocks beyond `num_blocks`.
        """
        self.handle.build(query_start_loc, seq_lens, block_table, block_size, num_blocks)


class NativeStateSpace:
    """One layer with its states."""

    def __init__(
        self, shape: StateSpaceShape, weights: StateSpaceWeights, cache: StateCache
    ) -> None:
        self._shape = shape
        self._kept = weights, cache  # their memory is the layer's
        sizes = dataclasses.asdict(shape)
        dt_min, dt_max = sizes.pop("dt_limits")
        tensors = {
            field.name: getattr(weights, field.name) for field in dataclasses.fields(weights)
        }
        self._layer = native.module().StateSpaceLayer(
            **sizes,
            dt_min=dt_min,
            dt_max=dt_max,
            **tensors,
            states=cache.values,
            num_seen=cache.num_seen,
        )

    def run(
        self, plan: StatePlan, projected: torch.Tensor, out: torch.Tensor | QuantizedRows
    ) -> None:
        """Compute the plan's step.

        projected is bfloat16 or float32 [num_tokens, gates, inputs and dt], out one of these or
        quantised, [num_tokens, num_heads * head_size]. Raises `RuntimeError` if a state is missing.
        """
        shape, num_rows = self._shape, len(projected)
        columns = (shape.num_channels, shape.num_inner, shape.num_heads, shape.num_heads)
        spaces = [arena.empty(num_rows, size, dtype=torch.float32) for size in columns]
        target = out.buffer if isinstance(out, QuantizedRows) else out
        native.module().state_space(self._layer, plan.handle, projected, *spaces, target)
