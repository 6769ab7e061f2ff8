"""How large a runner's steps and tables are."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.config.engine_config import EngineConfig
from tokenmill.worker.batch import BatchShape
from tokenmill.worker.rows import RowTable

LOGITS_SLAB = 64
"""Rows of logits computed at once: log-probabilities of a long prompt need no more memory."""


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
    def nums_reqs_of_variants(self) -> list[int]:
        """Numbers of requests, each with one token, that together need every kernel of such steps:
        those of products go by powers of two.
        """
        powers = {1 << power for power in range(self.max_num_seqs.bit_length())}
        return sorted({*powers, self.max_num_seqs})
