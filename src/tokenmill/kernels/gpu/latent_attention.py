"""Attention over a paged cache of latents on the GPU: one key a token for all heads, whose part
behind its rotated one is its value (`models/deepseek.py`).

The kernels are those of keys and values. A tile takes as many heads of a token as it has rows, so
that a key is read once for them, and programs of other heads read it while it is in L2. Prompts and
decoding requests are walked alike: a token has the same bits in any batch, and in a prompt, in a
piece of it, and decoded.
"""

from __future__ import annotations

from typing import Any

import torch

from tokenmill.kernels.gpu.attention_cases import shape_cases
from tokenmill.kernels.gpu.attention_config import AttentionConfig, choose_latent_config
from tokenmill.kernels.gpu.attention_launch import (
    LayerCall,
    attend,
    plan_attention,
    plan_size,
    score_factors,
    workspace_size,
)
from tokenmill.kernels.gpu.attention_shape import KernelShape, kernel_shapes
from tokenmill.kernels.gpu.launch import CompileCase, define_op
from tokenmill.kernels.gpu.overlap import overlaps

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_VALUE_SIZE = 512
"""Of a head: a tile's sums must fit in registers, twice."""
MAX_ROTATED = 128


def tile_groups(num_heads: int, config: AttentionConfig) -> int:
    """Into how many groups the heads are cut, each with a tile of its own."""
    most = min(config.split.block_m, num_heads)
    return num_heads // next(size for size in range(most, 0, -1) if num_heads % size == 0)


def latent_workspace_size(
    max_num_reqs: int,
    num_heads: int,
    value_size: int,
    max_seq_len: int,
    *,
    config: AttentionConfig,
    **options: int,
) -> int:
    """As `workspace_size`."""
    groups = tile_groups(num_heads, config)
    sizes = max_num_reqs, num_heads, groups, value_size, max_seq_len
    return workspace_size(*sizes, partition=config.partition, **options)


def plan_latent_attention(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    workspace: torch.Tensor,
    *,
    num_heads: int,
    value_size: int,
    config: AttentionConfig,
) -> None:
    """As `plan_attention`."""
    plan_attention(
        query_start_loc,
        seq_lens,
        workspace,
        num_heads=num_heads,
        num_kv_heads=tile_groups(num_heads, config),
        head_size=value_size,
        config=config,
    )


def latent_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    out: torch.Tensor,
    *,
    rotated: int,
    workspace: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    k_scale: float = 1.0,
    config: AttentionConfig | None = None,
    planned: bool = False,
) -> None:
    """Attend from query [num_tokens, num_heads * key_size] to the cache, into out [num_tokens,
    num_heads * value_size].

    The cache is [num_blocks, 1, block_size, 1, key_size]; of a key, the first `rotated` elements
    are no part of its value, so value_size = key_size - rotated. Dtypes, tables, the workspace (of
    `latent_workspace_size`), bounds and the config (of `choose_latent_config`) are as for
    `paged_attention`; with `planned`, `plan_latent_attention` has been called.
    """
    key_size = cache.shape[4]
    num_heads, value_size = query.shape[1] // key_size, key_size - rotated
    _check(query, cache, block_table, seq_lens, query_start_loc, out, workspace, rotated)
    config = config or choose_latent_config(query.dtype)
    if not len(seq_lens) or not len(query):
        return
    if not planned:
        sizes = {"num_heads": num_heads, "value_size": value_size}
        plan_latent_attention(query_start_loc, seq_lens, workspace, config=config, **sizes)
    call = LayerCall(
        query,
        cache,
        (block_table, seq_lens, query_start_loc),
        workspace,
        None,
        out,
        (*score_factors(scale * k_scale, None), k_scale),
        config,
        overlaps(query.device),
    )
    sizes_of_cache = rotated, cache.shape[2], cache.stride(0)
    shapes = _kernel_shapes(num_heads, value_size, *sizes_of_cache, config)
    attend(call, shapes, max_query_len, max_seq_len)


def _kernel_shapes(
    num_heads: int,
    value_size: int,
    rotated: int,
    block_size: int,
    block_stride: int,
    config: AttentionConfig,
) -> tuple[KernelShape, KernelShape]:
    groups = tile_groups(num_heads, config)
    sizes = num_heads, groups, value_size, block_size, block_stride
    return kernel_shapes(*sizes, None, True, False, False, config, rotated)


def latent_attention_reference(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    out: torch.Tensor,
    *,
    rotated: int,
    scale: float,
    k_scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
    **launch: Any,
) -> None:
    """`latent_attention` in torch, dense, request by request, in `dtype`."""
    block_size, key_size = cache.shape[2], cache.shape[4]
    starts = query_start_loc.tolist()
    for req, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[req], starts[req + 1])
        if rows.start == rows.stop:
            continue
        blocks = block_table[req, : -(-seq_len // block_size)].long()
        keys = cache[blocks].reshape(-1, key_size)[:seq_len].to(dtype) * k_scale
        q = query[rows].unflatten(1, (-1, key_size)).to(dtype)
        at = torch.arange(seq_len - len(q), seq_len, device=q.device)
        hidden = torch.arange(seq_len, device=q.device) > at[:, None, None]
        weights = (q @ keys.t() * scale).masked_fill(hidden, -torch.inf).softmax(-1)
        out[rows] = (weights @ keys[:, rotated:]).flatten(1).to(out.dtype)


define_op(
    "latent_attention(Tensor query, Tensor cache, Tensor block_table, Tensor seq_lens,"
    " Tensor query_start_loc, Tensor(a!) out, *, int rotated, Tensor(b!) workspace,"
    " int max_query_len, int max_seq_len, float scale, float k_scale=1.0) -> ()",
    cuda=latent_attention,
    cpu=latent_attention_reference,
)


def _check(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor,
    rotated: int,
) -> None:
    assert query.dtype in DTYPES
    assert cache.dtype in (query.dtype, torch.float8_e4m3fn)
    assert cache.shape[1] == cache.shape[3] == 1
    assert cache[:1].is_contiguous()
    key_size = cache.shape[4]
    assert query.shape[1] % key_size == 0
    assert 0 < rotated <= MAX_ROTATED
    assert 0 < key_size - rotated <= MAX_VALUE_SIZE
    assert out.shape == (len(query), query.shape[1] // key_size * (key_size - rotated))
    assert query.stride(1) == out.stride(1) == block_table.stride(1) == 1
    assert block_table.dtype == seq_lens.dtype == query_start_loc.dtype == torch.int32
    assert len(block_table) == len(seq_lens) == len(query_start_loc) - 1
    assert seq_lens.is_contiguous()
    assert query_start_loc.is_contiguous()
    assert workspace.dtype == torch.float32
    assert workspace.is_contiguous()
    assert len(workspace) >= plan_size(len(seq_lens))


def compile_cases() -> list[CompileCase]:
    """DeepSeek V2-Lite and V3, whose heads take four tiles a token; a float8 cache, and float32."""
    return [
        *_cases("16", 16, torch.bfloat16),
        *_cases("128", 128, torch.bfloat16),
        *_cases("128 float8 blocks of 16", 128, torch.bfloat16, "*fp8e4nv", 16),
        *_cases("16 float32", 16, torch.float32),
    ]


def _cases(
    name: str,
    num_heads: int,
    dtype: torch.dtype,
    cache_type: str | None = None,
    block_size: int = 64,
) -> list[CompileCase]:
    config = choose_latent_config(dtype)
    split, prefill = _kernel_shapes(num_heads, 512, 64, block_size, block_size * 576, config)
    type_ = "*fp32" if dtype == torch.float32 else "*bf16"
    return list(shape_cases(f"latents {name}", config, split, prefill, type_, cache_type))
