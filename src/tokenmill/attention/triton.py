"""Attention by the Triton kernels: an NVIDIA GPU, any shape of batch, steps that can be captured.

Requests of few tokens have their keys split among programs by a plan that is made on the device,
once a step for all layers that share metadata.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from tokenmill.attention.backend import (
    AttentionMetadata,
    AttentionSpec,
    CacheLimits,
    CommonAttentionMetadata,
    Rotation,
)

_DTYPES = ("bfloat16", "float16", "float32")
_MAX_HEAD_SIZE = 256


@dataclass(frozen=True, slots=True)
class TritonMetadata:
    """The step's batch, and the plan in the workspace."""

    common: CommonAttentionMetadata
    workspace: torch.Tensor


class TritonBackend:
    """Our own kernels for a GPU."""

    name = "triton"

    def unsupported_reasons(self, spec: AttentionSpec) -> list[str]:
        reasons = []
        if spec.device != "cuda":
            reasons.append(f"runs on an NVIDIA GPU, not on {spec.device}")
        if importlib.util.find_spec("triton") is None:
            reasons.append("triton is not installed")
        if spec.dtype not in _DTYPES:
            reasons.append(f"dtype {spec.dtype} is none of {', '.join(_DTYPES)}")
        if spec.head_size > _MAX_HEAD_SIZE:
            reasons.append(f"head size {spec.head_size} is above {_MAX_HEAD_SIZE}")
        if spec.num_heads % spec.num_kv_heads:
            reasons.append(f"{spec.num_heads} heads are no multiple of {spec.num_kv_heads}")
        return reasons

    def get_kv_cache_shape(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        kv_dtype: str | None = None,
    ) -> tuple[int, ...]:
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    def make_metadata_builder(
        self, spec: AttentionSpec, limits: CacheLimits
    ) -> TritonMetadataBuilder:
        return TritonMetadataBuilder(spec, limits)

    def make_impl(self, spec: AttentionSpec) -> TritonImpl:
        return TritonImpl(spec)


class TritonMetadataBuilder:
    """Owns the workspace of the layers of one kind; the plan of a step is made in it."""

    def __init__(self, spec: AttentionSpec, limits: CacheLimits) -> None:
        self._spec = spec
        self._limits = limits
        self._workspace: torch.Tensor | None = None

    def build(self, common: CommonAttentionMetadata) -> TritonMetadata:
        return TritonMetadata(common, self._workspace_on(common.seq_lens.device))

    def _workspace_on(self, device: torch.device) -> torch.Tensor:
        """Allocated when the first step shows where; always the same."""
        from tokenmill.kernels.gpu.attention import workspace_size

        if self._workspace is None:
            spec, limits = self._spec, self._limits
            size = workspace_size(
                limits.max_num_seqs,
                spec.num_heads,
                spec.num_kv_heads,
                spec.head_size,
                limits.max_model_len,
            )
            self._workspace = torch.empty(size, dtype=torch.float32, device=device)
        return self._workspace


class TritonImpl:
    """One layer's attention."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        from tokenmill.kernels.gpu.attention import paged_attention
        from tokenmill.kernels.gpu.rope_kv import rotate_and_write_kv, write_kv

        assert isinstance(metadata, TritonMetadata)
        common, spec = metadata.common, self._spec
        out = query.new_empty(query.shape)
        if rotation is None:
            write_kv(key, value, kv_cache, common.slot_mapping)
        else:
            rotated = query.new_empty(query.shape)
            rotate_and_write_kv(
                query, key, value, rotation.positions, rotation.cos, rotation.sin,
                kv_cache, common.slot_mapping, rotated,
            )  # fmt: skip
            query = rotated
        paged_attention(
            query,
            kv_cache,
            common.block_table,
            common.seq_lens,
            common.query_start_loc,
            out,
            workspace=metadata.workspace,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            scale=spec.scale,
            sliding_window=spec.sliding_window,
            logits_soft_cap=spec.logits_soft_cap,
            causal=common.causal,
            exact=spec.exact,
        )
        return out
