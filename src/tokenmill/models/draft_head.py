"""Draft heads: one decoder layer that reads a model's hidden states and goes on with its text.

An entry of a head pairs the state behind a token with the token that followed it. It leaves a state
of its own, which stands for the one that the model would have made behind that following token:
with it, the next entry can be computed before the model has got there.

    tokens of the model     t0     t1     t2     t3
    states of the model     h0     h1     h2              t3 is new
    entries of the head     t1 h0  t2 h1  t3 h2  d4 g2  d5 g3
    drafts behind them                    d4     d5     d6
    states that it leaves                 g2     g3     g4

EAGLE (Li et al., 2024), `h` as the model's own head reads it:

    fc [embedding, h] -> attention -> + -> norm -> gated MLP -> + = g -> the model's head

EAGLE-3 (Li et al., 2025), `h` = fc [stream in front of three layers]:

    [norm embedding, norm h] -> attention -> + h -> norm -> gated MLP -> + = g -> norm -> head

The head of EAGLE-3 may know a part of the vocabulary only; `d2t` says which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tokenmill.layers.attention import Attention
from tokenmill.layers.embedding import VocabEmbedding
from tokenmill.layers.kernels import LayerKernels
from tokenmill.layers.linear import Linear
from tokenmill.layers.norm import ResidualAdd
from tokenmill.layers.rope import RotaryEmbedding
from tokenmill.layers.self_attention import SelfAttention
from tokenmill.models.base import CausalLM, IntermediateTensors
from tokenmill.models.config import DecoderConfig
from tokenmill.models.decoder import LayerParts, named_attention

LAYER = "layers.0"


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """What a head is made of, besides its weights."""

    hf_config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    """Of its tensors, under the names here. What a head may share with the model, and lacks here,
    it shares."""
    target: CausalLM
    """The model that it drafts for."""
    dtype: torch.dtype
    kernels: LayerKernels
    max_model_len: int
    max_num_tokens: int
    """Most entries of a pass."""


class DraftHead(nn.Module):
    """What both kinds have in common; a `CausalLM` whose tokens are those of the entries.

    The state of each entry of a pass is read from `states_in`, and the one that it leaves goes to
    `states_out`: [max_num_tokens, hidden_size], places for a recorded pass.
    """

    def __init__(self, settings: HeadSettings) -> None:
        """Parameters are allocated, not filled. Raises `ConfigError` as `DecoderConfig` does."""
        super().__init__()
        shapes, dtype, kernels = settings.shapes, settings.dtype, settings.kernels
        config = DecoderConfig.from_hf(settings.hf_config)
        rotary = RotaryEmbedding(config.ropes[0], config.head_size, settings.max_model_len)
        self.parts = LayerParts(0, config, rotary, dtype, kernels)
        self.kernels, self.size, self.vocab_size = kernels, config.hidden_size, config.vocab_size
        self.states_in = torch.zeros(settings.max_num_tokens, self.size, dtype=dtype)
        self.states_out = torch.zeros_like(self.states_in)
        out_features, in_features = shapes["fc.weight"]
        self.fc = Linear(
            in_features, out_features, bias="fc.bias" in shapes, dtype=dtype, kernels=kernels
        )
        self._embed = settings.target.embed_input_ids
        if "embed_tokens.weight" in shapes:
            self.embed_tokens = VocabEmbedding(
                self.vocab_size, self.size, dtype=dtype, kernels=kernels
            )
            self._embed = self.embed_tokens.forward
        self._project = settings.target.compute_logits
        if "lm_head.weight" in shapes:
            num_tokens = shapes["lm_head.weight"][0]
            self.lm_head = VocabEmbedding(num_tokens, self.size, dtype=dtype, kernels=kernels)
            self._project = self.lm_head.compute_logits
        self.target_ids: torch.Tensor | None = None
        """int64 [own vocabulary], which of the model's tokens the head's are; None if the same."""

    def attention(self, shapes: Mapping[str, tuple[int, ...]], input_size: int) -> SelfAttention:
        """The layer's attention, with the biases and norms that it has tensors for."""
        has_norms = f"{LAYER}.self_attn.q_norm.weight" in shapes
        return self.parts.attention(
            input_size=input_size,
            bias=f"{LAYER}.self_attn.q_proj.bias" in shapes,
            out_bias=f"{LAYER}.self_attn.o_proj.bias" in shapes,
            **(self.parts.head_norms() if has_norms else {}),
        )

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """What the model has left, as `states_in` takes it: [n, hidden_size]."""
        raise NotImplementedError

    def take(self, states: torch.Tensor) -> None:
        """Have the next pass read these, [n, hidden_size]."""
        self.states_in[: len(states)].copy_(states)

    def left(self, places: torch.Tensor) -> torch.Tensor:
        """The states that entries at `places` of the last pass have left, [len(places), size]."""
        return self.states_out.index_select(0, places)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self._embed(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What `compute_logits` reads, [N, hidden_size]."""
        embeds = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        return self.enter(positions, embeds, self.states_in[: len(positions)])

    def enter(
        self, positions: torch.Tensor, embeds: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor:
        """A pass over entries of embeddings and states, each [N, hidden_size]."""
        raise NotImplementedError

    def joined(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Two of [N, hidden_size] side by side."""
        both = self.kernels.empty(len(first), 2 * self.size, self.parts.dtype)
        for place, x in enumerate((first, second)):
            columns = slice(place * self.size, (place + 1) * self.size)
            self.kernels.copy(x.unsqueeze(1), both[:, columns].unsqueeze(1))
        return both

    def leave(self, x: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        """The states that are left: the stream with the last block's output, [N, hidden_size]."""
        left = self.states_out[: len(x)]
        self.kernels.add_residual(x, stream, left)
        return left

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """float32 [N, the model's vocabulary]; minus infinity where the head knows no token."""
        logits = self._project(hidden_states)
        if self.target_ids is None:
            return logits
        spread = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        spread[:, self.target_ids] = logits
        return spread

    def attention_layers(self) -> Mapping[str, Attention]:
        return named_attention(self)


class EagleHead(DraftHead):
    """EAGLE: predicts the states that the model's own head reads."""

    def __init__(self, settings: HeadSettings) -> None:
        super().__init__(settings)
        layer = nn.Module()
        layer.self_attn = self.attention(settings.shapes, self.size)
        layer.mlp = self.parts.gated_mlp()
        layer.post_attention_layernorm = self.parts.stream_norm(layer.mlp)
        self.layers = nn.ModuleDict({"0": layer})
        self.begin = ResidualAdd(self.kernels, layer.self_attn.empty_input)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def enter(
        self, positions: torch.Tensor, embeds: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor:
        layer: Any = self.layers["0"]
        read, stream = self.begin(self.fc(self.joined(embeds, states)))
        x = layer.self_attn(positions, read)
        normed, stream = layer.post_attention_layernorm(x, stream)
        return self.leave(layer.mlp(normed), stream)


class Eagle3Head(DraftHead):
    """EAGLE-3: fuses states from three depths of the model."""

    def __init__(self, settings: HeadSettings) -> None:
        super().__init__(settings)
        self.norm_before_residual = bool(settings.hf_config.get("norm_before_residual", False))
        layer = nn.Module()
        layer.self_attn = self.attention(settings.shapes, 2 * self.size)
        layer.mlp = self.parts.gated_mlp()
        layer.input_layernorm = self.parts.branch_norm(self.size)
        layer.hidden_norm = self.parts.branch_norm(self.size)
        layer.post_attention_layernorm = self.parts.stream_norm(layer.mlp)
        self.layers = nn.ModuleDict({"0": layer})
        self.norm = self.parts.branch_norm(self.size)
        self.begin = ResidualAdd(
            self.kernels, lambda num_rows: self.kernels.empty(num_rows, self.size, self.parts.dtype)
        )

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        return self.fc(states)  # type: ignore[no-any-return]

    def enter(
        self, positions: torch.Tensor, embeds: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor:
        layer: Any = self.layers["0"]
        normed = layer.hidden_norm(states)
        _, stream = self.begin(normed if self.norm_before_residual else states)
        x = layer.self_attn(positions, self.joined(layer.input_layernorm(embeds), normed))
        normed, stream = layer.post_attention_layernorm(x, stream)
        return self.norm(self.leave(layer.mlp(normed), stream))  # type: ignore[no-any-return]
