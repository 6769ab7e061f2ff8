"""Attention by the FlashInfer library, where it is installed.

Source: https://docs.flashinfer.ai. It plans each step on the host, so a step must wait for its
lengths, and cannot be recorded.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

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
    refuse_recording,
    write_step,
)
from tokenmill.attention.reasons import (
    dtype_reasons,
    exact_reasons,
    no_latents_reasons,
    shape_reasons,
)
from tokenmill.config.dtypes import FLOAT8

DTYPES = ("bfloat16", "float16")
HEAD_SIZES = (64, 128, 256)
WORKSPACE_BYTES = 128 << 20
"""What the library recommends."""
LAYOUT = "NHD"
"""The library's name for blocks of [tokens, heads, size]."""
TENSOR_CORE_GROUP = 4
"""Query heads per KV head from which on its decoding is faster on matrix units."""


def find_flashinfer() -> ModuleType | str:
    """The module, or why there is none."""
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        return f"flashinfer cannot be imported ({error}): pip install flashinfer-python"


@dataclass(frozen=True, slots=True)
class FlashInferMetadata:
    """One step, and the library's object that has planned it."""

    common: CommonAttentionMetadata
    wrapper: Any


class FlashInferBackend:
    """FlashInfer's paged prefill and decode."""

    name = "flashinfer"
    supports_graphs = False

    def unsupported_reasons(self, spec: AttentionSpec) -> list[str]:
        reasons = [
            *device_reasons(spec, (8, 9) if spec.kv_dtype == FLOAT8 else (8, 0)),
            *dtype_reasons(spec, DTYPES, (FLOAT8,)),
            *shape_reasons(spec, max(HEAD_SIZES)),
            *exact_reasons(spec),
            *no_latents_reasons(spec),
        ]
        if spec.head_size not in HEAD_SIZES:
            sizes = ", ".join(map(str, HEAD_SIZES))
            reasons.append(f"head size {spec.head_size} is not one of {sizes}")
        if spec.has_sinks:
            reasons.append("attention sinks need a kernel of its own")
        module = find_flashinfer()
        if isinstance(module, str):
            reasons.append(module)
        return reasons

    def get_kv_cache_shape(self, spec: AttentionSpec, num_blocks: int) -> tuple[int, ...]:
        return kv_cache_shape(spec, num_blocks)

    def make_metadata_builder(
        self, spec: AttentionSpec, limits: CacheLimits
    ) -> FlashInferMetadataBuilder:
        return FlashInferMetadataBuilder(spec)

    def make_impl(self, spec: AttentionSpec) -> FlashInferImpl:
        return FlashInferImpl(spec)


class FlashInferMetadataBuilder:
    """Plans a step: one of the library's objects decodes, the other takes any batch."""

    def __init__(self, spec: AttentionSpec) -> None:
        module = find_flashinfer()
        assert isinstance(module, ModuleType), module
        self._spec = spec
        self._dtype = getattr(torch, spec.dtype)
        self._kv_dtype = getattr(torch, spec.kv_dtype or spec.dtype)
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device_of(spec))
        self._prefill = module.BatchPrefillWithPagedKVCacheWrapper(workspace, LAYOUT)
        self._decode = module.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            LAYOUT,
            use_tensor_cores=spec.num_heads // spec.num_kv_heads >= TENSOR_CORE_GROUP,
        )

    def build(self, common: CommonAttentionMetadata) -> FlashInferMetadata:
        spec, block_size = self._spec, self._spec.block_size
        num_blocks = (common.seq_lens + block_size - 1) // block_size
        indptr = torch.nn.functional.pad(num_blocks.cumsum(0, dtype=torch.int32), (1, 0))
        columns = torch.arange(common.block_table.shape[1], device=num_blocks.device)
        indices = common.block_table[columns < num_blocks[:, None]]
        last_len = common.seq_lens - (num_blocks - 1).clamp(min=0) * block_size
        # What it plans with is read on the host: one wait for each.
        blocks = (indptr.cpu(), indices, last_len.cpu())
        sizes = (spec.num_heads, spec.num_kv_heads, spec.head_size, block_size)
        options = {
            "sm_scale": spec.scale,
            "window_left": -1 if spec.sliding_window is None else spec.sliding_window - 1,
            "logits_soft_cap": spec.logits_soft_cap,
            "q_data_type": self._dtype,
            "kv_data_type": self._kv_dtype,
        }
        is_decode = common.max_query_len == 1 and common.num_tokens == common.num_reqs
        # A single token sees all keys whether it is causal or not.
        if is_decode:
            self._decode.plan(*blocks, *sizes, **options)
            return FlashInferMetadata(common, self._decode)
        starts = common.query_start_loc.cpu()
        self._prefill.plan(starts, *blocks, *sizes, causal=common.causal, **options)
        return FlashInferMetadata(common, self._prefill)


class FlashInferImpl:
    """One layer's attention; its owner sets the scales of a float8 cache."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
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
        assert isinstance(metadata, FlashInferMetadata)
        refuse_recording(FlashInferBackend.name)
        slots, scales = metadata.common.slot_mapping, (self.k_scale, self.v_scale)
        query = write_step(query, key, value, rotation, kv_cache, slots, *scales)
        heads = query.reshape(len(query), -1, self._spec.head_size)
        out: torch.Tensor = metadata.wrapper.run(
            heads.contiguous(), kv_cache, k_scale=self.k_scale, v_scale=self.v_scale
        )
        return out.flatten(1)
