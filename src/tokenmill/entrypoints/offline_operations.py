"""What an `LLM` does besides answering: it sleeps, and takes other weights."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tokenmill.contracts.operations import TAGS, Sleep, UpdateWeights, WakeUp
from tokenmill.engine.llm_engine import LLMEngine
from tokenmill.entrypoints.offline_requests import RequestRunner
from tokenmill.observe.metrics import Metric

if TYPE_CHECKING:
    import torch


class OfflineOperations:
    """Operations of `LLM`; calls from several threads take turns."""

    llm_engine: LLMEngine
    _turn: threading.Lock
    _requests: RequestRunner

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause, and give memory back to the system until `wake_up`.

        Level 0 makes no steps any more. Level 1 also forgets all KV, and gives the memory of the KV
        cache back; weights stay. Level 2 drops the weights as well. Levels 1 and 2 need
        `enable_sleep_mode`.

        `mode` says what becomes of requests that have begun, of `enqueue` say: they end with
        `finish_reason` `abort`, or the engine waits for them (`wait`), or they go on after
        `wake_up` (`keep`), with the tokens that they would have had.

        Raises `InvalidRequestError` for a level or mode that this engine does not have.
        """
        with self._turn:
            self.llm_engine.operate(Sleep(level, mode))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory back and go on, with the weights of before.

        `tags` are those of `weights`, `kv_cache` and `scheduling` that are to wake up; None is all.
        Steps are made again when the first two are awake. Raises `CheckpointError` for weights that
        cannot be read again, and `InvalidRequestError` for weights that came as tensors and were
        dropped: `update_weights` first.
        """
        with self._turn:
            self.llm_engine.operate(WakeUp(TAGS if tags is None else tuple(tags)))

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine, or a part of it, is asleep, at whichever level."""
        return self.llm_engine.state.is_sleeping

    def update_weights(
        self,
        weights: str | os.PathLike[str] | Iterable[tuple[str, torch.Tensor]],
        *,
        version: str = "",
        mode: str = "wait",
    ) -> None:
        """Replace the weights of the running engine, in the memory of those before.

        `weights` is a directory or file with a checkpoint of the same config, or all tensors of one
        (float32, float16 or bfloat16) with their names there. They become what they would have
        become of a checkpoint that the engine is built from, quantised for example. Prefixes and
        KV of the old weights are forgotten. Adapters stay, and so does a model that drafts.

        `mode` is as in `sleep`: by default, requests that have begun finish with the old weights;
        with `keep` they go on with the new ones behind the tokens that they have. Requests that
        have not begun have the new ones. `version` names the weights; by default updates count.

        Raises `ModelNotFoundError`, and `CheckpointError` and `InvalidRequestError` for weights
        that do not fit the model.
        If that shows when some are replaced already, the engine is asleep until an update succeeds.
        """
        with self._turn:
            if isinstance(weights, str | os.PathLike):
                self.llm_engine.operate(UpdateWeights(os.fspath(weights), version, mode))
            else:
                self.llm_engine.operate(UpdateWeights("", version, mode), weights)

    def get_metrics(self) -> list[Metric]:
        """What the engine has done and does, by the names that a server has for Prometheus: objects
        of `tokenmill.observe.metrics` (`Counter`, `Gauge`, `Histogram`, `Vector`).

        Requests count when they have ended; those of `llm_engine` itself do not.
        """
        with self._turn:
            return self._requests.metrics.snapshot(self.llm_engine.stats())

    @property
    def weight_version(self) -> str:
        """The name of the weights; `default` are those that the engine was built with."""
        return self.llm_engine.state.weight_version
