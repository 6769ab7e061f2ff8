"""How attention's kernels are launched: the plan of a step, and the kernels of a layer.

`attention.py` has the face for keys and values, `latent_attention.py` the one for latents.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from tokenmill.kernels.gpu.attention_config import PARTITION, AttentionConfig
from tokenmill.kernels.gpu.attention_prefill import prefill_kernel
from tokenmill.kernels.gpu.attention_shape import KernelShape
from tokenmill.kernels.gpu.attention_split import (
    PLAN_ROWS,
    merge_kernel,
    plan_kernel,
    split_kernel,
)
from tokenmill.kernels.gpu.launch import cdiv, next_power_of_2

MAX_WORKSPACE = 1 << 25
"""Float32 values that partial results take at most, unless the caller wants more."""

_LOG2_E = math.log2(math.e)
_PLAN_BLOCK = 1024
"""Requests that the plan counts at a time."""
_MERGE_ROWS = 16
"""Most rows of a merging program; with fewer it loads more partitions at a time."""
_MERGE_VALUES = 4096
"""And most of their values."""


def workspace_size(
    max_num_reqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    max_seq_len: int,
    *,
    max_split_query_len: int = 1,
    partition: int = PARTITION,
    max_values: int = MAX_WORKSPACE,
) -> int:
    """Float32 values of a workspace for steps of at most max_num_reqs requests.

    It has room for the partial results of requests with max_split_query_len tokens each, but for no
    more than max_values: a request that finds no room has fewer programs, and the same bits.
    """
    rows = max_num_reqs * max_split_query_len * cdiv(max_seq_len, partition)
    partial = rows * num_heads * (head_size + 2) if max_seq_len > partition else 0
    return plan_size(max_num_reqs) + min(partial, max_values)


def plan_attention(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    workspace: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    config: AttentionConfig,
    sliding_window: int | None = None,
) -> None:
    """Count a step's work, once for all layers that share these sizes and the window.

    `paged_attention` with the same tables, workspace and config, and `planned`, relies on it.
    """
    num_reqs = seq_lens.shape[0]
    if num_reqs == 0:
        return
    group = num_heads // num_kv_heads
    plan, partial = _plan_and_partial(workspace, num_reqs)
    plan_kernel[(1,)](
        seq_lens,
        query_start_loc,
        plan,
        num_reqs,
        num_reqs + 1,
        len(partial) // (num_heads * (head_size + 2)) * group,
        GROUP=group,
        WINDOW=sliding_window or 0,
        PARTITION=config.partition,
        SPLIT_TOKENS=config.split.block_m // group,
        PREFILL_TOKENS=config.prefill.block_m // group,
        BLOCK=_PLAN_BLOCK,
        num_warps=4,
        num_stages=1,
    )


class LayerCall(NamedTuple):
    """The arguments that both kernels take."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """block_table, seq_lens, query_start_loc"""
    workspace: torch.Tensor
    sinks: torch.Tensor | None
    out: torch.Tensor
    factors: tuple[float, float, float]
    """Those of scores, and the scale of values."""
    config: AttentionConfig
    overlaps: bool


def attend(
    call: LayerCall,
    shapes: tuple[KernelShape, KernelShape],
    max_query_len: int,
    max_seq_len: int,
) -> None:
    """Launch the kernels of a step that is planned; `shapes` are those of
    `attention_shape.kernel_shapes`.
    """
    split, prefill = shapes
    if min(max_query_len, len(call.query)) > split.tile_tokens:
        _prefill(call, prefill, split.tile_tokens)
    _split(call, split, max_query_len, max_seq_len)


def _prefill(call: LayerCall, shape: KernelShape, split_tokens: int) -> None:
    """Attend from the requests of more than split_tokens tokens."""
    block_table, num_reqs = call.tables[0], len(call.tables[1])
    num_tokens = len(call.query)
    plan, _ = _plan_and_partial(call.workspace, num_reqs)
    # At most: whole tiles, and one that is not full for each of these requests.
    num_tiles = num_tokens // shape.tile_tokens + min(num_reqs, num_tokens // (split_tokens + 1))
    prefill_kernel[(shape.num_kv_heads, num_tiles)](
        call.query,
        call.kv_cache,
        *call.tables,
        plan[2 * (num_reqs + 1) :],
        call.sinks,
        call.out,
        num_reqs,
        call.query.stride(0),
        call.out.stride(0),
        block_table.stride(0),
        *call.factors,
        shape,
        call.overlaps,
        launch_pdl=call.overlaps,
        **call.config.prefill.launch_options,
    )


def _split(call: LayerCall, shape: KernelShape, max_query_len: int, max_seq_len: int) -> None:
    """Attend from the requests of at most `tile_tokens` tokens."""
    block_table, num_reqs = call.tables[0], len(call.tables[1])
    plan, partial = _plan_and_partial(call.workspace, num_reqs)
    capacity = len(partial) // (shape.num_kv_heads * (shape.head_size + 2))
    num_partitions = cdiv(max_seq_len, shape.partition)
    multiprocessors = _num_multiprocessors(call.query.device)
    per_head = cdiv(call.config.programs_per_sm * multiprocessors, shape.num_kv_heads)
    split_kernel[(shape.num_kv_heads, min(num_reqs * num_partitions, per_head))](
        call.query,
        call.kv_cache,
        *call.tables,
        plan,
        partial,
        call.sinks,
        call.out,
        num_reqs,
        call.query.stride(0),
        call.out.stride(0),
        block_table.stride(0),
        num_reqs + 1,
        capacity,
        *call.factors,
        shape,
        call.overlaps,
        launch_pdl=call.overlaps,
        **call.config.split.launch_options,
    )
    if num_partitions == 1:
        return
    num_rows = min(max_query_len, shape.tile_tokens) * shape.group
    rows = min(next_power_of_2(num_rows), _MERGE_ROWS, _MERGE_VALUES // shape.block_d)
    merge_kernel[(shape.num_kv_heads, num_reqs, cdiv(num_rows, rows))](
        call.tables[2],
        plan,
        partial,
        call.sinks,
        call.out,
        call.out.stride(0),
        num_reqs + 1,
        capacity,
        call.factors[2],
        rows,
        partitions_at_once(rows, shape.block_d),
        shape,
        call.overlaps,
        num_warps=max(1, min(4, rows * shape.block_d // 128)),
        num_stages=1,
        launch_pdl=call.overlaps,
    )


def partitions_at_once(rows: int, block_d: int) -> int:
    """Whose loads are under way together in a merging program."""
    return max(1, 4 * _MERGE_ROWS // rows // max(1, block_d // 256))


@lru_cache(maxsize=8)
def _num_multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return 8  # The interpreter runs programs one after the other; several show their seams.
    return torch.cuda.get_device_properties(device).multi_processor_count


def plan_size(num_reqs: int) -> int:
    """Values that the plan takes of a workspace; what follows it is aligned."""
    return cdiv(PLAN_ROWS * (num_reqs + 1), 64) * 64


def _plan_and_partial(workspace: torch.Tensor, num_reqs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The int32 plan and the room for partial results."""
    size = plan_size(num_reqs)
    return workspace[:size].view(torch.int32), workspace[size:]


def score_factors(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """What `fold_tile` multiplies scores with, and its soft cap."""
    if soft_cap is None:
        return scale * _LOG2_E, 0.0
    return 2.0 * _LOG2_E * scale / soft_cap, soft_cap * _LOG2_E
