"""Log-probabilities of logits: of one token a row, its rank, and what normalises a row.

    log-probability = (logit - best) - log_sum,     log_sum = log(sum(exp(logit - best)))

in float32, as `torch.log_softmax` has it. One program reads a row, in tiles of one fixed size, so a
row's bits depend on that row only. A NaN counts as infinite: such a row has no finite best logit,
and so has one without any; its other results mean nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.gpu.launch import CompileCase, define_op

_TILE = 4096
"""Logits that a program has in registers at once."""
_NUM_WARPS = 8


def log_normalizer(logits: torch.Tensor, out: torch.Tensor) -> None:
    """Put (best logit, log_sum) of each row of logits [N, vocab_size] into out [N, 2].

    All are float32; rows of logits may lie apart.
    """
    _check(logits, out)
    if len(logits) == 0:
        return
    _row_logprobs_kernel[(len(logits),)](
        logits,
        None,
        out,
        None,
        None,
        logits.stride(0),
        VOCAB_SIZE=logits.shape[1],
        TILE=_TILE,
        num_warps=_NUM_WARPS,
        num_stages=1,
    )


def row_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    out_normalizer: torch.Tensor,
    out_logprob: torch.Tensor,
    out_rank: torch.Tensor,
) -> None:
    """The log-probability of token_ids[i] in row i of logits, and its rank.

    logits is float32 [N, vocab_size], rows may lie apart; token_ids int32 or int64 [N]. The outputs
    are float32 [N, 2], as of `log_normalizer`, float32 [N] and int32 [N]. A rank counts the tokens
    that are at least as probable, so the best one has rank 1.
    """
    _check(logits, out_normalizer)
    assert token_ids.shape == out_logprob.shape == out_rank.shape == (len(logits),)
    assert out_logprob.dtype == torch.float32
    assert out_rank.dtype == torch.int32
    assert all(x.is_contiguous() for x in (token_ids, out_logprob, out_rank))
    if len(logits) == 0:
        return
    _row_logprobs_kernel[(len(logits),)](
        logits,
        token_ids,
        out_normalizer,
        out_logprob,
        out_rank,
        logits.stride(0),
        VOCAB_SIZE=logits.shape[1],
        TILE=_TILE,
        num_warps=_NUM_WARPS,
        num_stages=1,
    )


def log_normalizer_reference(logits: torch.Tensor, out: torch.Tensor) -> None:
    """`log_normalizer` in torch."""
    out[:, 0] = logits.masked_fill(logits.isnan(), torch.inf).amax(-1)
    out[:, 1] = (logits - out[:, :1]).logsumexp(-1)


def row_logprobs_reference(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    out_normalizer: torch.Tensor,
    out_logprob: torch.Tensor,
    out_rank: torch.Tensor,
) -> None:
    """`row_logprobs` in torch."""
    log_normalizer_reference(logits, out_normalizer)
    logprobs = logits - out_normalizer[:, :1] - out_normalizer[:, 1:]
    chosen = logprobs.gather(1, token_ids.long().unsqueeze(1))
    out_logprob.copy_(chosen.squeeze(1))
    out_rank.copy_((logprobs >= chosen).sum(-1))


def _check(logits: torch.Tensor, normalizer: torch.Tensor) -> None:
    assert logits.dtype == normalizer.dtype == torch.float32
    assert normalizer.shape == (len(logits), 2)
    assert logits.stride(1) == 1
    assert normalizer.is_contiguous()


@triton.jit(do_not_specialize_on_alignment=["token_ids"])
def _row_logprobs_kernel(
    logits: tl.tensor,
    token_ids: tl.tensor,
    out_normalizer: tl.tensor,
    out_logprob: tl.tensor,
    out_rank: tl.tensor,
    logits_stride: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    values = logits + row * logits_stride
    largest, best, log_sum = _normalize(values, VOCAB_SIZE, TILE)
    tl.store(out_normalizer + 2 * row, largest)
    tl.store(out_normalizer + 2 * row + 1, log_sum)
    if token_ids is not None:
        chosen = (tl.load(values + tl.load(token_ids + row)) - best) - log_sum
        tl.store(out_logprob + row, chosen)
        at_least = tl.zeros((TILE,), tl.int32)
        for start in range(0, VOCAB_SIZE, TILE):
            place = start + tl.arange(0, TILE)
            exists = place < VOCAB_SIZE
            x = tl.load(values + place, mask=exists, other=0.0)
            at_least += (exists & ((x - best) - log_sum >= chosen)).to(tl.int32)
        tl.store(out_rank + row, tl.sum(at_least, axis=0))


@triton.jit
def _normalize(
    values: tl.tensor, VOCAB_SIZE: tl.constexpr, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(largest, best, log_sum) of a row: the largest logit, a NaN being infinite; that of the
    finite ones, 0 if there are none; the sum over them. Each lane has its own until the end.
    """
    largest = tl.full((TILE,), float("-inf"), tl.float32)
    best = largest
    total = tl.zeros((TILE,), tl.float32)
    for start in range(0, VOCAB_SIZE, TILE):
        place = start + tl.arange(0, TILE)
        x = tl.load(values + place, mask=place < VOCAB_SIZE, other=float("-inf"))
        is_usable = x < float("inf")
        largest = tl.maximum(largest, tl.where(is_usable, x, float("inf")))
        usable = tl.where(is_usable, x, float("-inf"))
        better = tl.maximum(best, usable)
        shift = _finite(better)
        total = total * tl.exp(best - shift) + tl.exp(usable - shift)
        best = better
    row_best = _finite(tl.max(best, axis=0))
    row_total = tl.sum(total * tl.exp(best - row_best), axis=0)
    log_sum = tl.log(tl.where(row_total > 0.0, row_total, 1.0))
    return tl.max(largest, axis=0), row_best, log_sum


@triton.jit
def _finite(value: tl.tensor) -> tl.tensor:
    """-inf has no difference from itself; 0 takes its place."""
    return tl.where(value > float("-inf"), value, 0.0)


define_op(
    "log_normalizer(Tensor logits, Tensor(a!) out) -> ()",
    cuda=log_normalizer,
    cpu=log_normalizer_reference,
)
define_op(
    "row_logprobs(Tensor logits, Tensor token_ids, Tensor(a!) out_normalizer,"
    " Tensor(b!) out_logprob, Tensor(c!) out_rank) -> ()",
    cuda=row_logprobs,
    cpu=row_logprobs_reference,
)


def compile_cases() -> list[CompileCase]:
    """For the vocabulary of Llama 3."""
    outputs = {"token_ids": "*i64", "out_logprob": "*fp32", "out_rank": "*i32"}
    signature = {"logits": "*fp32", "out_normalizer": "*fp32", "logits_stride": "i32:16"}
    constants = {"VOCAB_SIZE": 128256, "TILE": _TILE}
    return [
        CompileCase(
            "log_normalizer 128256",
            _row_logprobs_kernel,
            signature,
            constants | dict.fromkeys(outputs),
            _NUM_WARPS,
            num_stages=1,
        ),
        CompileCase(
            "row_logprobs 128256",
            _row_logprobs_kernel,
            signature | outputs,
            constants,
            _NUM_WARPS,
            num_stages=1,
        ),
    ]
