"""Attention by torch's own function, request by request over a gathered copy of its cache.

The last resort on a GPU: it needs no other library, but copies every key and value of the batch in
each layer, and waits for the lengths of each step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenmill.attention.backend import (
    AttentionMetadata,
    AttentionSpec,
    CacheLimits,
    CommonAttentionMetadata,
    Rotation,
)
from tokenmill.attention.cuda import (
    kv_cache_shape,
    refuse_recording,
)
from tokenmill.attention.reasons import (
    dtype_reasons,
    exact_reasons,
    no_latents_reasons,
    no_sinks_reasons,
    shape_reasons,
)
from tokenmill.config.dtypes import FLOAT8
from tokenmill.kernels.rotary import apply_rotary

DTYPES = ("float32", "bfloat16", "float16")
MAX_HEAD_SIZE = 1024


@dataclass(frozen=True, slots=True)
class _Request:
    """One request's part of a step."""

    rows: slice
    """Of the flat batch."""
    seq_len: int
    blocks: torch.Tensor
    """int64, those of its keys"""
    visible: torch.Tensor | None
    """bool [query_len, seq_len], or None where all see all"""


@dataclass(frozen=True, slots=True)
class SdpaMetadata:
    """One step."""

    requests: list[_Request]
    tokens: torch.Tensor
    """int64, those that have a slot"""
    slots: torch.Tensor
    """int64, theirs"""


class SdpaBackend:
    """torch.nn.functional.scaled_dot_product_attention."""

    name = "sdpa"
    supports_graphs = False

    def unsupported_reasons(self, spec: AttentionSpec) -> list[str]:
        reasons = [
            *dtype_reasons(spec, DTYPES, (FLOAT8,)),
            *shape_reasons(spec, MAX_HEAD_SIZE),
            *exact_reasons(spec),
            *no_sinks_reasons(spec),
            *no_latents_reasons(spec),
        ]
        if spec.logits_soft_cap is not None:
            reasons.append("it has no soft cap of logits")
        return reasons

    def get_kv_cache_shape(self, spec: AttentionSpec, num_blocks: int) -> tuple[int, ...]:
        return kv_cache_shape(spec, num_blocks)

    def make_metadata_builder(
        self, spec: AttentionSpec, limits: CacheLimits
    ) -> SdpaMetadataBuilder:
        return SdpaMetadataBuilder(spec)

    def make_impl(self, spec: AttentionSpec) -> SdpaImpl:
        return SdpaImpl(spec)


class SdpaMetadataBuilder:
    """Reads a step's lengths, and masks what its tokens do not see."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec

    def build(self, common: CommonAttentionMetadata) -> SdpaMetadata:
        starts = common.query_start_loc.tolist()
        size = self._spec.block_size
        requests = [
            _Request(
                rows=slice(starts[req], starts[req + 1]),
                seq_len=seq_len,
                blocks=common.block_table[req, : -(-seq_len // size)].long(),
                visible=self._visible(common, starts[req + 1] - starts[req], seq_len),
            )
            for req, seq_len in enumerate(common.seq_lens.tolist())
            if starts[req + 1] > starts[req]
        ]
        tokens = (common.slot_mapping >= 0).nonzero().squeeze(1)
        return SdpaMetadata(requests, tokens, common.slot_mapping[tokens])

    def _visible(
        self, common: CommonAttentionMetadata, query_len: int, seq_len: int
    ) -> torch.Tensor | None:
        window = self._spec.sliding_window
        if window is None and (query_len == 1 or not common.causal):
            return None
        keys = torch.arange(seq_len, device=common.seq_lens.device)
        positions = keys[seq_len - query_len :, None]
        visible = keys <= positions if common.causal else (keys >= 0).expand(query_len, -1)
        return visible if window is None else visible & (keys > positions - window)


class SdpaImpl:
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
        assert isinstance(metadata, SdpaMetadata)
        refuse_recording(SdpaBackend.name)
        size = self._spec.head_size
        q, k, v = (x.reshape(len(x), -1, size) for x in (query, key, value))
        if rotation is not None:
            cos, sin = rotation.cos[rotation.positions], rotation.sin[rotation.positions]
            q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        self._write(kv_cache, metadata, k / self.k_scale, v / self.v_scale)
        out = torch.zeros_like(q)
        for request in metadata.requests:
            out[request.rows] = self._attend(q[request.rows], kv_cache, request)
        return out.flatten(1)

    def _write(
        self, kv_cache: torch.Tensor, metadata: SdpaMetadata, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        block, offset = metadata.slots // kv_cache.shape[2], metadata.slots % kv_cache.shape[2]
        for index, new in enumerate((key, value)):
            if kv_cache.dtype == torch.float8_e4m3fn:
                largest = torch.finfo(kv_cache.dtype).max
                new = new.clamp(-largest, largest)
            kv_cache[block, index, offset] = new[metadata.tokens].to(kv_cache.dtype)

    def _attend(
        self, query: torch.Tensor, kv_cache: torch.Tensor, request: _Request
    ) -> torch.Tensor:
        """Output [query_len, num_heads, head_size] of query of that shape."""
        # [K and V, tokens, KV heads, head size]
        tokens = kv_cache[request.blocks].transpose(0, 1).flatten(1, 2)[:, : request.seq_len]
        key, value = (tokens[i].to(query.dtype).transpose(0, 1)[None] for i in (0, 1))
        out = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key * self.k_scale,
            value * self.v_scale,
            attn_mask=request.visible,
            scale=self._spec.scale,
            enable_gqa=self._spec.num_heads != self._spec.num_kv_heads,
        )
        return out[0].transpose(0, 1)
