"""What decoders are made of: layers in the common arrangements, the stack, and the head.

A family is a `Decoder` that says how its config is read and what its layers consist of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from tokenmill.layers.attention import Attention
from tokenmill.layers.embedding import VocabEmbedding
from tokenmill.layers.kernels import LayerKernels, layer_kernels
from tokenmill.layers.linear_method import Activations, StreamReader
from tokenmill.layers.mlp import GatedMLP
from tokenmill.layers.moe import ExpertBlock
from tokenmill.layers.norm import BranchRMSNorm, GatheredRMSNorm, HeadRMSNorm, RMSNorm
from tokenmill.layers.rope import RotaryEmbedding
from tokenmill.layers.self_attention import SelfAttention
from tokenmill.models.base import IntermediateTensors
from tokenmill.models.config import DecoderConfig
from tokenmill.parallel.shares import Share


class AttentionBlock(StreamReader, Protocol):
    """A module like `SelfAttention`."""

    def __call__(self, positions: torch.Tensor, x: Activations) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Makes the parts of one layer, as the config says where the family does not."""

    index: int
    config: DecoderConfig
    rotary: RotaryEmbedding
    dtype: torch.dtype
    kernels: LayerKernels

    def attention(self, **different: Any) -> SelfAttention:
        """`different` are arguments of `SelfAttention`."""
        config = self.config
        common: dict[str, Any] = {
            "hidden_size": config.hidden_size,
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_size": config.head_size,
            "rotary": self.rotary,
            "dtype": self.dtype,
            "kernels": self.kernels,
            "bias": config.attention_bias,
            "out_bias": config.attention_bias,
            "sliding_window": config.windows[self.index],
        }
        return SelfAttention(f"model.layers.{self.index}.self_attn", **(common | different))

    def gated_mlp(self, **different: Any) -> GatedMLP:
        """`different` are arguments of `GatedMLP`."""
        config = self.config
        common: dict[str, Any] = {
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "bias": config.mlp_bias,
            "dtype": self.dtype,
            "kernels": self.kernels,
            "gate": config.gate,
        }
        return GatedMLP(**(common | different))

    def stream_norm(self, reader: StreamReader) -> RMSNorm:
        """Adds to the residual stream and writes in the form in which `reader` reads."""
        return RMSNorm(
            self.config.hidden_size,
            self.config.norm_eps,
            dtype=self.dtype,
            kernels=self.kernels,
            empty_out=reader.empty_input,
            weight_offset=self.config.norm_weight_offset,
        )

    def branch_norm(self, size: int) -> BranchRMSNorm:
        """Norm of rows of `size` values that are no residual stream."""
        return BranchRMSNorm(
            size,
            self.config.norm_eps,
            dtype=self.dtype,
            kernels=self.kernels,
            weight_offset=self.config.norm_weight_offset,
        )

    def gathered_norm(self, share: Share) -> GatheredRMSNorm:
        """Norm of rows of which this rank has the columns in `share`."""
        return GatheredRMSNorm(
            share,
            self.config.norm_eps,
            dtype=self.dtype,
            kernels=self.kernels,
            weight_offset=self.config.norm_weight_offset,
        )

    def head_norms(self) -> dict[str, HeadRMSNorm]:
        """`q_norm` and `k_norm` over each head, as arguments of `attention`."""
        return {
            name: HeadRMSNorm(
                self.config.head_size,
                self.config.norm_eps,
                kernels=self.kernels,
                weight_offset=self.config.norm_weight_offset,
            )
            for name in ("q_norm", "k_norm")
        }


class PreNormLayer(nn.Module):
    """Attention, then MLP, each behind a norm and added to the residual stream."""

    def __init__(
        self,
        parts: LayerParts,
        self_attn: AttentionBlock,
        mlp: GatedMLP | ExpertBlock,
        mlp_name: str = "mlp",
    ) -> None:
        """`mlp_name` is what the checkpoint calls the block behind attention."""
        super().__init__()
        self.self_attn = self_attn
        self.mlp_name = mlp_name
        self.add_module(mlp_name, mlp)
        self.input_layernorm = parts.stream_norm(self_attn)
        self.post_attention_layernorm = parts.stream_norm(mlp)

    def forward(
        self, positions: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.input_layernorm(x, residual)
        x = self.self_attn(positions, normed)
        normed, residual = self.post_attention_layernorm(x, residual)
        return getattr(self, self.mlp_name)(normed), residual


class DecoderStack(nn.Module):
    """Embedding, layers and last norm; or those of one pipeline rank."""

    def __init__(
        self,
        config: DecoderConfig,
        layers: Mapping[int, nn.Module],
        parts: LayerParts,
        norm_name: str,
    ) -> None:
        """`norm_name` is what the checkpoint calls the last norm."""
        super().__init__()
        self.norm_name = norm_name
        self.is_first_rank = min(layers) == 0
        self.is_last_rank = max(layers) == config.num_layers - 1
        if self.is_first_rank or (self.is_last_rank and config.tie_word_embeddings):
            self.embed_tokens = VocabEmbedding(
                config.vocab_size, config.hidden_size, dtype=parts.dtype, kernels=parts.kernels
            )
        self.layers = nn.ModuleDict({str(index): layer for index, layer in layers.items()})
        if self.is_last_rank:
            norm = RMSNorm(
                config.hidden_size,
                config.norm_eps,
                dtype=parts.dtype,
                kernels=parts.kernels,
                weight_offset=config.norm_weight_offset,
            )
            self.add_module(norm_name, norm)

    def forward(
        self, positions: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor | IntermediateTensors:
        for layer in self.layers.values():
            x, residual = layer(positions, x, residual)
        if not self.is_last_rank:
            assert residual is not None
            return {"hidden_states": x, "residual": residual}
        return getattr(self, self.norm_name)(x, residual)[0]  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """A decoder with its output head; the base of most families."""

    config_defaults: ClassVar[Mapping[str, Any]] = {}
    embedding_name: ClassVar[str] = "model.embed_tokens.weight"
    optional_prefix: ClassVar[str] = "model."
    last_norm_name: ClassVar[str] = "norm"

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
        hf_config = {**self.config_defaults, **hf_config}
        config = self.read_config(hf_config)
        kernels = kernels or layer_kernels(dtype)
        rotaries = _rotaries(config, max_model_len)
        parts = [
            LayerParts(index, config, rotaries[index], dtype, kernels)
            for index in layers or range(config.num_layers)
        ]
        made = {each.index: self.make_layer(each, hf_config) for each in parts}
        self.model = DecoderStack(config, made, parts[0], self.last_norm_name)
        if self.model.is_last_rank:
            self.lm_head = (
                self.model.embed_tokens
                if config.tie_word_embeddings
                else VocabEmbedding(
                    config.vocab_size, config.hidden_size, dtype=dtype, kernels=kernels
                )
            )

    @classmethod
    def read_config(cls, hf_config: Mapping[str, Any]) -> DecoderConfig:
        """Raises `ConfigError` for one that this family cannot serve."""
        return DecoderConfig.from_hf(hf_config)

    @classmethod
    def make_layer(cls, parts: LayerParts, hf_config: Mapping[str, Any]) -> nn.Module:
        """A layer: forward(positions, x, residual) -> (x, residual), as in `PreNormLayer`."""
        return PreNormLayer(parts, parts.attention(), parts.gated_mlp())

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
        residual: torch.Tensor | None = None
        if intermediate_tensors is not None:
            x, residual = intermediate_tensors["hidden_states"], intermediate_tensors["residual"]
        else:
            x = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        return self.model(positions, x, residual)  # type: ignore[no-any-return]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.lm_head.compute_logits(hidden_states)

    def attention_layers(self) -> Mapping[str, Attention]:
        return named_attention(self)


def named_attention(model: nn.Module) -> dict[str, Attention]:
    """The attention layers of a model by name, in order of depth."""
    found = (module for module in model.modules() if isinstance(module, Attention))
    return {layer.layer_name: layer for layer in found}


def _rotaries(config: DecoderConfig, max_model_len: int) -> list[RotaryEmbedding]:
    """The table of angles of each layer; layers with the same settings share one."""
    made: list[RotaryEmbedding] = []
    for index, rope in enumerate(config.ropes):
        first = config.ropes.index(rope)
        made.append(
            made[first] if first < index else RotaryEmbedding(rope, config.head_size, max_model_len)
        )
    return made
