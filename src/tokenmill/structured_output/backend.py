"""What a grammar backend does. A seam: everything else is the same for all backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tokenmill.errors import InvalidRequestError
from tokenmill.structured_outputs import StructuredOutputsParams

Bitmask = npt.NDArray[np.int32]
"""[num_rows, ceil(vocab_size / 32)]; bit t % 32 of word t // 32 allows token t."""


class GrammarMatcher(Protocol):
    """How far one text is in its grammar. Used by one thread at a time."""

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Go on over some tokens; False if one of them is refused, then the matcher is lost."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last tokens that were accepted."""
        ...

    def count_valid(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens, from the first on, would be accepted; nothing changes."""
        ...

    def is_accepting(self) -> bool:
        """Whether the text may end here."""
        ...

    def is_terminated(self) -> bool:
        """Whether the text must end here: nothing can follow."""
        ...

    def error(self) -> str:
        """Why the matcher is lost, a bound of its work, say; empty while it is not."""
        ...

    def forced_tokens(self) -> list[int]:
        """The next tokens, if the grammar leaves no choice of text and the tokenizer none of how to
        write it; empty otherwise.
        """
        ...


class Grammar(Protocol):
    """A compiled form, shared by all requests that ask for it."""

    def make_matcher(self) -> GrammarMatcher:
        """A matcher at the start of the text."""
        ...


class GrammarBackend(Protocol):
    """A library that enforces grammars, bound to one tokenizer. Safe to share among threads."""

    name: str
    eos_token_ids: tuple[int, ...]
    """The ids that end a text."""

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Raises `InvalidRequestError` for what is malformed, or cannot be enforced to the
        letter.
        """
        ...

    def fill_bitmasks(self, matchers: Sequence[GrammarMatcher], bitmask: Bitmask) -> None:
        """Put the tokens that matcher i allows into row i, with the end tokens where it accepts.

        In parallel, and without holding up other threads of Python.
        """
        ...


def refusal(params: StructuredOutputsParams, why: str) -> InvalidRequestError:
    """An error that names the field at fault."""
    name = f"structured_outputs.{params.kind}"
    return InvalidRequestError(f"{name} cannot be enforced: {why.rstrip('. ')}.", parameter=name)
