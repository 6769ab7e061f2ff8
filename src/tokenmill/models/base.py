"""What the runner expects of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from tokenmill.contracts.request import MultiModalFeature
from tokenmill.layers.attention import Attention
from tokenmill.layers.kernels import LayerKernels

IntermediateTensors = dict[str, torch.Tensor]
"""What one pipeline rank hands to the next, by name."""


class CausalLM(Protocol):
    """A decoder that predicts the next token."""

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token ids, int32 [num_tokens], to embeddings [num_tokens, hidden_size]."""
        ...

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """Hidden states [num_tokens, hidden_size] of the flat batch.

        `positions` is int64 [num_tokens]. `inputs_embeds` replaces the embedding of `input_ids`.
        """
        ...

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, hidden_size] to float32 logits [n, vocab_size]."""
        ...

    def attention_layers(self) -> Mapping[str, Attention]:
        """Every attention layer by its name, in order of depth."""
        ...


@runtime_checkable
class SupportsMultiModal(Protocol):
    """A decoder that also takes what is no text, as embeddings in the place of tokens'."""

    def encode(self, modality: str, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """One item's embeddings, [sum of its `embed_spans`' counts, hidden_size].

        They have the model's dtype, and their bits depend on the item alone. `inputs` are what the
        family's processor made of it.
        """
        ...

    def mrope_positions(
        self, token_ids: Sequence[int], features: Sequence[MultiModalFeature]
    ) -> np.ndarray | None:
        """Positions of a prompt, int64 [3, len(token_ids)], of a model with three for each token;
        None of one whose positions are plain.

        Behind the prompt all three go on by one, from the prompt's greatest + 1.
        """
        ...


class CausalLMClass(Protocol):
    """How the loader makes a model: every family's class is called like this."""

    config_defaults: Mapping[str, Any]
    """What a config.json leaves out when it is so."""
    embedding_name: str
    """The tensor that is the head's, too, where they are tied."""
    optional_prefix: str
    """Begins every name but the head's; some checkpoints leave it out."""

    def __call__(
        self,
        hf_config: Mapping[str, Any],
        *,
        dtype: torch.dtype,
        max_model_len: int,
        kernels: LayerKernels | None = None,
    ) -> CausalLM:
        """Allocate the model's parameters; `kernels` are the best of the CPU by default.

        Raises `ConfigError` for a config it cannot serve.
        """
        ...
