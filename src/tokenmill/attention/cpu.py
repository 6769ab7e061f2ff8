"""Attention by the native kernels: activations in bfloat16 or float32, processors with AVX2.

The cache has a layout of its own (`kernels/paged_attention.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tokenmill.attention.backend import (
    AttentionMetadata,
    AttentionSpec,
    CacheLimits,
    CommonAttentionMetadata,
    Rotation,
)
from tokenmill.kernels import arena
from tokenmill.kernels.paged_attention import (
    AttentionPlan,
    PagedAttentionShape,
    kv_cache_shape,
    paged_attention,
    rotate_and_write_kv,
    unsupported_reasons,
    write_kv,
)

_DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class CpuMetadata:
    """One step's work, cut into tasks, and where its tokens go."""

    plan: AttentionPlan
    slot_mapping: torch.Tensor


class CpuBackend:
    """Our own kernels."""

    name = "cpu"
    supports_graphs = False

    def unsupported_reasons(self, spec: AttentionSpec) -> list[str]:
        if spec.device != "cpu":
            return [f"runs on a CPU, not on {spec.device}"]
        if spec.dtype not in _DTYPES:
            return [f"dtype {spec.dtype!r} is not one of {', '.join(_DTYPES)}"]
        return unsupported_reasons(
            spec.kv_dtype or spec.dtype,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_size,
            spec.block_size,
            spec.value_offset,
        )

    def get_kv_cache_shape(self, spec: AttentionSpec, num_blocks: int) -> tuple[int, ...]:
        return kv_cache_shape(
            num_blocks,
            spec.block_size,
            spec.num_kv_heads,
            spec.head_size,
            spec.kv_dtype or spec.dtype,
            spec.value_offset,
        )

    def make_metadata_builder(self, spec: AttentionSpec, limits: CacheLimits) -> CpuMetadataBuilder:
        return CpuMetadataBuilder(_shape(spec), limits.num_blocks)

    def make_impl(self, spec: AttentionSpec) -> CpuImpl:
        return CpuImpl(_shape(spec), has_sinks=spec.has_sinks)


def _shape(spec: AttentionSpec) -> PagedAttentionShape:
    return PagedAttentionShape(
        kv_dtype=spec.kv_dtype or spec.dtype,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        block_size=spec.block_size,
        scale=spec.scale,
        logits_soft_cap=spec.logits_soft_cap,
        sliding_window=spec.sliding_window,
        causal=spec.causal,
        value_offset=spec.value_offset,
    )


class CpuMetadataBuilder:
    """Plans the tasks of a step; the plan is one object, filled anew for each step."""

    def __init__(self, shape: PagedAttentionShape, num_blocks: int) -> None:
        self._shape = shape
        self._num_blocks = num_blocks
        self._plan = AttentionPlan()

    @property
    def handles(self) -> tuple[Any, Any, int]:
        """The native plan and shape and the number of blocks, for who plans natively."""
        return self._plan.handle, self._shape.handle, self._num_blocks

    def build(self, common: CommonAttentionMetadata) -> CpuMetadata:
        assert common.causal == self._shape.causal, "a plan is made for one kind of attention"
        self._plan.build(
            self._shape,
            common.query_start_loc,
            common.seq_lens,
            common.block_table,
            self._num_blocks,
        )
        return CpuMetadata(self._plan, common.slot_mapping)


class CpuImpl:
    """One layer's attention."""

    def __init__(self, shape: PagedAttentionShape, *, has_sinks: bool) -> None:
        self._shape = shape
        self._has_sinks = has_sinks
        self.sinks: torch.Tensor | None = None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        assert isinstance(metadata, CpuMetadata)
        assert self._has_sinks == (self.sinks is not None)
        shape = self._shape
        stored = value if shape.value_offset is None else None
        out = arena.empty(len(query), shape.num_heads * shape.value_size, dtype=query.dtype)
        if rotation is None:
            write_kv(shape, key, stored, kv_cache, metadata.slot_mapping)
        else:
            rotated = arena.empty(*query.shape, dtype=query.dtype)
            rotate_and_write_kv(
                shape,
                query,
                key,
                stored,
                kv_cache,
                metadata.slot_mapping,
                rotation.positions,
                rotation.cos,
                rotation.sin,
                rotated,
            )
            query = rotated
        paged_attention(shape, metadata.plan, query, kv_cache, out, self.sinks)
        return out
