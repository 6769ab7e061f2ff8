"""Attention over a paged cache on the GPU: prefill, decode and mixed batches in one call.

Requests of few tokens (decoding, with or without drafts) have their keys split among programs
(`attention_split.py`), the others take a program per tile of queries (`attention_prefill.py`). Both
read K and V from the cache, those of this step's own tokens too.

A token's result has the same bits alone and in any batch. With an exact config, also whether its
request computes one token, a piece of a prompt, or all of it.
"""

from __future__ import annotations

from typing import Any

import torch

from tokenmill.kernels.gpu.attention_config import AttentionConfig, choose_config
from tokenmill.kernels.gpu.attention_launch import (
    LayerCall,
    attend,
    plan_attention,
    plan_size,
    score_factors,
)
from tokenmill.kernels.gpu.attention_reference import paged_attention_reference
from tokenmill.kernels.gpu.attention_shape import kernel_shapes
from tokenmill.kernels.gpu.launch import define_op
from tokenmill.kernels.gpu.overlap import overlaps

MAX_HEAD_SIZE = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    out: torch.Tensor,
    *,
    workspace: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    causal: bool = True,
    exact: bool = False,
    config: AttentionConfig | None = None,
    planned: bool = False,
) -> None:
    """Attend from query [num_tokens, num_heads * head_size] to the cache, into out of that shape.

    kv_cache is [num_blocks, 2, block_size, num_kv_heads, head_size] of the queries' dtype
    (bfloat16, float16, float32) or float8_e4m3fn, with scales (true value / cache value). Blocks
    may lie apart, and rows of query and out. block_table is int32 [num_reqs, max_blocks], seq_lens
    int32 [num_reqs], this step's tokens included, query_start_loc int32 [num_reqs + 1]; requests
    without tokens, and rows behind the last request's, write nothing. sinks, [num_heads], are
    logits that take part in the softmax of a head without a value of their own.

    The workspace is float32, of `workspace_size`, and this call's own until it has ended. The
    launch depends on max_query_len and max_seq_len, which are upper bounds. The config, which
    `choose_config` makes for `exact` unless it is given, must stay the same for the same bits.
    With `planned`, `plan_attention` has been called for this step.
    """
    _check(query, kv_cache, block_table, seq_lens, query_start_loc, out, workspace)
    num_kv_heads, head_size = kv_cache.shape[3:]
    num_heads = query.shape[1] // head_size
    config = config or choose_config(num_heads // num_kv_heads, head_size, query.dtype, exact=exact)
    tables = (block_table, seq_lens, query_start_loc)
    factors = (*score_factors(scale * k_scale, logits_soft_cap), v_scale)
    call = LayerCall(
        query, kv_cache, tables, workspace, sinks, out, factors, config, overlaps(query.device)
    )
    if not len(seq_lens) or not len(query):
        return
    if not planned:
        sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size}
        how: dict[str, Any] = {"config": config, "sliding_window": sliding_window, **sizes}
        plan_attention(query_start_loc, seq_lens, workspace, **how)
    of_layer = num_heads, num_kv_heads, head_size, kv_cache.shape[2], kv_cache.stride(0)
    wants = sliding_window, causal, logits_soft_cap is not None, sinks is not None
    shapes = kernel_shapes(*of_layer, *wants, config)
    attend(call, shapes, max_query_len, max_seq_len)


def paged_attention_cpu(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    out: torch.Tensor,
    *,
    workspace: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    exact: bool = False,
    **options: Any,
) -> None:
    """The reference, with the face of `paged_attention`: the torch op where there is no GPU."""
    paged_attention_reference(
        query, kv_cache, block_table, seq_lens, query_start_loc, out, **options
    )


define_op(
    "paged_attention(Tensor query, Tensor kv_cache, Tensor block_table, Tensor seq_lens,"
    " Tensor query_start_loc, Tensor(a!) out, *, Tensor(b!) workspace, int max_query_len,"
    " int max_seq_len, float scale, int? sliding_window=None, float? logits_soft_cap=None,"
    " Tensor? sinks=None, float k_scale=1.0, float v_scale=1.0, bool causal=True,"
    " bool exact=False) -> ()",
    cuda=paged_attention,
    cpu=paged_attention_cpu,
)


def _check(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor,
) -> None:
    assert query.dtype in DTYPES
    assert kv_cache.dtype in (query.dtype, torch.float8_e4m3fn)
    assert kv_cache.ndim == 5
    assert kv_cache.shape[1] == 2
    assert kv_cache[0].is_contiguous()
    assert query.shape[1] % (kv_cache.shape[3] * kv_cache.shape[4]) == 0
    assert kv_cache.shape[4] <= MAX_HEAD_SIZE
    assert out.shape == query.shape
    assert query.stride(1) == out.stride(1) == block_table.stride(1) == 1
    assert block_table.dtype == seq_lens.dtype == query_start_loc.dtype == torch.int32
    assert len(block_table) == len(seq_lens) == len(query_start_loc) - 1
    assert seq_lens.is_contiguous()
    assert query_start_loc.is_contiguous()
    assert workspace.dtype == torch.float32
    assert workspace.is_contiguous()
    assert len(workspace) >= plan_size(len(seq_lens))
