"""What rows ask of the sampler, with the operator's own processors."""

from __future__ import annotations

from tokenmill.config.engine_config import EngineConfig
from tokenmill.contracts.logits_processor import ProcessorContext, make_processors
from tokenmill.sampling.row_params import RowSamplingParams


def build_row_params(config: EngineConfig) -> RowSamplingParams:
    """What rows ask of the sampler, custom processors included.

    Raises `ConfigError` for processors that cannot be loaded or made.
    """
    vocab_size, max_num_seqs = config.model.vocab_size, config.scheduler.max_num_seqs
    context = ProcessorContext(vocab_size, max_num_seqs, config.device)
    processors = make_processors(config.sampling.logits_processors, context)
    return RowSamplingParams(max_num_seqs, vocab_size, processors)
