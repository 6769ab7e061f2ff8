"""The drafter that the settings ask for."""

from __future__ import annotations

from tokenmill.config.engine_config import EngineConfig
from tokenmill.features.spec.ngram import NgramDrafter


def build_drafter(config: EngineConfig) -> NgramDrafter | None:
    """None without speculation."""
    if config.speculation is None:
        return None
    return NgramDrafter(config.speculation, config.scheduler.max_num_seqs)
