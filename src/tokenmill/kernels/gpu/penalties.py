"""Repetition, frequency and presence penalties, on what a device knows of each row's tokens.

    a token of the prompt or the output, repetition r:   logit > 0: logit / r, else logit * r
    a token that the output has c > 0 times:             logit - c * frequency - presence

In this order, as OpenAI's parameters and the paper on CTRL (Keskar and others, 2019) define them
and vLLM combines them. The state of a row is which tokens its prompt has, a bit each, and how often
its output has each token:

    count_row_tokens   a row's state from its tokens, when a request enters it
    count_tokens       the tokens of a step
    apply_penalties    the logits of rows that ask for penalties

Rows that ask for none have no state to keep: they are left out of the calls, and the memory is
allocated when the first one asks. A negative row is padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenmill.kernels.gpu.launch import CompileCase, cdiv, define_op

_TOKENS = 1024
"""Tokens of the vocabulary, or of a row, that one program handles."""
_NEW_TOKENS = 128
"""Tokens of a step that one program handles, one for each thread."""
_NUM_WARPS = 4


class PenaltyState(NamedTuple):
    """What `apply_penalties` must know of each row's tokens; undefined until a row is counted."""

    prompt_bits: torch.Tensor
    """int32 [max_num_rows, ceil(vocab_size / 32)]: bit t % 32 of word t // 32 says that the prompt
    has token t"""
    output_counts: torch.Tensor
    """int32 [max_num_rows, vocab_size]"""

    @classmethod
    def allocate(
        cls, max_num_rows: int, vocab_size: int, device: torch.device | str
    ) -> PenaltyState:
        """Memory for the rows' states."""
        return cls(
            torch.empty((max_num_rows, cdiv(vocab_size, 32)), dtype=torch.int32, device=device),
            torch.empty((max_num_rows, vocab_size), dtype=torch.int32, device=device),
        )


def count_row_tokens(
    token_ids: torch.Tensor,
    rows: torch.Tensor,
    num_prompt_tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    prompt_bits: torch.Tensor,
    output_counts: torch.Tensor,
) -> None:
    """Set the states of `rows` to what their first `num_tokens` tokens are.

    token_ids is int32 [max_num_rows, max_len]; rows, num_prompt_tokens and num_tokens are int32 or
    int64 [M]. Of row rows[i] the first num_prompt_tokens[i] tokens are the prompt. A row stands
    there once.
    """
    vocab_size = _check_state(prompt_bits, output_counts)
    assert token_ids.dtype == torch.int32
    assert token_ids.stride(1) == 1
    assert rows.shape == num_prompt_tokens.shape == num_tokens.shape == (len(rows),)
    assert all(x.is_contiguous() for x in (rows, num_prompt_tokens, num_tokens))
    if len(rows) == 0:
        return
    _clear_kernel[(cdiv(vocab_size, _TOKENS), len(rows))](
        rows,
        prompt_bits,
        output_counts,
        VOCAB_SIZE=vocab_size,
        TOKENS=_TOKENS,
        num_warps=_NUM_WARPS,
        num_stages=1,
    )
    _count_row_tokens_kernel[(cdiv(token_ids.shape[1], _TOKENS), len(rows))](
        token_ids,
        rows,
        num_prompt_tokens,
        num_tokens,
        prompt_bits,
        output_counts,
        token_ids.stride(0),
        VOCAB_SIZE=vocab_size,
        TOKENS=_TOKENS,
        num_warps=_NUM_WARPS,
        num_stages=1,
    )


def count_tokens(rows: torch.Tensor, token_ids: torch.Tensor, output_counts: torch.Tensor) -> None:
    """Add token_ids[i] to the output of row rows[i], for each i; both int32 or int64 [M]."""
    assert output_counts.dtype == torch.int32
    assert rows.shape == token_ids.shape == (len(rows),)
    assert all(x.is_contiguous() for x in (rows, token_ids, output_counts))
    if len(rows) == 0:
        return
    _count_tokens_kernel[(cdiv(len(rows), _NEW_TOKENS),)](
        rows,
        token_ids,
        output_counts,
        len(rows),
        VOCAB_SIZE=output_counts.shape[1],
        TOKENS=_NEW_TOKENS,
        num_warps=_NUM_WARPS,
        num_stages=1,
    )


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    prompt_bits: torch.Tensor,
    output_counts: torch.Tensor,
) -> None:
    """Penalise logits[i] by the tokens of row rows[i], for each i, in place.

    logits is float32 [N, vocab_size], rows may lie apart; rows is int32 or int64 [N], the penalties
    float32 [N]: 1, 0 and 0 change nothing.
    """
    vocab_size = _check_state(prompt_bits, output_counts)
    columns = (rows, repetition, frequency, presence)
    assert logits.dtype == repetition.dtype == frequency.dtype == presence.dtype == torch.float32
    assert logits.shape == (len(rows), vocab_size)
    assert logits.stride(1) == 1
    assert all(x.shape == rows.shape and x.is_contiguous() for x in columns)
    if len(rows) == 0:
        return
    _apply_penalties_kernel[(cdiv(vocab_size, _TOKENS), len(rows))](
        logits,
        *columns,
        prompt_bits,
        output_counts,
        logits.stride(0),
        VOCAB_SIZE=vocab_size,
        TOKENS=_TOKENS,
        num_warps=_NUM_WARPS,
        num_stages=1,
    )


def count_row_tokens_reference(
    token_ids: torch.Tensor,
    rows: torch.Tensor,
    num_prompt_tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    prompt_bits: torch.Tensor,
    output_counts: torch.Tensor,
) -> None:
    """`count_row_tokens` in torch."""
    vocab_size = output_counts.shape[1]
    bits = torch.arange(32, device=rows.device)
    columns = (rows.tolist(), num_prompt_tokens.tolist(), num_tokens.tolist())
    for row, num_prompt, num in zip(*columns, strict=True):
        if row < 0:
            continue
        ids = token_ids[row, :num].long()
        has_token = torch.zeros(32 * prompt_bits.shape[1], dtype=torch.int64, device=rows.device)
        has_token[ids[:num_prompt]] = 1
        # The sums are below 2^32; as int32 the upper half is negative.
        prompt_bits[row] = (has_token.view(-1, 32) << bits).sum(-1).int()
        output_counts[row] = torch.bincount(ids[num_prompt:], minlength=vocab_size)


def count_tokens_reference(
    rows: torch.Tensor, token_ids: torch.Tensor, output_counts: torch.Tensor
) -> None:
    """`count_tokens` in torch."""
    is_real = rows >= 0
    places = (rows[is_real].long(), token_ids[is_real].long())
    ones = torch.ones_like(places[0], dtype=torch.int32)
    output_counts.index_put_(places, ones, accumulate=True)


def apply_penalties_reference(
    logits: torch.Tensor,
    rows: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    prompt_bits: torch.Tensor,
    output_counts: torch.Tensor,
) -> None:
    """`apply_penalties` in torch."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    for i in (rows >= 0).nonzero().flatten().tolist():
        counts = output_counts[rows[i]]
        in_prompt = (prompt_bits[rows[i], ids // 32] >> (ids % 32)) & 1 != 0
        scaled = torch.where(logits[i] > 0, logits[i] / repetition[i], logits[i] * repetition[i])
        penalised = torch.where(in_prompt | (counts > 0), scaled, logits[i])
        logits[i] = penalised - frequency[i] * counts - presence[i] * (counts > 0)


def _check_state(prompt_bits: torch.Tensor, output_counts: torch.Tensor) -> int:
    """The vocabulary's size."""
    num_rows, vocab_size = output_counts.shape
    assert prompt_bits.dtype == output_counts.dtype == torch.int32
    assert prompt_bits.shape == (num_rows, cdiv(vocab_size, 32))
    assert prompt_bits.is_contiguous()
    assert output_counts.is_contiguous()
    return vocab_size


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _clear_kernel(
    rows: tl.tensor,
    prompt_bits: tl.tensor,
    output_counts: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    row = tl.load(rows + tl.program_id(1)).to(tl.int64)
    if row >= 0:
        NUM_WORDS: tl.constexpr = (VOCAB_SIZE + 31) // 32
        zeros = tl.zeros((TOKENS,), tl.int32)
        token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        tl.store(output_counts + row * VOCAB_SIZE + token, zeros, mask=token < VOCAB_SIZE)
        word = tl.program_id(0) * (TOKENS // 32) + tl.arange(0, TOKENS // 32)
        no_bits = tl.zeros((TOKENS // 32,), tl.int32)
        tl.store(prompt_bits + row * NUM_WORDS + word, no_bits, mask=word < NUM_WORDS)


@triton.jit(do_not_specialize_on_alignment=["rows", "num_prompt_tokens", "num_tokens"])
def _count_row_tokens_kernel(
    token_ids: tl.tensor,
    rows: tl.tensor,
    num_prompt_tokens: tl.tensor,
    num_tokens: tl.tensor,
    prompt_bits: tl.tensor,
    output_counts: tl.tensor,
    token_ids_stride: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    entry = tl.program_id(1)
    row = tl.load(rows + entry).to(tl.int64)
    end = tl.load(num_tokens + entry)
    start = tl.program_id(0) * TOKENS
    if (row >= 0) & (start < end):
        NUM_WORDS: tl.constexpr = (VOCAB_SIZE + 31) // 32
        position = start + tl.arange(0, TOKENS)
        exists = position < end
        in_prompt = position < tl.load(num_prompt_tokens + entry)
        token = tl.load(token_ids + row * token_ids_stride + position, mask=exists, other=0)
        bit = tl.full((TOKENS,), 1, tl.int32) << (token % 32)
        words = prompt_bits + row * NUM_WORDS + token // 32
        tl.atomic_or(words, bit, mask=exists & in_prompt, sem="relaxed")
        ones = tl.full((TOKENS,), 1, tl.int32)
        counts = output_counts + row * VOCAB_SIZE + token
        tl.atomic_add(counts, ones, mask=exists & (in_prompt == 0), sem="relaxed")


@triton.jit(
    do_not_specialize=["num_new_tokens"],
    do_not_specialize_on_alignment=["rows", "token_ids"],
)
def _count_tokens_kernel(
    rows: tl.tensor,
    token_ids: tl.tensor,
    output_counts: tl.tensor,
    num_new_tokens: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    entry = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.load(rows + entry, mask=entry < num_new_tokens, other=-1).to(tl.int64)
    token = tl.load(token_ids + entry, mask=row >= 0, other=0)
    ones = tl.full((TOKENS,), 1, tl.int32)
    counts = output_counts + row * VOCAB_SIZE + token
    tl.atomic_add(counts, ones, mask=row >= 0, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["rows", "repetition", "frequency", "presence"])
def _apply_penalties_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    repetition: tl.tensor,
    frequency: tl.tensor,
    presence: tl.tensor,
    prompt_bits: tl.tensor,
    output_counts: tl.tensor,
    logits_stride: tl.tensor,
    VOCAB_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    entry = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + entry).to(tl.int64)
    if row >= 0:
        NUM_WORDS: tl.constexpr = (VOCAB_SIZE + 31) // 32
        token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
        exists = token < VOCAB_SIZE
        count = tl.load(output_counts + row * VOCAB_SIZE + token, mask=exists, other=0)
        word = tl.load(prompt_bits + row * NUM_WORDS + token // 32, mask=exists, other=0)
        is_known = (count > 0) | (((word >> (token % 32)) & 1) != 0)
        place = logits + entry * logits_stride + token
        logit = tl.load(place, mask=exists & is_known, other=0.0)
        factor = tl.load(repetition + entry)
        logit = tl.where(logit > 0.0, tl.div_rn(logit, factor), logit * factor)
        logit -= tl.load(frequency + entry) * count.to(tl.float32)
        logit -= tl.where(count > 0, tl.load(presence + entry), 0.0)
        tl.store(place, logit, mask=exists & is_known)


define_op(
    "count_row_tokens(Tensor token_ids, Tensor rows, Tensor num_prompt_tokens, Tensor num_tokens,"
    " Tensor(a!) prompt_bits, Tensor(b!) output_counts) -> ()",
    cuda=count_row_tokens,
    cpu=count_row_tokens_reference,
)
define_op(
    "count_tokens(Tensor rows, Tensor token_ids, Tensor(a!) output_counts) -> ()",
    cuda=count_tokens,
    cpu=count_tokens_reference,
)
define_op(
    "apply_penalties(Tensor(a!) logits, Tensor rows, Tensor repetition, Tensor frequency,"
    " Tensor presence, Tensor prompt_bits, Tensor output_counts) -> ()",
    cuda=apply_penalties,
    cpu=apply_penalties_reference,
)


def compile_cases() -> list[CompileCase]:
    """For the vocabulary of Llama 3."""
    types = {
        "logits": "*fp32",
        "token_ids": "*i32",
        "rows": "*i64",
        "num_prompt_tokens": "*i64",
        "num_tokens": "*i64",
        "repetition": "*fp32",
        "frequency": "*fp32",
        "presence": "*fp32",
        "prompt_bits": "*i32",
        "output_counts": "*i32",
        "token_ids_stride": "i32:16",
        "logits_stride": "i32:16",
        "num_new_tokens": "i32",
    }
    kernels = {
        "clear": (_clear_kernel, _TOKENS),
        "count_row_tokens": (_count_row_tokens_kernel, _TOKENS),
        "count_tokens": (_count_tokens_kernel, _NEW_TOKENS),
        "apply": (_apply_penalties_kernel, _TOKENS),
    }
    return [
        CompileCase(
            f"penalties: {name}",
            kernel,
            {argument: types[argument] for argument in kernel.arg_names if argument in types},
            {"VOCAB_SIZE": 128256, "TOKENS": tokens},
            _NUM_WARPS,
            num_stages=1,
        )
        for name, (kernel, tokens) in kernels.items()
    ]
