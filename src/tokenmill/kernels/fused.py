"""Elementwise kernels that save a pass over memory each, and sampling, natively.

    add_rms_norm       residual += x; RMSNorm of it    torch reference: norm.py
    add_layer_norm     the same with LayerNorm         norm.py
    add_residual       residual += x, and a copy of it
    head_rms_norm      RMSNorm of each head            norm.py
    gated_activation   silu(gate) * up, gelu likewise  activation.py
    activation         silu(x), gelu likewise          activation.py
    add_rows           x + table[rows]
    copy               from one place to another
    sample             tokens chosen from logits       sampling/choosers.py
    score_tokens       their log-probabilities         sampling/logprobs.py

Norms of the residual and activations can quantise their rows on the way out, as
`gemm.quantize_rows` would. A row's result has the same bits whatever the other rows are, and with
any number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.kernels import arena, native
from tokenmill.kernels.activation import Gate
from tokenmill.kernels.gemm import QuantizedRows


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probabilities of some tokens of each of N rows of logits."""

    token_ids: npt.NDArray[np.int64]
    """[N, 1 + largest num_best]: the chosen one, then the best in falling order, those with equal
    logits by their ids. What follows a row's `num_best` is arbitrary, also of `logprobs`."""
    logprobs: npt.NDArray[np.float32]
    """The same shape; NaN where the row is not finite."""
    ranks: npt.NDArray[np.int32]
    """[N], how many logits are at least as large as the chosen one."""
    is_finite: npt.NDArray[np.bool_]
    """[N], whether the best logit is finite."""


def empty_quantized(num_rows: int, num_columns: int) -> QuantizedRows:
    """A place for `num_rows` quantised rows of `num_columns` (a multiple of 32) values each."""
    num_bytes = native.module().quantized_bytes(num_rows, num_columns)
    return QuantizedRows(arena.empty(num_bytes, dtype=torch.uint8), num_rows, num_columns)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | QuantizedRows,
    *,
    starts_stream: bool = False,
) -> None:
    """Add x to the residual in place, and put the sum's RMSNorm into out.

    x is bfloat16 or float32 [N, size], the residual float32 of that shape, the weight float32
    [size]. out is bfloat16, float32 or quantised, [N, size]. Where the stream starts, the residual
    is not read: it becomes x.
    """
    native.module().add_rms_norm(x, residual, starts_stream, weight, eps, _target(out))


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    out: torch.Tensor | QuantizedRows,
    *,
    starts_stream: bool = False,
) -> None:
    """As `add_rms_norm`, with LayerNorm; the bias is float32 [size]."""
    native.module().add_layer_norm(x, residual, starts_stream, weight, bias, eps, _target(out))


def add_residual(
    x: torch.Tensor,
    residual: torch.Tensor,
    out: torch.Tensor | QuantizedRows,
    *,
    starts_stream: bool = False,
) -> None:
    """As `add_rms_norm` without a norm: out gets the sum as it is."""
    native.module().add_residual(x, residual, starts_stream, _target(out))


def head_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """Put the RMSNorm of each head_size values of x [N, num_heads * head_size] into out.

    x and out, of one shape, are bfloat16 or float32, and their rows may lie apart; the weight is
    float32 [head_size].
    """
    native.module().head_rms_norm(x, weight, eps, out)


def gated_activation(gate_up: torch.Tensor, gate: Gate, out: torch.Tensor | QuantizedRows) -> None:
    """Compute gate(first half) * second half of gate_up [N, 2 * size], into out [N, size].

    gate_up is bfloat16 or float32; out is one of these, or quantised.
    """
    native.module().gated_activation(gate_up, gate, _target(out))


def activation(x: torch.Tensor, gate: Gate, out: torch.Tensor | QuantizedRows) -> None:
    """Compute gate(x) of x [N, size] into out of that shape, as `gated_activation` does."""
    native.module().activation(x, gate, _target(out))


def add_rows(x: torch.Tensor, table: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Compute x + table[rows] into out.

    x and out are bfloat16 or float32 [N, size], the table is float32 [any, size], rows are int64
    [N]. Raises `ValueError` for rows that the table does not have.
    """
    native.module().add_rows(x, table, rows, out)


def copy(x: torch.Tensor, out: torch.Tensor) -> None:
    """Copy x [N, parts, size] into out, which may have another type of bfloat16 and float32.

    Rows and parts of both may lie apart.
    """
    native.module().copy(x, out)


def sample(
    logits: torch.Tensor,
    *,
    is_greedy: npt.NDArray[np.bool_],
    temperature: npt.NDArray[np.float32],
    min_p: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
    seed: npt.NDArray[np.uint64],
    position: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Draw a token from each row of float32 logits [N, vocab_size]: (ids, is_valid), each [N].

    The columns, all [N], mean what they mean in `sampling/metadata.py`. A row is valid if its best
    logit is finite. Filters find their threshold by selection; nothing sorts the vocabulary.
    """
    token_ids = np.empty(len(logits), np.int64)
    is_valid = np.empty(len(logits), np.bool_)
    native.module().sample(
        logits, is_greedy, temperature, min_p, top_k, top_p, seed, position, token_ids, is_valid
    )
    return token_ids, is_valid


def score_tokens(
    logits: torch.Tensor, chosen: npt.NDArray[np.int64], num_best: npt.NDArray[np.int64]
) -> TokenScores:
    """Score chosen[i] and the num_best[i] best tokens of row i of float32 logits [N, vocab_size].

    Both columns are [N]. Raises `ValueError` for ids, or numbers of best tokens, beyond the
    vocabulary.
    """
    shape = len(logits), 1 + int(num_best.max(initial=0))
    scores = TokenScores(
        token_ids=np.empty(shape, np.int64),
        logprobs=np.empty(shape, np.float32),
        ranks=np.empty(len(logits), np.int32),
        is_finite=np.empty(len(logits), np.bool_),
    )
    native.module().score_tokens(
        logits,
        chosen,
        num_best,
        scores.token_ids,
        scores.logprobs,
        scores.ranks,
        scores.is_finite,
    )
    return scores


def _target(out: torch.Tensor | QuantizedRows) -> torch.Tensor:
    return out.buffer if isinstance(out, QuantizedRows) else out
