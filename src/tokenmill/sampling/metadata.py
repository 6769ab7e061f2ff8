"""What the sampler needs to know of one step's logits rows, as columns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.sampling.grammar_mask import GrammarMask

if TYPE_CHECKING:
    from tokenmill.sampling.edits import LogitsEdit

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RandomColumns:
    """What random sampling reads; every array is [n], one entry a logits row."""

    temperature: npt.NDArray[np.float32]
    """Above 0 where a token is drawn at random."""
    top_k: IntArray
    """0 is off."""
    top_p: npt.NDArray[np.float64]
    """1 is off."""
    min_p: npt.NDArray[np.float32]
    """0 is off."""
    seed: npt.NDArray[np.uint64]
    position: IntArray
    """Place in the sequence of the token to be sampled."""

    def take(self, indices: IntArray) -> RandomColumns:
        """The columns of some of the logits rows."""
        return RandomColumns(
            temperature=self.temperature[indices],
            top_k=self.top_k[indices],
            top_p=self.top_p[indices],
            min_p=self.min_p[indices],
            seed=self.seed[indices],
            position=self.position[indices],
        )


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """One entry a logits row, [n]."""

    is_greedy: npt.NDArray[np.bool_]
    random: RandomColumns
    wants_logprobs: npt.NDArray[np.bool_]
    num_logprobs: IntArray
    """How many of the best tokens are listed beside the chosen one."""
    listed_ids: dict[int, IntArray] = field(default_factory=dict)
    """By logits row: ids that are listed in place of the best ones."""
    edits: tuple[LogitsEdit, ...] = ()
    """In their order."""
    token_ids: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.int32))
    """int32 [table rows, max_len], on the device of the logits: what edits read."""
    grammar: GrammarMask = field(default_factory=GrammarMask)
