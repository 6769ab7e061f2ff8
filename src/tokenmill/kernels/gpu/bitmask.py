"""Edits of single logits before a token is chosen: bans by a bitmask or by id, and biases.

    apply_bitmask   rows whose tokens a grammar, or a list of allowed ids, restricts
    ban_tokens      ids that must not come: end tokens before `min_tokens`, the last of a bad word
    add_bias        `logit_bias`

Entries with the row -1 are padding and edit nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.gpu.launch import CompileCase, cdiv, define_op

_TOKENS = 2048
"""Logits of one program: with four warps, four stores of 16 bytes a thread."""
_PAIRS = 128
"""Pairs of one program, one for each thread."""
_NUM_WARPS = 4


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, logits_rows: torch.Tensor) -> None:
    """Set the logits of tokens that are not allowed to -inf.

    logits is float32 [N, vocab_size], rows may lie apart; bitmask is int32
    [M, ceil(vocab_size / 32)], bit t % 32 of word t // 32 of row i allows token t in row
    logits_rows[i], int32 or int64 [M]. A logits row stands in logits_rows at most once.
    """
    vocab_size = logits.shape[1]
    assert logits.dtype == torch.float32
    assert bitmask.dtype == torch.int32
    assert bitmask.shape == (len(logits_rows), cdiv(vocab_size, 32))
    assert logits.stride(1) == bitmask.stride(1) == 1
    assert logits_rows.is_contiguous()
    if len(logits_rows) == 0:
        return
    _apply_bitmask_kernel[(cdiv(vocab_size, _TOKENS), len(logits_rows))](
        logits,
        bitmask,
        logits_rows,
        logits.stride(0),
        bitmask.stride(0),
        VOCAB_SIZE=vocab_size,
        TOKENS=_TOKENS,
        num_warps=_NUM_WARPS,
        num_stages=1,
    )


def ban_tokens(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Set logits[rows[i], token_ids[i]] to -inf, for each i.

    logits is float32 [N, vocab_size], rows may lie apart; rows and token_ids are int32 or int64
    [M]. A pair may stand there more than once.
    """
    _check_pairs(logits, rows, token_ids)
    if len(rows) == 0:
        return
    _edit_kernel[(cdiv(len(rows), _PAIRS),)](
        logits,
        rows,
        token_ids,
        None,
        logits.stride(0),
        len(rows),
        PAIRS=_PAIRS,
        num_warps=_NUM_WARPS,
        num_stages=1,
    )


def add_bias(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, bias: torch.Tensor
) -> None:
    """Add bias[i], float32 [M], to logits[rows[i], token_ids[i]], for each i.

    The others are as in `ban_tokens`, but each pair stands there once.
    """
    _check_pairs(logits, rows, token_ids)
    assert bias.dtype == torch.float32
    assert bias.shape == rows.shape
    assert bias.is_contiguous()
    if len(rows) == 0:
        return
    _edit_kernel[(cdiv(len(rows), _PAIRS),)](
        logits,
        rows,
        token_ids,
        bias,
        logits.stride(0),
        len(rows),
        PAIRS=_PAIRS,
        num_warps=_NUM_WARPS,
        num_stages=1,
    )


def apply_bitmask_reference(
    logits: torch.Tensor, bitmask: torch.Tensor, logits_rows: torch.Tensor
) -> None:
    """`apply_bitmask` in torch."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    is_allowed = (bitmask[:, ids // 32] >> (ids % 32)) & 1
    is_real = logits_rows >= 0
    rows = logits_rows[is_real].long()
    logits[rows] = logits[rows].masked_fill_(is_allowed[is_real] == 0, -torch.inf)


def ban_tokens_reference(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
    """`ban_tokens` in torch."""
    is_real = rows >= 0
    logits[rows[is_real].long(), token_ids[is_real].long()] = -torch.inf


def add_bias_reference(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, bias: torch.Tensor
) -> None:
    """`add_bias` in torch."""
    is_real = rows >= 0
    logits[rows[is_real].long(), token_ids[is_real].long()] += bias[is_real]


def _check_pairs(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert rows.shape == token_ids.shape == (len(rows),)
    assert rows.is_contiguous()
    assert token_ids.is_contiguous()


@triton.jit(do_not_specialize_on_alignment=["bitmask", "logits_rows"])
def _apply_bitmask_kernel(
    logits: tl.tensor,
    bitmask: tl.tensor,
    logits_rows: tl.tensor,
    logits_stride: tl.tensor,
    bitmask_stride: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    mask_row = tl.program_id(1).to(tl.int64)
    row = tl.load(logits_rows + mask_row).to(tl.int64)
    if row >= 0:
        ids = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        exists = ids < VOCAB_SIZE
        words = tl.load(bitmask + mask_row * bitmask_stride + ids // 32, mask=exists, other=0)
        is_banned = ((words >> (ids % 32)) & 1) == 0
        banned = tl.full((TOKENS,), float("-inf"), tl.float32)
        tl.store(logits + row * logits_stride + ids, banned, mask=exists & is_banned)


@triton.jit(
    do_not_specialize=["num_pairs"],
    do_not_specialize_on_alignment=["rows", "token_ids", "bias"],
)
def _edit_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    token_ids: tl.tensor,
    bias: tl.tensor,
    logits_stride: tl.tensor,
    num_pairs: tl.tensor,
    PAIRS: tl.constexpr,
) -> None:
    """Add the biases; without any, ban."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    row = tl.load(rows + pair, mask=pair < num_pairs, other=-1).to(tl.int64)
    exists = row >= 0
    place = logits + row * logits_stride + tl.load(token_ids + pair, mask=exists, other=0)
    edited = tl.full((PAIRS,), float("-inf"), tl.float32)
    if bias is not None:
        added = tl.load(bias + pair, mask=exists, other=0.0)
        edited = tl.load(place, mask=exists, other=0.0) + added
    tl.store(place, edited, mask=exists)


define_op(
    "apply_bitmask(Tensor(a!) logits, Tensor bitmask, Tensor logits_rows) -> ()",
    cuda=apply_bitmask,
    cpu=apply_bitmask_reference,
)
define_op(
    "ban_tokens(Tensor(a!) logits, Tensor rows, Tensor token_ids) -> ()",
    cuda=ban_tokens,
    cpu=ban_tokens_reference,
)
define_op(
    "add_bias(Tensor(a!) logits, Tensor rows, Tensor token_ids, Tensor bias) -> ()",
    cuda=add_bias,
    cpu=add_bias_reference,
)


def compile_cases() -> list[CompileCase]:
    """For the vocabulary of Llama 3."""
    strides = {"logits_stride": "i32:16", "bitmask_stride": "i32"}
    pairs = {
        "logits": "*fp32",
        "rows": "*i64",
        "token_ids": "*i64",
        "logits_stride": "i32:16",
        "num_pairs": "i32",
    }
    return [
        CompileCase(
            "apply_bitmask 128256",
            _apply_bitmask_kernel,
            {"logits": "*fp32", "bitmask": "*i32", "logits_rows": "*i64"} | strides,
            {"VOCAB_SIZE": 128256, "TOKENS": _TOKENS},
            _NUM_WARPS,
            num_stages=1,
        ),
        CompileCase(
            "ban_tokens", _edit_kernel, pairs, {"bias": None, "PAIRS": _PAIRS}, _NUM_WARPS, 1
        ),
        CompileCase(
            "add_bias",
            _edit_kernel,
            pairs | {"bias": "*fp32"},
            {"PAIRS": _PAIRS},
            _NUM_WARPS,
            num_stages=1,
        ),
    ]
