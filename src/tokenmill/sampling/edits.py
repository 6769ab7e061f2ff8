"""Edits of one step's logits before a token is chosen, for the rows that ask for them.

In the order in which they are done:

    AllowedTokens   nothing but the ids of a list
    BadWords        no id that would complete one of some sequences
    BannedTokens    none of some ids: what could end a request before `min_tokens`
    BiasedTokens    a number added to some ids
    CustomEdits     what an operator's own processors do
    Penalties       by the tokens that prompt and output have
    ForcedTokens    the end of reasoning, once its budget is spent

A row state of `row_edits.py` makes them. An edit of a row is a function of the row's parameters and
of the tokens before the place that is sampled; so it does not matter whether a request was cut,
resumed or has drafts, nor who is beside it. Tokens are read where the step reads them, so none has
to be known to the host: `gpu_edits.py` does the same on a device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.kernels.penalties import apply_penalties
from tokenmill.sampling.metadata import IntArray

HostArray = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class BeforeSample:
    """Whose logits some logits rows are, and which tokens come before; all [n]."""

    logits_rows: IntArray
    table_rows: IntArray
    """Rows of the table of tokens."""
    positions: IntArray
    """Place of the token to be sampled: the tokens before it are known, at the latest by then."""
    num_prompt_tokens: IntArray

    def take(self, indices: IntArray) -> BeforeSample:
        """Some of them."""
        return BeforeSample(
            self.logits_rows[indices],
            self.table_rows[indices],
            self.positions[indices],
            self.num_prompt_tokens[indices],
        )

    def __len__(self) -> int:
        return len(self.logits_rows)


class LogitsEdit(Protocol):
    """Changes which token is best; applies to greedy and random rows alike."""

    def arrays(self) -> dict[str, HostArray]:
        """What a device must be given for it."""
        ...

    def apply(self, logits: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Edit float32 logits [n, vocab_size] in place.

        `token_ids`, int32 [table rows, max_len], has the tokens of every row of the table.
        """
        ...


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """Every id but some is banned."""

    logits_rows: IntArray
    """[m]"""
    token_ids: list[IntArray]
    """Of each row, what may come."""
    bitmasks: list[npt.NDArray[np.int32]]
    """The same as bits, [ceil(vocab_size / 32)] each: bit t % 32 of word t // 32 allows token t."""

    def arrays(self) -> dict[str, HostArray]:
        return {"logits_rows": self.logits_rows, "bitmask": np.stack(self.bitmasks)}

    def apply(self, logits: torch.Tensor, token_ids: torch.Tensor) -> None:
        for row, ids in zip(self.logits_rows.tolist(), self.token_ids, strict=True):
            columns = torch.from_numpy(ids)
            kept = logits[row, columns]
            logits[row].fill_(-torch.inf)
            logits[row, columns] = kept


@dataclass(frozen=True, slots=True)
class BadWords:
    """The last id of a sequence is banned where the others have just come; [m] sequences."""

    before: BeforeSample
    """One entry a sequence; logits rows may stand there many times."""
    prefixes: npt.NDArray[np.int32]
    """[m, longest], the ids before the last one, at the end of their row; -1 before them."""
    last_ids: IntArray
    """[m]"""

    def arrays(self) -> dict[str, HostArray]:
        before = self.before
        return {
            "logits_rows": before.logits_rows,
            "table_rows": before.table_rows,
            "positions": before.positions,
            "first": before.num_prompt_tokens,
            "prefixes": self.prefixes,
            "last_ids": self.last_ids,
        }

    def apply(self, logits: torch.Tensor, token_ids: torch.Tensor) -> None:
        before = self.before
        matches = is_completed_by_last(
            token_ids,
            torch.from_numpy(before.table_rows),
            torch.from_numpy(before.positions),
            torch.from_numpy(before.num_prompt_tokens),
            torch.from_numpy(self.prefixes),
        )
        rows, ids = torch.from_numpy(before.logits_rows), torch.from_numpy(self.last_ids)
        logits[rows[matches], ids[matches]] = -torch.inf


def is_completed_by_last(
    token_ids: torch.Tensor,
    table_rows: torch.Tensor,
    positions: torch.Tensor,
    first: torch.Tensor,
    prefixes: torch.Tensor,
) -> torch.Tensor:
    """Whether the output of each row ends with its prefix, bool [m].

    token_ids is int32 [table rows, max_len]; table_rows, positions and first, where the output
    begins, are int64 [m]; prefixes int32 [m, longest], at the end of their row, -1 before them.
    """
    longest = prefixes.shape[1]
    offsets = torch.arange(longest, device=token_ids.device) - longest
    places = positions.unsqueeze(1) + offsets
    found = token_ids[table_rows.unsqueeze(1), places.clamp(min=0)]
    # A word that began in the prompt is the prompt's: only the output is looked at.
    is_known = places >= first.unsqueeze(1)
    return ((prefixes < 0) | (is_known & (found == prefixes))).all(1)


@dataclass(frozen=True, slots=True)
class BannedTokens:
    """Pairs that must not be sampled; both [m]."""

    logits_rows: IntArray
    token_ids: IntArray

    def arrays(self) -> dict[str, HostArray]:
        return {"logits_rows": self.logits_rows, "token_ids": self.token_ids}

    def apply(self, logits: torch.Tensor, token_ids: torch.Tensor) -> None:
        rows, ids = torch.from_numpy(self.logits_rows), torch.from_numpy(self.token_ids)
        logits[rows, ids] = -torch.inf


@dataclass(frozen=True, slots=True)
class BiasedTokens:
    """Numbers added to logits; all [m], each pair once."""

    logits_rows: IntArray
    token_ids: IntArray
    bias: npt.NDArray[np.float32]

    def arrays(self) -> dict[str, HostArray]:
        return {"logits_rows": self.logits_rows, "token_ids": self.token_ids, "bias": self.bias}

    def apply(self, logits: torch.Tensor, token_ids: torch.Tensor) -> None:
        rows, ids = torch.from_numpy(self.logits_rows), torch.from_numpy(self.token_ids)
        logits[rows, ids] += torch.from_numpy(self.bias)


RowFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""A custom processor's edit of one row: (prompt ids, output ids, logits [vocab_size]), all on the
device that the logits are on; it edits the logits in place."""


@dataclass(frozen=True, slots=True)
class CustomEdits:
    """What custom logits processors do, row by row."""

    before: BeforeSample
    functions: list[list[RowFunction]]
    """Of each entry, in the order of the processors."""

    def arrays(self) -> dict[str, HostArray]:
        return {}

    def apply(self, logits: torch.Tensor, token_ids: torch.Tensor) -> None:
        before = self.before
        columns = (
            before.logits_rows.tolist(),
            before.table_rows.tolist(),
            before.positions.tolist(),
            before.num_prompt_tokens.tolist(),
        )
        for row, table_row, end, num_prompt, functions in zip(
            *columns, self.functions, strict=True
        ):
            known = token_ids[table_row, :end].clone()  # not to be written by strangers
            for function in functions:
                function(known[:num_prompt], known[num_prompt:], logits[row])


@dataclass(frozen=True, slots=True)
class Penalties:
    """Repetition, frequency and presence penalties; all [m]."""

    before: BeforeSample
    repetition: npt.NDArray[np.float32]
    frequency: npt.NDArray[np.float32]
    presence: npt.NDArray[np.float32]

    def arrays(self) -> dict[str, HostArray]:
        before = self.before
        return {
            "logits_rows": before.logits_rows,
            "table_rows": before.table_rows,
            "positions": before.positions,
            "num_prompt_tokens": before.num_prompt_tokens,
            "repetition": self.repetition,
            "frequency": self.frequency,
            "presence": self.presence,
        }

    def apply(self, logits: torch.Tensor, token_ids: torch.Tensor) -> None:
        before = self.before
        apply_penalties(
            logits,
            before.logits_rows,
            token_ids,
            before.table_rows,
            before.num_prompt_tokens,
            before.positions,
            repetition=self.repetition,
            frequency=self.frequency,
            presence=self.presence,
        )


@dataclass(frozen=True, slots=True)
class ForcedTokens:
    """Ends reasoning whose budget is spent: the only token is then the next one of the mark.

    The row reasons if its last mark is a start, or if there is none and it was open from the
    beginning. After `budget` tokens behind the start, the mark of the end is due, token by token.
    """

    before: BeforeSample
    budget: IntArray
    """[m]"""
    is_open: npt.NDArray[np.bool_]
    """[m], whether the output begins within the reasoning"""
    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]

    def arrays(self) -> dict[str, HostArray]:
        before = self.before
        return {
            "logits_rows": before.logits_rows,
            "table_rows": before.table_rows,
            "positions": before.positions,
            "first": before.num_prompt_tokens,
            "budget": self.budget,
            "is_open": self.is_open,
            "end_ids": np.array(self.end_ids, np.int64),
        }

    def apply(self, logits: torch.Tensor, token_ids: torch.Tensor) -> None:
        columns = {name: torch.from_numpy(array) for name, array in self.arrays().items()}
        width = int(self.before.positions.max())
        is_due, forced = forced_tokens(token_ids, columns, self.start_ids, self.end_ids, width)
        for entry in is_due.nonzero().flatten().tolist():
            row = int(self.before.logits_rows[entry])
            logits[row].fill_(-torch.inf)
            logits[row, forced[entry]] = 0.0


def forced_tokens(
    token_ids: torch.Tensor,
    columns: dict[str, torch.Tensor],
    start_ids: tuple[int, ...],
    end_ids: tuple[int, ...],
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(whether the end is due, the id that has to come then), bool and int64 [m], on any device.

    `columns` are the arrays of a `ForcedTokens`; no row has more than `width` tokens before the one
    to be sampled.
    """
    first, positions = columns["first"], columns["positions"]
    tokens = token_ids[columns["table_rows"], :width]
    started = _end_of_last(tokens, start_ids, first, positions)
    ended = _end_of_last(tokens, end_ids, first, positions)
    began = torch.where((started < 0) & columns["is_open"], first, started)
    num_over = positions - began - columns["budget"]
    is_due = (began >= 0) & (began > ended) & (num_over >= 0)
    return is_due, columns["end_ids"][num_over.clamp(0, len(end_ids) - 1)]


def _end_of_last(
    tokens: torch.Tensor, mark: tuple[int, ...], first: torch.Tensor, end: torch.Tensor
) -> torch.Tensor:
    """Where the last mark between `first` and `end` stops, int64 [m]; -1 if there is none.

    `tokens` is int32 [m, width].
    """
    width = tokens.shape[1]
    if width < len(mark):
        return torch.full_like(first, -1)
    num_places = width - len(mark) + 1
    matches = torch.ones(len(tokens), num_places, dtype=torch.bool, device=tokens.device)
    for offset, token_id in enumerate(mark):
        matches &= tokens[:, offset : offset + num_places] == token_id
    stops = torch.arange(num_places, device=tokens.device) + len(mark)
    matches &= (stops - len(mark) >= first.unsqueeze(1)) & (stops <= end.unsqueeze(1))
    return torch.where(matches, stops, -1).amax(1)
