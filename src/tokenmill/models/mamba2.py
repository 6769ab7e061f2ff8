"""Mamba-2 (Dao and Gu, 2024): state-space layers and nothing else.

    x -> norm -> mixer -> +

Nothing is kept of a sequence but its states, and no position is known: the KV cache has blocks of
states only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from tokenmill.config.parameters import ModelParameters, read_parameters
from tokenmill.errors import ConfigError, shown
from tokenmill.layers.attention import Attention
from tokenmill.layers.embedding import VocabEmbedding
from tokenmill.layers.kernels import LayerKernels, layer_kernels
from tokenmill.layers.norm import RMSNorm
from tokenmill.layers.state_space import Mamba2Mixer
from tokenmill.models.bamba import mixer_shape
from tokenmill.models.base import IntermediateTensors
from tokenmill.models.config import norm_eps

_EPS = "layer_norm_epsilon"


class Mamba2Layer(nn.Module):
    """A mixer behind a norm, added to the residual stream."""

    def __init__(
        self, index: int, hf_config: Mapping[str, Any], dtype: torch.dtype, kernels: LayerKernels
    ) -> None:
        super().__init__()
        sizes = read_parameters(hf_config)
        assert sizes.states is not None
        eps = norm_eps(hf_config, _EPS, 1e-5)
        self.mixer = Mamba2Mixer(
            f"backbone.layers.{index}.mixer",
            hidden_size=sizes.hidden_size,
            shape=mixer_shape(hf_config, sizes.states, eps),
            bias=bool(hf_config.get("use_bias", False)),
            conv_bias=bool(hf_config.get("use_conv_bias", True)),
            dtype=dtype,
            kernels=kernels,
        )
        self.norm = RMSNorm(
            sizes.hidden_size, eps, dtype=dtype, kernels=kernels, empty_out=self.mixer.empty_input
        )

    def forward(
        self, positions: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.norm(x, residual)
        return self.mixer(positions, normed), residual


class Mamba2Backbone(nn.Module):
    """Embedding, layers and last norm."""

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        sizes: ModelParameters,
        dtype: torch.dtype,
        kernels: LayerKernels,
    ) -> None:
        super().__init__()
        self.embeddings = VocabEmbedding(
            sizes.vocab_size, sizes.hidden_size, dtype=dtype, kernels=kernels
        )
        self.layers = nn.ModuleList(
            Mamba2Layer(index, hf_config, dtype, kernels) for index in range(sizes.num_layers)
        )
        eps = norm_eps(hf_config, _EPS, 1e-5)
        self.norm_f = RMSNorm(sizes.hidden_size, eps, dtype=dtype, kernels=kernels)

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        residual: torch.Tensor | None = None
        for layer in self.layers:
            x, residual = layer(positions, x, residual)
        return self.norm_f(x, residual)[0]  # type: ignore[no-any-return]


class Mamba2ForCausalLM(nn.Module):
    """A Mamba-2 with its output head."""

    config_defaults: ClassVar[Mapping[str, Any]] = {}
    embedding_name: ClassVar[str] = "backbone.embeddings.weight"
    optional_prefix: ClassVar[str] = "backbone."

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        *,
        dtype: torch.dtype,
        max_model_len: int,
        kernels: LayerKernels | None = None,
    ) -> None:
        """Parameters are allocated, not filled. Raises `ConfigError` for another activation."""
        super().__init__()
        activation = hf_config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise ConfigError(
                f"config.json: hidden_act={shown(activation)} of a Mamba-2 must be silu."
            )
        sizes = read_parameters(hf_config)
        kernels = kernels or layer_kernels(dtype)
        self.backbone = Mamba2Backbone(hf_config, sizes, dtype, kernels)
        self.lm_head = (
            self.backbone.embeddings
            if hf_config.get("tie_word_embeddings", False)
            else VocabEmbedding(sizes.vocab_size, sizes.hidden_size, dtype=dtype, kernels=kernels)
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.backbone.embeddings(input_ids)  # type: ignore[no-any-return]

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """Hidden states, normalised for the head. It is not cut into pipeline ranks."""
        assert intermediate_tensors is None
        embeds = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        return self.backbone(positions, embeds)  # type: ignore[no-any-return]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.lm_head.compute_logits(hidden_states)

    def attention_layers(self) -> Mapping[str, Attention]:
        """None."""
        return {}
