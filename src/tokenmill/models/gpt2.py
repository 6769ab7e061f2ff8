"""GPT-2: learned positions, LayerNorm, plain feed-forward blocks, biases everywhere.

    x + position -> LayerNorm -> attention -> + -> LayerNorm -> MLP -> +

The checkpoint keeps matrices transposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from tokenmill.config.parameters import ModelParameters, read_parameters, standard_names
from tokenmill.errors import ConfigError
from tokenmill.kernels.activation import Gate
from tokenmill.layers.attention import Attention
from tokenmill.layers.embedding import EmbeddingTable, VocabEmbedding
from tokenmill.layers.kernels import LayerKernels, layer_kernels
from tokenmill.layers.linear import Linear
from tokenmill.layers.linear_method import Activations
from tokenmill.layers.norm import LayerNorm
from tokenmill.models.base import IntermediateTensors
from tokenmill.models.config import activation_gate, norm_eps
from tokenmill.models.decoder import named_attention


@dataclass(frozen=True, slots=True)
class GPT2Config:
    """What the model reads from its config.json."""

    sizes: ModelParameters
    norm_eps: float
    gate: Gate
    scales: tuple[float, ...]
    """Of attention scores, by layer."""
    tie_word_embeddings: bool

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any]) -> GPT2Config:
        """Raises `ConfigError` that names the key at fault."""
        sizes = read_parameters(hf_config)
        if sizes.hidden_size % sizes.num_heads:
            raise ConfigError(
                f"config.json: n_embd={sizes.hidden_size} is not a multiple of"
                f" n_head={sizes.num_heads}."
            )
        if hf_config.get("add_cross_attention"):
            raise ConfigError("config.json: add_cross_attention=true is not supported.")
        scale = sizes.head_size**-0.5 if hf_config.get("scale_attn_weights", True) else 1.0
        by_depth = bool(hf_config.get("scale_attn_by_inverse_layer_idx", False))
        return cls(
            sizes=sizes,
            norm_eps=norm_eps(hf_config, "layer_norm_epsilon", 1e-5),
            gate=activation_gate(hf_config, "gelu_new"),
            scales=tuple(
                scale / (layer + 1) if by_depth else scale for layer in range(sizes.num_layers)
            ),
            tie_word_embeddings=bool(hf_config.get("tie_word_embeddings", True)),
        )


class GPT2Attention(nn.Module):
    """Projections around attention with as many KV heads as heads."""

    def __init__(
        self, layer: int, config: GPT2Config, dtype: torch.dtype, kernels: LayerKernels
    ) -> None:
        super().__init__()
        sizes = config.sizes
        shared: dict[str, Any] = {
            "bias": True,
            "dtype": dtype,
            "kernels": kernels,
            "is_transposed": True,
        }
        self.c_attn = Linear(sizes.hidden_size, 3 * sizes.hidden_size, **shared)
        self.attn = Attention(
            f"transformer.h.{layer}.attn.attn",
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_heads,
            head_size=sizes.head_size,
            scale=config.scales[layer],
            rotary=None,
        )
        self.c_proj = Linear(sizes.hidden_size, sizes.hidden_size, **shared)

    def empty_input(self, num_rows: int) -> Activations:
        """A place for this block's input, in the form in which it is read."""
        return self.c_attn.empty_input(num_rows)

    def forward(self, positions: torch.Tensor, x: Activations) -> torch.Tensor:
        query, key, value = self.c_attn(x).chunk(3, dim=-1)
        return self.c_proj(self.attn(positions, query, key, value))  # type: ignore[no-any-return]


class GPT2MLP(nn.Module):
    """A block of project(activation(expand(x)))."""

    def __init__(self, config: GPT2Config, dtype: torch.dtype, kernels: LayerKernels) -> None:
        super().__init__()
        sizes = config.sizes
        shared: dict[str, Any] = {
            "bias": True,
            "dtype": dtype,
            "kernels": kernels,
            "is_transposed": True,
        }
        self.c_fc = Linear(sizes.hidden_size, sizes.intermediate_size, **shared)
        self.c_proj = Linear(sizes.intermediate_size, sizes.hidden_size, **shared)
        self.gate = config.gate
        self.kernels = kernels

    def empty_input(self, num_rows: int) -> Activations:
        """A place for this block's input, in the form in which it is read."""
        return self.c_fc.empty_input(num_rows)

    def forward(self, x: Activations) -> torch.Tensor:
        expanded = self.c_fc(x)
        activated = self.c_proj.empty_input(len(expanded))
        self.kernels.activation(expanded, self.gate, activated)
        return self.c_proj(activated)  # type: ignore[no-any-return]


class GPT2Block(nn.Module):
    """Attention, then MLP, each behind a norm and added to the residual stream."""

    def __init__(
        self, layer: int, config: GPT2Config, dtype: torch.dtype, kernels: LayerKernels
    ) -> None:
        super().__init__()
        self.attn = GPT2Attention(layer, config, dtype, kernels)
        self.mlp = GPT2MLP(config, dtype, kernels)
        size = config.sizes.hidden_size
        shared: dict[str, Any] = {"dtype": dtype, "kernels": kernels}
        self.ln_1 = LayerNorm(size, config.norm_eps, empty_out=self.attn.empty_input, **shared)
        self.ln_2 = LayerNorm(size, config.norm_eps, empty_out=self.mlp.empty_input, **shared)

    def forward(
        self, positions: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.ln_1(x, residual)
        normed, residual = self.ln_2(self.attn(positions, normed), residual)
        return self.mlp(normed), residual


class GPT2Model(nn.Module):
    """Embeddings, blocks and last norm."""

    def __init__(self, config: GPT2Config, dtype: torch.dtype, kernels: LayerKernels) -> None:
        super().__init__()
        sizes = config.sizes
        self.wte = VocabEmbedding(sizes.vocab_size, sizes.hidden_size, dtype=dtype, kernels=kernels)
        self.wpe = EmbeddingTable(sizes.max_context, sizes.hidden_size)
        self.kernels = kernels
        self.h = nn.ModuleList(
            GPT2Block(layer, config, dtype, kernels) for layer in range(sizes.num_layers)
        )
        self.ln_f = LayerNorm(sizes.hidden_size, config.norm_eps, dtype=dtype, kernels=kernels)

    def forward(self, positions: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        x = self.kernels.add_rows(embeds, self.wpe.weight, positions)
        residual: torch.Tensor | None = None
        for block in self.h:
            x, residual = block(positions, x, residual)
        return self.ln_f(x, residual)[0]  # type: ignore[no-any-return]


class GPT2LMHeadModel(nn.Module):
    """A GPT-2 with its output head."""

    config_defaults: ClassVar[Mapping[str, Any]] = {"tie_word_embeddings": True}
    embedding_name: ClassVar[str] = "transformer.wte.weight"
    optional_prefix: ClassVar[str] = "transformer."

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        *,
        dtype: torch.dtype,
        max_model_len: int,
        kernels: LayerKernels | None = None,
    ) -> None:
        """Parameters are allocated, not filled; positions are those of the checkpoint."""
        super().__init__()
        config = GPT2Config.from_hf(standard_names(hf_config))
        kernels = kernels or layer_kernels(dtype)
        self.transformer = GPT2Model(config, dtype, kernels)
        self.lm_head = (
            self.transformer.wte
            if config.tie_word_embeddings
            else VocabEmbedding(
                config.sizes.vocab_size, config.sizes.hidden_size, dtype=dtype, kernels=kernels
            )
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.transformer.wte(input_ids)  # type: ignore[no-any-return]

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
        return self.transformer(positions, embeds)  # type: ignore[no-any-return]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.lm_head.compute_logits(hidden_states)

    def attention_layers(self) -> Mapping[str, Attention]:
        return named_attention(self)
