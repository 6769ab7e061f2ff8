"""A worker's memory on a CPU: given back to the system and taken again at the same addresses.

Recorded steps, plans and packed weights know addresses. So memory is not freed: the system is
told that its pages are not needed (`madvise`), and they are there again, as zeros, when they are
touched.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from tokenmill.checkpoint.checkpoint import Checkpoint
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.config.engine_config import EngineConfig
from tokenmill.contracts.operations import Tensors
from tokenmill.kernels.pages import release_pages
from tokenmill.kernels.state_space import NOTHING
from tokenmill.layers.state_space import state_layers
from tokenmill.models.refill import Refill
from tokenmill.models.registry import NATIVE
from tokenmill.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_OF_NO_MATTER = frozenset(
    ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache")
)
"""Keys of a config.json that say nothing about what is computed."""


class WorkerMemory:
    """A `ModelMemory`."""

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        checkpoint: Checkpoint,
        *,
        keeps_checkpoint: bool,
    ) -> None:
        """`checkpoint` is what the runner's model was filled with; it is kept open where weights
        may be dropped and filled again.
        """
        self._runner = runner
        self._source = checkpoint if keeps_checkpoint else None
        """Where the weights came from; None if that is not there any more."""
        self._keeps = keeps_checkpoint
        self._hf_config = dict(checkpoint.config)
        self.has_weights = True
        self._refill: Refill | None = None
        if config.model.implementation == NATIVE:
            formats = dict(checkpoint.tensor_formats)
            self._refill = Refill(runner.model_and_drafter[0], config.model, formats)

    def sleep(self, level: int) -> int:
        released = sum(map(release_pages, kv_memory(self._runner)))
        if level > 1:
            assert self._refill is not None
            self.has_weights = False
            released += sum(map(release_pages, _apart(self._refill.memory())))
        return released

    def wake_up(self) -> None:
        if self.has_weights or self._source is None:
            return
        assert self._refill is not None
        self._refill.from_checkpoint(self._source)
        self.has_weights = True

    def update_weights(self, path: str, tensors: Tensors | None) -> None:
        assert self._refill is not None
        if tensors is not None:
            self._forget_source()
            self._refill.from_tensors(tensors)
        else:
            checkpoint = open_checkpoint(Path(path))
            try:
                self._refill.check(checkpoint)
                self._compare(checkpoint)
                self._forget_source()
                self._refill.from_checkpoint(checkpoint)
            finally:
                if not self._keeps:
                    checkpoint.close()
            self._source = checkpoint if self._keeps else None
        self.has_weights = True

    def _compare(self, checkpoint: Checkpoint) -> None:
        """Warn of a config that says something else: the model stays as it was built."""
        ours, theirs = self._hf_config, checkpoint.config
        shared = (set(ours) & set(theirs)) - _OF_NO_MATTER
        if differing := sorted(key for key in shared if ours[key] != theirs[key]):
            logger.warning(
                "%s has another config (%s), of which only the weights are taken.",
                checkpoint.path,
                ", ".join(differing),
            )

    def _forget_source(self) -> None:
        """From here on, the weights are not all of one model until all are replaced."""
        self.has_weights, self._source = False, None


def kv_memory(runner: ModelRunner) -> Iterator[torch.Tensor]:
    """What a model and one that drafts for it keep of sequences; states are marked as missing."""
    model, drafter = runner.model_and_drafter
    yield from _apart(layer.bound[1] for layer in model.attention_layers().values())
    for layer in state_layers(model).values():
        layer.state_cache.num_seen.fill_(NOTHING)
        yield layer.state_cache.values
    drafts = getattr(drafter, "runner", None)
    if isinstance(drafts, ModelRunner):
        yield from kv_memory(drafts)


def _apart(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Each memory once: layers may share it."""
    seen: set[tuple[int, int]] = set()
    for tensor in tensors:
        place = tensor.data_ptr(), tensor.numel()
        if place not in seen:
            seen.add(place)
            yield tensor
