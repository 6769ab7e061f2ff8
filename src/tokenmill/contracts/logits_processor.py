"""What an operator's own logits processor looks like. `docs/logits-processors.md` tells how to
write and load one.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from tokenmill.errors import ConfigError, did_you_mean, shown
from tokenmill.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

    EditLogits = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    """Edits one row of logits in place: (prompt ids int32 [p], output ids int32 [o], logits
    float32 [vocab_size]), all on the device that the logits are on."""


ENTRY_POINTS = "tokenmill.logits_processors"
"""The group in which packages announce processors by name."""


@dataclass(frozen=True, slots=True)
class ProcessorContext:
    """The engine that a processor works in."""

    vocab_size: int
    """Width of the logits."""
    max_num_seqs: int
    """Most requests that run at the same time."""
    device: str
    """`cpu` or `cuda`."""


class LogitsProcessor(ABC):
    """Edits the logits of the requests that ask for it, before a token is chosen.

    An engine makes one object of each class that it is told to load. `for_request` is asked once
    for each sequence that enters a row, and again after a preemption.
    """

    def __init__(self, context: ProcessorContext) -> None:
        """Subclasses that prepare something take the context and call this."""
        self.context = context

    @classmethod  # noqa: B027 - subclasses may do without
    def validate_params(cls, params: SamplingParams) -> None:
        """Raise `ValueError` or `InvalidRequestError` for `extra_args` that make no sense.

        Called for every request before it is queued, in the front end: no torch is needed there.
        """

    @abstractmethod
    def for_request(self, params: SamplingParams) -> EditLogits | None:
        """The edit for a request with these parameters; None, which costs nothing, if it asks for
        none.

        The edit is called for each token to be sampled. It must be a function of its arguments
        alone: then a request's text does not depend on its neighbours, nor on how it was cut or
        resumed. If it raises, that request ends with an error and the others go on.
        """


def load_processors(given: Iterable[object]) -> list[type[LogitsProcessor]]:
    """The classes that the setting `logits_processors` means, in its order.

    Each is `module:Class`, the name of an entry point, or a class. Raises `ConfigError` for what
    cannot be found or is no `LogitsProcessor`.
    """
    return [_load(each) for each in given]


def make_processors(given: Iterable[object], context: ProcessorContext) -> list[LogitsProcessor]:
    """An object of each class that `load_processors` finds.

    Raises `ConfigError` also for one that cannot be made.
    """
    made = []
    for kind in load_processors(given):
        try:
            made.append(kind(context))
        except Exception as error:
            raise ConfigError(
                f"logits_processors: {kind.__name__} could not be made:"
                f" {type(error).__name__}: {error}"
            ) from error
    return made


def _load(given: object) -> type[LogitsProcessor]:
    found = _find(given) if isinstance(given, str) else given
    if isinstance(found, type) and issubclass(found, LogitsProcessor):
        return found
    raise ConfigError(
        f"logits_processors holds {shown(given)}, which is no subclass of"
        f" tokenmill.LogitsProcessor."
    )


def _find(name: str) -> object:
    module, _, path = name.partition(":")
    if not path:
        announced = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
        if name not in announced:
            raise ConfigError(
                f"logits_processors holds {name!r}, which no installed package announces; give"
                f" `module:Class` or one of: {', '.join(sorted(announced)) or '(there are none)'}."
                f"{did_you_mean(name, announced)}"
            )
        module, path = announced[name].module, announced[name].attr
    try:
        found: object = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise ConfigError(
            f"logits_processors: {name!r} could not be loaded: {type(error).__name__}: {error}"
        ) from error
    return found
