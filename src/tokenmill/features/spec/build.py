"""The drafter that the settings ask for."""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.config.engine_config import EngineConfig
from tokenmill.features.spec.draft_model import DraftLimits, DraftModelDrafter, PlanRunner
from tokenmill.features.spec.ngram import NgramDrafter

Drafters = NgramDrafter | DraftModelDrafter


def build_drafter(
    config: EngineConfig, make_runner: Callable[[], tuple[PlanRunner, DraftLimits]]
) -> Drafters | None:
    """None without speculation. `make_runner` loads the model that drafts, where one does."""
    speculation = config.speculation
    if speculation is None:
        return None
    if speculation.method == "ngram":
        return NgramDrafter(speculation, config.scheduler.max_num_seqs)
    runner, limits = make_runner()
    return DraftModelDrafter(
        runner, limits, speculation.num_speculative_tokens, adaptive=speculation.adaptive
    )
