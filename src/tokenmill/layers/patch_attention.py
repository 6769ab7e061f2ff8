"""Attention in both directions among the patches of an image, or of parts of it.

    run            patches that see each other, and no others: an image, or a window of it
    native         the kernels of the decoder, over a cache that lasts for one call
    torch          scaled_dot_product_attention, run by run: where the kernels do not serve

Heads that are too small for the kernels are filled up with zeros, which add nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch.nn import functional

from tokenmill.attention.backend import Rotation
from tokenmill.attention.cpu import CpuImpl, CpuMetadata
from tokenmill.kernels.paged_attention import (
    HEAD_SIZES,
    AttentionPlan,
    PagedAttentionShape,
    kv_cache_shape,
)
from tokenmill.kernels.rotary import apply_rotary
from tokenmill.layers.kernels import LayerKernels
from tokenmill.layers.packed import NativeKernels

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine of each patch, float32 [N, at most head_size / 2]."""

_BLOCK_SIZE = 64
_LARGEST_HEAD = 256
"""Larger ones that kernels have are for latents."""


def attend_patches(
    kernels: LayerKernels,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    angles: Angles | None = None,
    lengths: Sequence[int] | None = None,
) -> torch.Tensor:
    """Attend from query to key and value, all [N, num_heads, head_size]; the same shape.

    Queries and keys are rotated by `angles`. Runs have these `lengths`, which add up to N; by
    default all patches are one. A result's bits depend on its run alone.
    """
    lengths = [len(query)] if lengths is None else lengths
    if isinstance(kernels, NativeKernels) and query.shape[-1] <= _LARGEST_HEAD:
        return _native(query, key, value, angles, lengths)
    if angles is not None:
        query, key = apply_rotary(query, *angles), apply_rotary(key, *angles)
    runs = [
        _all_to_all(query[start:end], key[start:end], value[start:end])
        for start, end in pairwise([0, *accumulate(lengths)])
    ]
    return torch.cat(runs)


def _all_to_all(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    query, key, value = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
    attended = functional.scaled_dot_product_attention(query, key, value)
    return attended.squeeze(0).transpose(0, 1)


def _native(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    angles: Angles | None,
    lengths: Sequence[int],
) -> torch.Tensor:
    num_patches, num_heads, head_size = query.shape
    dtype = str(query.dtype).removeprefix("torch.")
    shape = _shape(dtype, num_heads, head_size)
    more = shape.head_size - head_size
    query, key, value = (functional.pad(e, (0, more)).flatten(1) for e in (query, key, value))
    metadata, num_blocks = _metadata(shape, lengths)
    # Zeros: what is behind a run's end is multiplied by 0, and must not be NaN.
    cache = torch.zeros(
        kv_cache_shape(num_blocks, _BLOCK_SIZE, num_heads, shape.head_size, dtype),
        dtype=query.dtype,
    )
    rotation = None if angles is None else Rotation(torch.arange(num_patches), *angles)
    impl = CpuImpl(shape, has_sinks=False)
    attended = impl.forward(query, key, value, rotation, cache, metadata)
    return attended.view(num_patches, num_heads, -1)[..., :head_size]


@functools.cache
def _shape(dtype: str, num_heads: int, head_size: int) -> PagedAttentionShape:
    return PagedAttentionShape(
        kv_dtype=dtype,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=next(size for size in HEAD_SIZES if size >= head_size),
        block_size=_BLOCK_SIZE,
        scale=head_size**-0.5,
        causal=False,
    )


def _metadata(shape: PagedAttentionShape, lengths: Sequence[int]) -> tuple[CpuMetadata, int]:
    """Runs as requests, each in blocks of its own; and the number of blocks."""
    sizes = torch.tensor(lengths)
    blocks = (sizes + _BLOCK_SIZE - 1) // _BLOCK_SIZE
    first_blocks = blocks.cumsum(0) - blocks
    starts = torch.tensor([0, *accumulate(lengths)])
    table = first_blocks[:, None] + torch.arange(int(blocks.max()))
    num_blocks = int(blocks.sum())
    slots = first_blocks * _BLOCK_SIZE - starts[:-1]
    plan = AttentionPlan()
    plan.build(
        shape,
        starts.int(),
        sizes.int(),
        table.clamp(max=num_blocks - 1).int(),
        num_blocks,
    )
    in_order = torch.arange(int(starts[-1]))
    return CpuMetadata(plan, in_order + slots.repeat_interleave(sizes)), num_blocks
