"""Attention by our Triton kernels: NVIDIA GPUs from Ampere on, exact where that is asked for."""

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
from tokenmill.attention.cuda import (
    device_of,
    device_reasons,
    kv_cache_shape,
    write_step,
)
from tokenmill.attention.reasons import dtype_reasons, shape_reasons
from tokenmill.attention.triton_latents import (
    LatentImpl,
    LatentMetadataBuilder,
    latent_cache_shape,
    latent_reasons,
)
from tokenmill.config.dtypes import FLOAT8

if TYPE_CHECKING:
    from tokenmill.kernels.gpu.attention_config import AttentionConfig

DTYPES = ("bfloat16", "float16", "float32")
MAX_HEAD_SIZE = 256


@dataclass(frozen=True, slots=True)
class TritonMetadata:
    """One step, planned, and where its partial results go."""

    common: CommonAttentionMetadata
    workspace: torch.Tensor
    config: AttentionConfig


class TritonBackend:
    """Our own kernels."""

    name = "triton"
    supports_graphs = True

    def unsupported_reasons(self, spec: AttentionSpec) -> list[str]:
        lowest = (8, 9) if spec.kv_dtype == FLOAT8 else (8, 0)
        has_latents = spec.value_offset is not None
        return [
            *device_reasons(spec, lowest),
            *dtype_reasons(spec, DTYPES, (FLOAT8,)),
            *(latent_reasons(spec) if has_latents else shape_reasons(spec, MAX_HEAD_SIZE)),
        ]

    def get_kv_cache_shape(self, spec: AttentionSpec, num_blocks: int) -> tuple[int, ...]:
        if spec.value_offset is not None:
            return latent_cache_shape(spec, num_blocks)
        return kv_cache_shape(spec, num_blocks)

    def make_metadata_builder(
        self, spec: AttentionSpec, limits: CacheLimits
    ) -> TritonMetadataBuilder | LatentMetadataBuilder:
        if spec.value_offset is not None:
            return LatentMetadataBuilder(spec, limits)
        return TritonMetadataBuilder(spec, limits)

    def make_impl(self, spec: AttentionSpec) -> TritonImpl | LatentImpl:
        if spec.value_offset is not None:
            return LatentImpl(spec)
        return TritonImpl(spec)


class TritonMetadataBuilder:
    """Plans a step for all layers; the plan and the partial results have one workspace.

    A step is planned before its layers run, recorded or not, and the next one after them, all in
    the order of one stream.
    """

    def __init__(self, spec: AttentionSpec, limits: CacheLimits) -> None:
        from tokenmill.kernels.gpu.attention_config import choose_config
        from tokenmill.kernels.gpu.attention_launch import workspace_size

        self._spec = spec
        group = spec.num_heads // spec.num_kv_heads
        dtype = getattr(torch, spec.dtype)
        self._config = choose_config(group, spec.head_size, dtype, exact=spec.exact)
        size = workspace_size(
            limits.max_num_seqs,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_size,
            limits.max_model_len,
            partition=self._config.partition,
        )
        self._workspace = torch.empty(size, dtype=torch.float32, device=device_of(spec))

    def build(self, common: CommonAttentionMetadata) -> TritonMetadata:
        from tokenmill.kernels.gpu.attention_launch import plan_attention

        plan_attention(
            common.query_start_loc,
            common.seq_lens,
            self._workspace,
            num_heads=self._spec.num_heads,
            num_kv_heads=self._spec.num_kv_heads,
            head_size=self._spec.head_size,
            config=self._config,
            sliding_window=self._spec.sliding_window,
        )
        return TritonMetadata(common, self._workspace, self._config)


class TritonImpl:
    """One layer's attention.

    Its owner sets what only weights say: the sinks, [num_heads], and the scales of a float8 cache
    (true value / cache value).
    """

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self.sinks: torch.Tensor | None = None
        self.k_scale = 1.0
        self.v_scale = 1.0

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

        assert isinstance(metadata, TritonMetadata)
        assert self._spec.has_sinks == (self.sinks is not None)
        common = metadata.common
        scales = (self.k_scale, self.v_scale)
        slots = common.slot_mapping
        query = write_step(query, key, value, rotation, kv_cache, slots, *scales)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
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
            scale=self._spec.scale,
            sliding_window=self._spec.sliding_window,
            logits_soft_cap=self._spec.logits_soft_cap,
            sinks=self.sinks,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            causal=common.causal,
            config=metadata.config,
            planned=True,
        )
        return out
