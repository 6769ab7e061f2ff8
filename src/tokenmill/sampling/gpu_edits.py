"""The edits of `edits.py` on a GPU: the same, by its kernels and by torch, without waiting for it.

PenaltyCounts   counts the tokens of rows that ask for penalties, anew in each step
apply_edit      any edit
"""

from __future__ import annotations

import torch

from tokenmill.kernels.gpu.bitmask import add_bias, apply_bitmask, ban_tokens
from tokenmill.kernels.gpu.penalties import PenaltyState, apply_penalties, count_row_tokens
from tokenmill.sampling.edits import (
    AllowedTokens,
    BadWords,
    BannedTokens,
    BiasedTokens,
    CustomEdits,
    ForcedTokens,
    LogitsEdit,
    Penalties,
    forced_tokens,
    is_completed_by_last,
)

Staged = dict[str, torch.Tensor]
"""An edit's arrays, on the device."""

_WIDTH_STEP = 1024
"""Tokens of a row are looked at in multiples of this: a kernel for each is compiled once."""


class PenaltyCounts:
    """Memory for what `kernels/gpu/penalties.py` counts: of as many rows as ever asked at once."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._state: PenaltyState | None = None

    def apply(
        self, edit: Penalties, logits: torch.Tensor, staged: Staged, token_ids: torch.Tensor
    ) -> None:
        """Count the tokens of the rows that ask, and penalise their logits."""
        count = len(edit.before)
        counted = torch.arange(count, device=self._device)
        prompt_bits, output_counts = self._take(count)
        count_row_tokens(
            _first_tokens(token_ids, staged["table_rows"], int(edit.before.positions.max())),
            counted,
            staged["num_prompt_tokens"],
            staged["positions"],
            prompt_bits,
            output_counts,
        )
        # One entry for each row of logits; the others are padding.
        rows = staged["logits_rows"]
        entries = torch.full((len(logits),), -1, dtype=torch.int64, device=self._device)
        entries[rows] = counted
        blank = torch.zeros(len(logits), device=self._device)
        apply_penalties(
            logits,
            entries,
            blank.index_copy(0, rows, staged["repetition"]),
            blank.index_copy(0, rows, staged["frequency"]),
            blank.index_copy(0, rows, staged["presence"]),
            prompt_bits,
            output_counts,
        )

    def _take(self, count: int) -> PenaltyState:
        if self._state is None or len(self._state.output_counts) < count:
            num_rows = 1 << (count - 1).bit_length()
            self._state = PenaltyState.allocate(num_rows, self._vocab_size, self._device)
        return self._state


def _first_tokens(token_ids: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
    """At least the first `count` tokens of some rows, int32 [len(rows), a multiple of the step]."""
    width = -(-count // _WIDTH_STEP) * _WIDTH_STEP
    some = token_ids[rows, : min(width, token_ids.shape[1])]
    return torch.nn.functional.pad(some, (0, width - some.shape[1]))


def apply_edit(
    edit: LogitsEdit,
    logits: torch.Tensor,
    staged: Staged,
    token_ids: torch.Tensor,
    counts: PenaltyCounts,
) -> None:
    """Edit float32 logits [n, vocab_size] in place; `staged` are the edit's arrays."""
    match edit:
        case AllowedTokens():
            apply_bitmask(logits, staged["bitmask"], staged["logits_rows"])
        case BadWords():
            matches = is_completed_by_last(
                token_ids,
                staged["table_rows"],
                staged["positions"],
                staged["first"],
                staged["prefixes"],
            )
            rows = torch.where(matches, staged["logits_rows"], -1)
            ban_tokens(logits, rows, staged["last_ids"])
        case BannedTokens():
            ban_tokens(logits, staged["logits_rows"], staged["token_ids"])
        case BiasedTokens():
            add_bias(logits, staged["logits_rows"], staged["token_ids"], staged["bias"])
        case Penalties():
            counts.apply(edit, logits, staged, token_ids)
        case ForcedTokens():
            width = int(edit.before.positions.max())
            is_due, forced = forced_tokens(token_ids, staged, edit.start_ids, edit.end_ids, width)
            rows = staged["logits_rows"]
            given = logits[rows]
            only = torch.full_like(given, -torch.inf).scatter_(1, forced.unsqueeze(1), 0.0)
            logits[rows] = torch.where(is_due.unsqueeze(1), only, given)
        case CustomEdits():
            edit.apply(logits, token_ids)
        case _:
            raise AssertionError(f"{type(edit).__name__} has no form for a GPU")
