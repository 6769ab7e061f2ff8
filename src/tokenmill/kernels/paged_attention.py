"""Attention over a paged cache, natively: prefill, decode and mixed batches in one call.

The cache has a layout of its own, made for the processor's matrix tiles (csrc/attention_kernels.h);
only the functions here read or write it. Of one layer:

    [num_blocks][K, V][num_kv_heads][block_size tokens of head_size values]

Where values are parts of keys (`value_offset`), there is no V.

A row's result has the same bits alone, in any batch, in any chunk and with any number of threads.
Keys are read in partitions of 256 from multiples of 256 on, and these are merged in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from tokenmill.kernels import native

KV_DTYPES = ("bfloat16", "float32", "int8")
HEAD_SIZES = (64, 80, 96, 128, 192, 256, 576)
BLOCK_SIZE_UNIT = 32
"""Tokens that a tile of V holds; a block consists of whole tiles."""
VALUE_OFFSET_UNIT = 16
"""Values of a key that are put in another order together."""


@dataclass(frozen=True, slots=True)
class PagedAttentionShape:
    """What the kernels need to know of a layer."""

    kv_dtype: str
    """`bfloat16`, `float32`, or `int8` with a scale per token and head."""
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    scale: float
    logits_soft_cap: float | None = None
    sliding_window: int | None = None
    """Tokens that a query sees, itself included; None sees all."""
    causal: bool = True
    value_offset: int | None = None
    """Values of a token are those of its key from here on (a multiple of 16), and are not stored;
    None: they are."""
    handle: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self,
            "handle",
            native.module().AttentionShape(
                kv_dtype=self.kv_dtype,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_size=self.head_size,
                block_size=self.block_size,
                scale=self.scale,
                soft_cap=self.logits_soft_cap or 0.0,
                window=self.sliding_window or 0,
                causal=self.causal,
                value_offset=-1 if self.value_offset is None else self.value_offset,
            ),
        )

    @property
    def value_size(self) -> int:
        """Values of a head in the result."""
        return self.head_size - (self.value_offset or 0)


def unsupported_reasons(
    kv_dtype: str,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    value_offset: int | None = None,
) -> list[str]:
    """Why the kernels cannot serve such a layer on this machine; empty if they can."""
    reasons = []
    if not native.is_available():
        reasons.append(
            "there are no native kernels for this processor, or TOKENMILL_ISA forbids them"
        )
    if kv_dtype not in KV_DTYPES:
        reasons.append(f"KV dtype {kv_dtype!r} is not one of {', '.join(KV_DTYPES)}")
    if head_size not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        reasons.append(f"head size {head_size} is not one of {sizes}")
    if block_size % BLOCK_SIZE_UNIT:
        reasons.append(f"block_size {block_size} is not a multiple of {BLOCK_SIZE_UNIT}")
    if value_offset is not None and value_offset % VALUE_OFFSET_UNIT:
        reasons.append(f"value offset {value_offset} is not a multiple of {VALUE_OFFSET_UNIT}")
    if num_heads % num_kv_heads:
        reasons.append(f"{num_heads} heads cannot be shared among {num_kv_heads} KV heads")
    return reasons


def kv_cache_shape(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    kv_dtype: str,
    value_offset: int | None = None,
) -> tuple[int, ...]:
    """Shape of one layer's cache tensor, whose dtype is `kv_dtype`.

    An int8 token has its float32 scale in four values behind its group.
    """
    values = head_size + 4 if kv_dtype == "int8" else head_size
    return (num_blocks, 2 if value_offset is None else 1, num_kv_heads, block_size * values)


class AttentionPlan:
    """The work of one step, cut into tasks; serves all layers of one shape.

    Layers may differ in scale and soft cap, but not in heads, sizes, window or causality.
    """

    def __init__(self) -> None:
        self.handle = native.module().AttentionPlan()

    def build(
        self,
        shape: PagedAttentionShape,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        num_blocks: int,
    ) -> None:
        """Take over a step's tables, as described in `attention/backend.py`; all are int32.

        Raises `ValueError` if they contradict each other or name blocks beyond `num_blocks`.
        """
        self.handle.build(shape.handle, query_start_loc, seq_lens, block_table, num_blocks)


def paged_attention(
    shape: PagedAttentionShape,
    plan: AttentionPlan,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attend from query [num_tokens, num_heads * head_size] to the cache, into out
    [num_tokens, num_heads * value_size].

    Both are bfloat16 or float32, with rows that may lie apart. Keys and values of the step are read
    from the cache, so they must have been written. What lies behind `seq_lens` may be anything.
    `sinks`, float32 [num_heads], are scores without a value, one in each softmax of a head.
    """
    native.module().attention(shape.handle, plan.handle, query, kv_cache, out, sinks)


def write_kv(
    shape: PagedAttentionShape,
    key: torch.Tensor,
    value: torch.Tensor | None,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Store key and value, each [num_tokens, num_kv_heads * head_size], in int64 slots.

    A negative slot stores nothing. The value is None where it is part of the key.
    """
    native.module().write_kv(shape.handle, key, value, kv_cache, slot_mapping)


def rotate_and_write_kv(
    shape: PagedAttentionShape,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    out_query: torch.Tensor,
) -> None:
    """Rotate queries into out_query [num_tokens, num_heads * head_size], and store keys and values.

    query has out_query's shape, key and value are [num_tokens, num_kv_heads * head_size]; rows may
    lie apart. Positions are int64 [num_tokens]; cos and sin are float32
    [max positions, rotary_dim / 2] and pair elements as `kernels/rotary.py` does.
    """
    native.module().write_kv(
        shape.handle, key, value, kv_cache, slot_mapping, query, out_query, positions, cos, sin
    )
