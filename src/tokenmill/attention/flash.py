"""Attention by the FlashAttention library, where it is installed.

    flash_attn              version 2, Ampere and later; blocks of 256 tokens and multiples
    flash_attn_interface    version 3, Hopper; any block size

Source: https://github.com/Dao-AILab/flash-attention. It is faster than ours at most sizes, but sums
in an order that depends on the batch.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

import torch

from tokenmill.attention.backend import (
    AttentionMetadata,
    AttentionSpec,
    CacheLimits,
    CommonAttentionMetadata,
    Rotation,
)
from tokenmill.attention.cuda import (
    compute_capability,
    device_of,
    device_reasons,
    kv_cache_shape,
    write_step,
)
from tokenmill.attention.reasons import (
    dtype_reasons,
    exact_reasons,
    no_latents_reasons,
    no_sinks_reasons,
    shape_reasons,
)

DTYPES = ("bfloat16", "float16")
MAX_HEAD_SIZE = 256
HEAD_SIZE_UNIT = 8
BLOCK_SIZE_UNIT = 256
"""Of version 2."""
LOWEST_VERSION = (2, 6)
"""The first version 2 whose function for packed requests has block tables and a soft cap."""


def find_version_2() -> ModuleType | str:
    """The module `flash_attn`, or why there is none."""
    try:
        module = importlib.import_module("flash_attn")
    except ImportError as error:
        return f"flash_attn cannot be imported ({error}): pip install flash-attn"
    version = tuple(int(part) for part in module.__version__.split(".")[:2])
    if version < LOWEST_VERSION:
        lowest = ".".join(map(str, LOWEST_VERSION))
        return f"flash_attn {module.__version__} is older than {lowest}: pip install -U flash-attn"
    return module


def find_version_3() -> ModuleType | None:
    """The module `flash_attn_interface`, where it is installed and the GPU is a Hopper."""
    if compute_capability() not in (None, (9, 0)):
        return None
    try:
        return importlib.import_module("flash_attn_interface")
    except ImportError:
        return None


@dataclass(frozen=True, slots=True)
class FlashMetadata:
    """One step."""

    common: CommonAttentionMetadata
    key_start_loc: torch.Tensor
    """int32 [num_reqs + 1], the running sum of seq_lens"""


class FlashBackend:
    """FlashAttention, version 3 where it can be had, else version 2."""

    name = "flash_attn"
    supports_graphs = True

    def unsupported_reasons(self, spec: AttentionSpec) -> list[str]:
        reasons = [
            *device_reasons(spec, (8, 0)),
            *dtype_reasons(spec, DTYPES),
            *shape_reasons(spec, MAX_HEAD_SIZE),
            *exact_reasons(spec),
            *no_sinks_reasons(spec),
            *no_latents_reasons(spec),
        ]
        if spec.head_size % HEAD_SIZE_UNIT:
            reasons.append(f"head size {spec.head_size} is not a multiple of {HEAD_SIZE_UNIT}")
        if find_version_3() is None:
            version_2 = find_version_2()
            if isinstance(version_2, str):
                reasons.append(version_2)
            if spec.block_size % BLOCK_SIZE_UNIT:
                reasons.append(
                    f"version 2 reads blocks of multiples of {BLOCK_SIZE_UNIT} tokens,"
                    f" block_size is {spec.block_size}"
                )
        return reasons

    def get_kv_cache_shape(self, spec: AttentionSpec, num_blocks: int) -> tuple[int, ...]:
        return kv_cache_shape(spec, num_blocks)

    def make_metadata_builder(
        self, spec: AttentionSpec, limits: CacheLimits
    ) -> FlashMetadataBuilder:
        return FlashMetadataBuilder(spec, limits)

    def make_impl(self, spec: AttentionSpec) -> FlashImpl:
        return FlashImpl(spec)


class FlashMetadataBuilder:
    """Sums up lengths, into a buffer that recorded steps read."""

    def __init__(self, spec: AttentionSpec, limits: CacheLimits) -> None:
        self._key_start_loc = torch.zeros(
            limits.max_num_seqs + 1, dtype=torch.int32, device=device_of(spec)
        )

    def build(self, common: CommonAttentionMetadata) -> FlashMetadata:
        key_start_loc = self._key_start_loc[: common.num_reqs + 1]
        torch.cumsum(common.seq_lens, 0, dtype=torch.int32, out=key_start_loc[1:])
        return FlashMetadata(common, key_start_loc)


class FlashImpl:
    """One layer's attention."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        version_3 = find_version_3()
        self._attend = self._attend_2 if version_3 is None else self._attend_3
        self._module = version_3 or find_version_2()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        assert isinstance(metadata, FlashMetadata)
        slots = metadata.common.slot_mapping
        query = write_step(query, key, value, rotation, kv_cache, slots)
        heads = query.reshape(len(query), -1, self._spec.head_size)
        return self._attend(heads, kv_cache, metadata).flatten(1)

    def _attend_2(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: FlashMetadata
    ) -> torch.Tensor:
        assert isinstance(self._module, ModuleType)
        common = metadata.common
        # With 1 the library takes it that every request has a token.
        max_query_len = common.max_query_len
        if common.num_tokens != common.num_reqs:
            max_query_len = max(max_query_len, 2)
        out: torch.Tensor = self._module.flash_attn_varlen_func(
            query,
            kv_cache[:, 0],
            kv_cache[:, 1],
            cu_seqlens_q=common.query_start_loc,
            cu_seqlens_k=metadata.key_start_loc,
            max_seqlen_q=max_query_len,
            max_seqlen_k=common.max_seq_len,
            softmax_scale=self._spec.scale,
            causal=common.causal,
            window_size=self._window(common.causal),
            softcap=self._spec.logits_soft_cap or 0.0,
            block_table=common.block_table,
        )
        return out

    def _attend_3(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: FlashMetadata
    ) -> torch.Tensor:
        assert isinstance(self._module, ModuleType)
        common = metadata.common
        out: torch.Tensor = self._module.flash_attn_with_kvcache(
            query,
            kv_cache[:, 0],
            kv_cache[:, 1],
            cache_seqlens=common.seq_lens,
            page_table=common.block_table,
            cu_seqlens_q=common.query_start_loc,
            max_seqlen_q=common.max_query_len,
            softmax_scale=self._spec.scale,
            causal=common.causal,
            window_size=self._window(common.causal),
            softcap=self._spec.logits_soft_cap or 0.0,
        )
        return out

    def _window(self, causal: bool) -> tuple[int, int]:
        """Keys to the left and to the right of a query that it sees; -1 is all."""
        window = self._spec.sliding_window
        return (-1 if window is None else window - 1, 0 if causal else -1)
