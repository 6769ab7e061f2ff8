"""The drafter that the settings ask for."""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.config.engine_config import EngineConfig
from tokenmill.config.speculation import SpeculativeConfig
from tokenmill.features.spec.depths import Agree, alone
from tokenmill.features.spec.draft_head import HeadDrafter
from tokenmill.features.spec.draft_model import DraftLimits, DraftModelDrafter, PlanRunner
from tokenmill.features.spec.lookup import AllTexts, LookupDrafter, OwnText, TextIndex

_TEXTS: dict[str, Callable[[SpeculativeConfig, int], TextIndex]] = {
    "ngram": OwnText,
    "suffix": AllTexts,
}

Drafters = LookupDrafter | DraftModelDrafter | HeadDrafter


def build_drafter(
    config: EngineConfig,
    make_runner: Callable[[], tuple[PlanRunner, DraftLimits]],
    make_head_drafter: Callable[[], HeadDrafter] | None = None,
    agree: Agree = alone,
) -> Drafters | None:
    """None without speculation. `make_runner` loads the model that drafts, where one does, and
    `make_head_drafter` the head, where heads can. Ranks that run a model together `agree` on how
    much it drafts.
    """
    speculation = config.speculation
    if speculation is None:
        return None
    if speculation.method in _TEXTS:
        max_num_seqs = config.scheduler.max_num_seqs
        texts = _TEXTS[speculation.method](speculation, max_num_seqs)
        return LookupDrafter(texts, speculation, max_num_seqs)
    if speculation.reads_hidden_states:
        assert make_head_drafter is not None, "heads are refused here (config/draft_head.py)"
        return make_head_drafter()
    runner, limits = make_runner()
    return DraftModelDrafter(
        runner,
        limits,
        speculation.num_speculative_tokens,
        adaptive=speculation.adaptive,
        agree=agree,
    )
