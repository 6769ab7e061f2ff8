"""What a caller gets back from a pooling model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(slots=True)
class PoolingOutput:
    """The result as it is."""

    data: npt.NDArray[np.float32]
    """[size], or of a task for tokens [num_prompt_tokens, size]."""


@dataclass(slots=True)
class EmbeddingOutput:
    """A prompt as a vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Values of the embedding."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """A prompt's scores."""

    probs: list[float]
    """One for each class: probabilities, or logits without activation."""

    @property
    def num_classes(self) -> int:
        """Classes of the model."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts go together."""

    score: float
    """Of a cross-encoder its own score, else the cosine of the two embeddings."""


Output = TypeVar("Output", PoolingOutput, EmbeddingOutput, ClassificationOutput, ScoringOutput)


@dataclass(slots=True)
class PooledOutput(Generic[Output]):
    """One prompt and what became of it."""

    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    """Of a score: of the pair, or of both texts one after the other."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    finished: bool = True


class PoolingRequestOutput(PooledOutput[PoolingOutput]):
    """What `LLM.encode` returns for a prompt."""


class EmbeddingRequestOutput(PooledOutput[EmbeddingOutput]):
    """What `LLM.embed` returns for a prompt."""


class ClassificationRequestOutput(PooledOutput[ClassificationOutput]):
    """What `LLM.classify` returns for a prompt."""


class ScoringRequestOutput(PooledOutput[ScoringOutput]):
    """What `LLM.score` returns for a pair of texts."""
