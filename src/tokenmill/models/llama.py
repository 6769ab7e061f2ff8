"""The Llama family: Llama 2 and 3, SmolLM2, Mistral."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tokenmill.config.parameters import number, positive_int, read_parameters
from tokenmill.errors import ConfigError
from tokenmill.layers.attention import Attention
from tokenmill.layers.embedding import VocabEmbedding
from tokenmill.layers.kernels import LayerKernels, layer_kernels
from tokenmill.layers.linear import Linear
from tokenmill.layers.linear_method import Activations
from tokenmill.layers.mlp import GatedMLP
from tokenmill.layers.norm import RMSNorm
from tokenmill.layers.rope import RopeConfig, RotaryEmbedding
from tokenmill.models.base import IntermediateTensors


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """What the model reads from its config.json."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    sliding_window: int | None
    """Tokens that a query sees, itself included (Mistral)."""
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any]) -> LlamaConfig:
        """Raises `ConfigError` that names the key at fault."""
        sizes = read_parameters(hf_config)
        if sizes.num_heads % sizes.num_kv_heads:
            raise ConfigError(
                f"config.json: num_attention_heads={sizes.num_heads} is not a multiple of"
                f" num_key_value_heads={sizes.num_kv_heads}."
            )
        activation = hf_config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise ConfigError(
                f"config.json: hidden_act={activation!r} is not supported here; only silu is."
            )
        eps = number(hf_config, "rms_norm_eps", 1e-6)
        if eps < 0:
            raise ConfigError(f"config.json: rms_norm_eps is {eps}, but must be at least 0.")
        window = hf_config.get("sliding_window")
        return cls(
            num_layers=sizes.num_layers,
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.intermediate_size,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_size=sizes.head_size,
            vocab_size=sizes.vocab_size,
            rms_norm_eps=eps,
            rope=RopeConfig.from_hf(hf_config),
            sliding_window=None if window is None else positive_int(hf_config, "sliding_window"),
            attention_bias=bool(hf_config.get("attention_bias", False)),
            mlp_bias=bool(hf_config.get("mlp_bias", False)),
            tie_word_embeddings=bool(hf_config.get("tie_word_embeddings", False)),
        )


class LlamaAttention(nn.Module):
    """Projections around grouped-query attention."""

    def __init__(
        self,
        name: str,
        config: LlamaConfig,
        rotary: RotaryEmbedding,
        dtype: torch.dtype,
        kernels: LayerKernels,
    ) -> None:
        super().__init__()
        self.q_size = config.num_heads * config.head_size
        self.kv_size = config.num_kv_heads * config.head_size
        self.qkv_proj = Linear(
            config.hidden_size,
            {"q_proj": self.q_size, "k_proj": self.kv_size, "v_proj": self.kv_size},
            bias=config.attention_bias,
            dtype=dtype,
            kernels=kernels,
        )
        self.attn = Attention(
            f"{name}.attn",
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            scale=config.head_size**-0.5,
            rotary=rotary,
            sliding_window=config.sliding_window,
        )
        self.o_proj = Linear(
            self.q_size,
            config.hidden_size,
            bias=config.attention_bias,
            dtype=dtype,
            kernels=kernels,
        )

    def forward(self, positions: torch.Tensor, x: Activations) -> torch.Tensor:
        qkv = self.qkv_proj(x)
        query, key, value = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        return self.o_proj(self.attn(positions, query, key, value))  # type: ignore[no-any-return]


class LlamaDecoderLayer(nn.Module):
    """Attention, then MLP, each behind a norm and added to the residual stream."""

    def __init__(
        self,
        name: str,
        config: LlamaConfig,
        rotary: RotaryEmbedding,
        dtype: torch.dtype,
        kernels: LayerKernels,
    ) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(f"{name}.self_attn", config, rotary, dtype, kernels)
        self.mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            bias=config.mlp_bias,
            dtype=dtype,
            kernels=kernels,
        )
        # Each norm writes in the form in which the layer behind it reads.
        self.input_layernorm = RMSNorm(
            config.hidden_size,
            config.rms_norm_eps,
            dtype=dtype,
            kernels=kernels,
            empty_out=self.self_attn.qkv_proj.empty_input,
        )
        self.post_attention_layernorm = RMSNorm(
            config.hidden_size,
            config.rms_norm_eps,
            dtype=dtype,
            kernels=kernels,
            empty_out=self.mlp.gate_up_proj.empty_input,
        )

    def forward(
        self, positions: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.input_layernorm(x, residual)
        x = self.self_attn(positions, normed)
        normed, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(normed), residual


class LlamaModel(nn.Module):
    """The decoder stack, or the layers of one pipeline rank."""

    def __init__(
        self,
        config: LlamaConfig,
        dtype: torch.dtype,
        max_model_len: int,
        layers: range,
        kernels: LayerKernels,
    ) -> None:
        super().__init__()
        self.is_first_rank = layers.start == 0
        self.is_last_rank = layers.stop == config.num_layers
        if self.is_first_rank or (self.is_last_rank and config.tie_word_embeddings):
            self.embed_tokens = VocabEmbedding(
                config.vocab_size, config.hidden_size, dtype=dtype, kernels=kernels
            )
        rotary = RotaryEmbedding(config.rope, config.head_size, max_model_len)
        self.layers = nn.ModuleDict(
            {
                str(i): LlamaDecoderLayer(f"model.layers.{i}", config, rotary, dtype, kernels)
                for i in layers
            }
        )
        if self.is_last_rank:
            self.norm = RMSNorm(
                config.hidden_size, config.rms_norm_eps, dtype=dtype, kernels=kernels
            )

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: torch.Tensor | None,
    ) -> torch.Tensor | IntermediateTensors:
        x: torch.Tensor
        residual: torch.Tensor | None
        if intermediate_tensors is not None:
            x, residual = intermediate_tensors["hidden_states"], intermediate_tensors["residual"]
        else:
            x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            residual = None
        for layer in self.layers.values():
            x, residual = layer(positions, x, residual)
        if not self.is_last_rank:
            assert residual is not None
            return {"hidden_states": x, "residual": residual}
        x, _ = self.norm(x, residual)
        return x


class LlamaForCausalLM(nn.Module):
    """A Llama with its output head."""

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        *,
        dtype: torch.dtype,
        max_model_len: int,
        layers: range | None = None,
        kernels: LayerKernels | None = None,
    ) -> None:
        """Parameters are allocated, not filled.

        `layers` are those of this pipeline rank (all by default); `kernels` the arithmetic (the
        best for `dtype` on this machine by default).
        """
        super().__init__()
        config = LlamaConfig.from_hf(hf_config)
        if layers is None:
            layers = range(config.num_layers)
        if kernels is None:
            kernels = layer_kernels(dtype)
        self.model = LlamaModel(config, dtype, max_model_len, layers, kernels)
        if self.model.is_last_rank:
            self.lm_head = (
                self.model.embed_tokens
                if config.tie_word_embeddings
                else VocabEmbedding(
                    config.vocab_size, config.hidden_size, dtype=dtype, kernels=kernels
                )
            )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens(input_ids)  # type: ignore[no-any-return]

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """Hidden states, normalised for the head.

        Other ranks than the last return `hidden_states` and `residual` for the next.
        """
        return self.model(  # type: ignore[no-any-return]
            input_ids, positions, intermediate_tensors, inputs_embeds
        )

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.lm_head.compute_logits(hidden_states)

    def attention_layers(self) -> Mapping[str, Attention]:
        found = (module for module in self.modules() if isinstance(module, Attention))
        return {layer.layer_name: layer for layer in found}
