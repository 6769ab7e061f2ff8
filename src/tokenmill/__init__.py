"""tokenmill: an engine for LLM inference and serving.

The public names are imported when first used, so that `import tokenmill` loads neither torch nor
anything else that is slow.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmill.config.engine_args import EngineArgs
    from tokenmill.contracts.logits_processor import LogitsProcessor, ProcessorContext
    from tokenmill.engine.llm_engine import LLMEngine
    from tokenmill.entrypoints.beam_search import BeamSearchParams
    from tokenmill.entrypoints.llm import LLM
    from tokenmill.errors import TokenmillError
    from tokenmill.lora_request import LoRARequest
    from tokenmill.outputs import CompletionOutput, FlatLogprobs, Logprob, RequestOutput
    from tokenmill.pooling_outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from tokenmill.pooling_params import PoolingParams
    from tokenmill.repetition import RepetitionDetectionParams
    from tokenmill.sampling_params import RequestOutputKind, SamplingParams
    from tokenmill.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"

# As a library we stay quiet until the host program configures logging.
logging.getLogger(__name__).addHandler(logging.NullHandler())

_HOME = {
    "LLM": "tokenmill.entrypoints.llm",
    "BeamSearchParams": "tokenmill.entrypoints.beam_search",
    "LLMEngine": "tokenmill.engine.llm_engine",
    "EngineArgs": "tokenmill.config.engine_args",
    "SamplingParams": "tokenmill.sampling_params",
    "RequestOutputKind": "tokenmill.sampling_params",
    "RequestOutput": "tokenmill.outputs",
    "CompletionOutput": "tokenmill.outputs",
    "FlatLogprobs": "tokenmill.outputs",
    "Logprob": "tokenmill.outputs",
    "PoolingParams": "tokenmill.pooling_params",
    "PoolingRequestOutput": "tokenmill.pooling_outputs",
    "EmbeddingRequestOutput": "tokenmill.pooling_outputs",
    "ClassificationRequestOutput": "tokenmill.pooling_outputs",
    "ScoringRequestOutput": "tokenmill.pooling_outputs",
    "LoRARequest": "tokenmill.lora_request",
    "LogitsProcessor": "tokenmill.contracts.logits_processor",
    "ProcessorContext": "tokenmill.contracts.logits_processor",
    "RepetitionDetectionParams": "tokenmill.repetition",
    "StructuredOutputsParams": "tokenmill.structured_outputs",
    "TokenmillError": "tokenmill.errors",
}

__all__ = [
    "LLM",
    "BeamSearchParams",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "FlatLogprobs",
    "LLMEngine",
    "LoRARequest",
    "LogitsProcessor",
    "Logprob",
    "PoolingParams",
    "PoolingRequestOutput",
    "ProcessorContext",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TokenmillError",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'tokenmill' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
