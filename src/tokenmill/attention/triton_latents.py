"""Attention to latents by our Triton kernels: layers whose values are parts of their keys.

kv_cache    [num_blocks, 1, block_size, 1, head_size]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tokenmill.attention.backend import (
    AttentionMetadata,
    AttentionSpec,
    CacheLimits,
    CommonAttentionMetadata,
    Rotation,
)
from tokenmill.attention.cuda import device_of

if TYPE_CHECKING:
    from tokenmill.kernels.gpu.attention_config import AttentionConfig

MAX_VALUE_SIZE = 512
MAX_ROTATED = 128


def latent_reasons(spec: AttentionSpec) -> list[str]:
    """Why layers of latents of these sizes cannot be served."""
    reasons = []
    if spec.num_kv_heads != 1:
        reasons.append(f"layers of latents have 1 KV head, not {spec.num_kv_heads}")
    if spec.value_size > MAX_VALUE_SIZE:
        reasons.append(f"values of {spec.value_size} are above {MAX_VALUE_SIZE}")
    if not 0 < (spec.value_offset or 0) <= MAX_ROTATED:
        reasons.append(f"values begin at {spec.value_offset}, not at 1 to {MAX_ROTATED}")
    if spec.sliding_window or spec.logits_soft_cap or spec.has_sinks or not spec.causal:
        reasons.append("layers of latents have no windows, soft caps or sinks, and are causal")
    return reasons


def latent_cache_shape(spec: AttentionSpec, num_blocks: int) -> tuple[int, ...]:
    """Of the cache of a layer of latents."""
    return (num_blocks, 1, spec.block_size, 1, spec.head_size)


@dataclass(frozen=True, slots=True)
class LatentMetadata:
    """One step, planned, and where its partial results go."""

    common: CommonAttentionMetadata
    workspace: torch.Tensor
    config: AttentionConfig


class LatentMetadataBuilder:
    """As `TritonMetadataBuilder`."""

    def __init__(self, spec: AttentionSpec, limits: CacheLimits) -> None:
        from tokenmill.kernels.gpu.attention_config import choose_latent_config
        from tokenmill.kernels.gpu.latent_attention import latent_workspace_size

        self._spec = spec
        self._config = choose_latent_config(getattr(torch, spec.dtype))
        size = latent_workspace_size(
            limits.max_num_seqs,
            spec.num_heads,
            spec.value_size,
            limits.max_model_len,
            config=self._config,
        )
        self._workspace = torch.empty(size, dtype=torch.float32, device=device_of(spec))

    def build(self, common: CommonAttentionMetadata) -> LatentMetadata:
        from tokenmill.kernels.gpu.latent_attention import plan_latent_attention

        plan_latent_attention(
            common.query_start_loc,
            common.seq_lens,
            self._workspace,
            num_heads=self._spec.num_heads,
            value_size=self._spec.value_size,
            config=self._config,
        )
        return LatentMetadata(common, self._workspace, self._config)


class LatentImpl:
    """One layer's attention. Its owner sets the scale of a float8 cache."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self.k_scale = 1.0

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        from tokenmill.kernels.gpu.latent_attention import latent_attention
        from tokenmill.kernels.gpu.latent_kv import rotate_and_write_latents

        assert isinstance(metadata, LatentMetadata)
        assert rotation is not None, "what is not rotated is all of a latent"
        common, spec = metadata.common, self._spec
        rotated = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        rotate_and_write_latents(
            query,
            key,
            rotation.positions,
            rotation.cos,
            rotation.sin,
            kv_cache,
            common.slot_mapping,
            rotated,
            self.k_scale,
        )
        out = query.new_empty(len(query), spec.num_heads * spec.value_size)
        latent_attention(
            rotated,
            kv_cache,
            common.block_table,
            common.seq_lens,
            common.query_start_loc,
            out,
            rotated=spec.value_offset or 0,
            workspace=metadata.workspace,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            scale=spec.scale,
            k_scale=self.k_scale,
            config=metadata.config,
            planned=True,
        )
        return out
