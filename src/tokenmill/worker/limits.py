"""How large a runner's steps and tables are."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.config.engine_config import EngineConfig
from tokenmill.worker.batch import BatchShape
from tokenmill.worker.rows import RowTable

LOGITS_SLAB = 64
"""Rows of logits computed at once: log-probabilities of a long prompt need no more memory."""
LONG_STEP = 1024
"""Tokens of a step that is not recorded."""


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """The largest step, and the shapes of the tables."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    vocab_size: int
    logits_slab: int = LOGITS_SLAB

    @classmethod
    def of(cls, config: EngineConfig, logits_slab: int = LOGITS_SLAB) -> RunnerLimits:
        """Of an engine with these settings."""
        return cls(
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_model_len=config.scheduler.max_model_len,
            block_size=config.cache.block_size,
            vocab_size=config.model.vocab_size,
            logits_slab=logits_slab,
        )

    @property
    def largest_step(self) -> BatchShape:
        """One request with as many tokens as a step may have."""
        return BatchShape(self.max_num_batched_tokens, 1, self.max_num_batched_tokens, 1)

    def make_rows(self, num_kv_groups: int) -> RowTable:
        """An empty table, with block tables for so many groups."""
        return RowTable(self.max_num_seqs, self.max_model_len, self.block_size, num_kv_groups)

    @property
    def steps_of_variants(self) -> list[BatchShape]:
        """Steps that together need every kernel that recorded ones and the largest do not: those of
        products go by powers of two.
        """
        seqs, most = self.max_num_seqs, self.max_num_batched_tokens
        powers = [1 << power for power in range(most.bit_length())]
        nums_reqs = [*(power for power in powers if power < seqs), seqs]
        return [
            *(BatchShape(num_reqs, num_reqs, 1, 1) for num_reqs in nums_reqs),
            *(BatchShape(size, 1, size, 1) for size in powers if LONG_STEP <= size < most),
        ]
