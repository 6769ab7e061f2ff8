"""Repetition, frequency and presence penalties by the tokens of a row, which are counted anew.

    a token of the prompt or the output, repetition r:   logit > 0: logit / r, else logit * r
    a token that the output has c > 0 times:             logit - c * frequency - presence

In this order and in float32, as OpenAI's parameters and the paper on CTRL (Keskar and others, 2019)
define them. Nothing is kept between steps: what a row gets is a function of its tokens, however it
came to them, and counting a context costs less than one layer's attention to it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.kernels import native

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


def apply_penalties(
    logits: torch.Tensor,
    logits_rows: IntArray,
    token_ids: torch.Tensor,
    table_rows: IntArray,
    num_prompt_tokens: IntArray,
    num_tokens: IntArray,
    *,
    repetition: FloatArray,
    frequency: FloatArray,
    presence: FloatArray,
) -> None:
    """Penalise row logits_rows[i] of float32 logits [N, vocab_size] in place, for each i.

    Its tokens are the first num_tokens[i] of row table_rows[i] of token_ids, int32
    [table rows, max_len], of which the first num_prompt_tokens[i] are the prompt. A logits row
    stands there once; repetition 1, frequency 0 and presence 0 change nothing. Raises `ValueError`
    for what lies outside the tensors.
    """
    apply = native.module().apply_penalties if native.is_available() else apply_penalties_reference
    apply(
        logits,
        logits_rows,
        token_ids,
        table_rows,
        num_prompt_tokens,
        num_tokens,
        repetition,
        frequency,
        presence,
    )


def apply_penalties_reference(
    logits: torch.Tensor,
    logits_rows: IntArray,
    token_ids: torch.Tensor,
    table_rows: IntArray,
    num_prompt_tokens: IntArray,
    num_tokens: IntArray,
    repetition: FloatArray,
    frequency: FloatArray,
    presence: FloatArray,
) -> None:
    """The same in torch."""
    for i, row in enumerate(logits_rows.tolist()):
        tokens = token_ids[int(table_rows[i]), : int(num_tokens[i])].long().numpy()
        output = tokens[int(num_prompt_tokens[i]) :]
        known = torch.from_numpy(np.unique(tokens))
        values = logits[row, known]
        logits[row, known] = torch.where(
            values > 0, values / float(repetition[i]), values * float(repetition[i])
        )
        ids, counts = (torch.from_numpy(each) for each in np.unique(output, return_counts=True))
        values = logits[row, ids] - float(frequency[i]) * counts.float()
        logits[row, ids] = values - float(presence[i])
