"""Paged attention in plain torch, dense, request by request: what the kernels are compared with."""

from __future__ import annotations

import torch


def paged_attention_reference(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    causal: bool = True,
    dtype: torch.dtype = torch.float64,
) -> None:
    """`paged_attention` of `attention.py`, computed in `dtype`. Reads the tables on the host."""
    block_size, num_kv_heads, head_size = kv_cache.shape[2:]
    starts = query_start_loc.tolist()
    for req, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[req], starts[req + 1])
        query_len = rows.stop - rows.start
        if query_len == 0:
            continue
        blocks = block_table[req, : -(-seq_len // block_size)].long()
        # [2, tokens, KV heads, head size], the tokens of all blocks one after the other
        tokens = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :seq_len]
        key, value = tokens[0].to(dtype) * k_scale, tokens[1].to(dtype) * v_scale
        q = query[rows].unflatten(1, (num_kv_heads, -1, head_size)).to(dtype)
        scores = torch.einsum("qhgd,khd->hgqk", q, key) * scale
        if logits_soft_cap is not None:
            scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
        hidden = _hidden(query_len, seq_len, sliding_window, causal, query.device)
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            column = sinks.to(dtype).view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, column], -1)
        weights = scores.softmax(-1)[..., :seq_len]
        out[rows] = torch.einsum("hgqk,khd->qhgd", weights, value).flatten(1).to(out.dtype)


def _hidden(
    query_len: int, seq_len: int, window: int | None, causal: bool, device: torch.device
) -> torch.Tensor:
    """Keys that a query does not see, bool [query_len, seq_len]."""
    at = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    keys = torch.arange(seq_len, device=device)
    hidden = torch.zeros(query_len, seq_len, dtype=torch.bool, device=device)
    if causal:
        hidden |= keys > at
    if window is not None:
        hidden |= keys <= at - window
    return hidden
