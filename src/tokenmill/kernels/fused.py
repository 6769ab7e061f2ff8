"""Elementwise kernels that save a pass over memory each, and sampling, natively.

    add_rms_norm       residual += x; RMSNorm of it    torch reference: norm.py
    gated_activation   silu(gate) * up, gelu likewise  activation.py
    gather_rows        rows of a table                 table[ids]
    argmax             greedy tokens                   logits.max(-1)
    chosen_logprobs    log-softmax of a few entries    sampling/logprobs.py
    sample             tokens drawn from logits        sampling/sampler.py

The first two can quantise their rows on the way out, as `gemm.quantize_rows` would. A row's result
has the same bits whatever the other rows are, and with any number of threads.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.kernels import arena, native
from tokenmill.kernels.gemm import QuantizedRows

Gate = Literal["silu", "gelu_tanh"]


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


def gated_activation(gate_up: torch.Tensor, gate: Gate, out: torch.Tensor | QuantizedRows) -> None:
    """Compute gate(first half) * second half of gate_up [N, 2 * size], into out [N, size].

    gate_up is bfloat16 or float32; out is one of these, or quantised.
    """
    native.module().gated_activation(gate_up, gate, _target(out))


def gather_rows(table: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
    """Copy rows ids (int32 [N]) of table to out [N, size]; each is bfloat16 or float32."""
    native.module().gather_rows(table, ids, out)


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int64 ids, float32 values) of the largest of each row of float32 logits [N, vocab_size].

    Of equal ones it is the smallest id. The value is NaN, and the id arbitrary, if the row has one.
    """
    token_ids = torch.empty(len(logits), dtype=torch.int64)
    best = torch.empty(len(logits))
    native.module().argmax(logits, token_ids, best)
    return token_ids, best


def chosen_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of some entries of float32 logits [N, vocab_size].

    token_ids is int64 [N, num_chosen]. Returns float32 log-probabilities and int32 ranks of that
    shape, and float32 log(sum(exp(row))) [N]. A rank counts the entries that are at least as large.
    """
    logprobs = torch.empty(token_ids.shape)
    ranks = torch.empty(token_ids.shape, dtype=torch.int32)
    log_sums = torch.empty(len(logits))
    native.module().chosen_logprobs(logits, token_ids, logprobs, log_sums, ranks)
    return logprobs, ranks, log_sums


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


def _target(out: torch.Tensor | QuantizedRows) -> torch.Tensor:
    return out.buffer if isinstance(out, QuantizedRows) else out
