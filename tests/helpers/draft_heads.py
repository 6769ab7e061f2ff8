"""Draft heads: checkpoints in the layouts that are published, and what a head says, in plain torch.

The reference computes the whole text anew for each draft, in float32, from the files alone: it has
neither a cache nor any code of the engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

Tensors = dict[str, torch.Tensor]

LAYOUTS = {
    "eagle": ("", "layers.0."),
    "eagle3": ("", "midlayer."),
    "eagle3 of speculators": ("", "layers.0."),
    "eagle3 with a prefix": ("model.", "midlayer."),
}
"""What names of tensors begin with, and those of the layer."""


def random_head(
    method: str,
    target: Mapping[str, Any],
    *,
    seed: int = 0,
    own_vocab: int | None = None,
    has_embedding: bool = False,
    has_biases: bool = False,
    num_kv_heads: int = 1,
    scale: float = 0.15,
) -> Tensors:
    """Weights of a head for a model with this config, under the names of the paper's code."""
    draw = torch.Generator().manual_seed(seed)
    hidden, vocab = target["hidden_size"], target["vocab_size"]
    inner, heads = target["intermediate_size"], target["num_attention_heads"]
    head_size = target.get("head_dim") or hidden // heads
    width = 2 * hidden if method == "eagle3" else hidden

    def normal(*shape: int) -> torch.Tensor:
        return scale * torch.randn(*shape, generator=draw)

    def near_one() -> torch.Tensor:
        return 1 + 0.1 * torch.randn(hidden, generator=draw)

    tensors = {
        "fc.weight": normal(hidden, 3 * hidden if method == "eagle3" else 2 * hidden),
        "layer.self_attn.q_proj.weight": normal(heads * head_size, width),
        "layer.self_attn.k_proj.weight": normal(num_kv_heads * head_size, width),
        "layer.self_attn.v_proj.weight": normal(num_kv_heads * head_size, width),
        "layer.self_attn.o_proj.weight": normal(hidden, heads * head_size),
        "layer.mlp.gate_proj.weight": normal(inner, hidden),
        "layer.mlp.up_proj.weight": normal(inner, hidden),
        "layer.mlp.down_proj.weight": normal(hidden, inner),
        "layer.post_attention_layernorm.weight": near_one(),
    }
    if has_biases:
        tensors["fc.bias"] = normal(hidden)
        for name, size in (("q", heads), ("k", num_kv_heads), ("v", num_kv_heads)):
            tensors[f"layer.self_attn.{name}_proj.bias"] = normal(size * head_size)
    if method == "eagle3":
        own_vocab = own_vocab or vocab
        tensors["layer.input_layernorm.weight"] = near_one()
        tensors["layer.hidden_norm.weight"] = near_one()
        tensors["norm.weight"] = near_one()
        tensors["lm_head.weight"] = 3 * normal(own_vocab, hidden)
        chosen = torch.randperm(vocab, generator=draw)[:own_vocab].sort().values
        tensors["d2t"] = chosen - torch.arange(own_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).scatter(0, chosen, True)
    if has_embedding:
        tensors["embed_tokens.weight"] = normal(vocab, hidden)
    return tensors


def write_head(
    path: Path,
    method: str,
    tensors: Tensors,
    target: Mapping[str, Any],
    *,
    layout: str | None = None,
    num_kv_heads: int = 1,
    **config: Any,
) -> str:
    """A directory as heads are published."""
    path.mkdir(parents=True, exist_ok=True)
    prefix, layer = LAYOUTS[layout or method]
    sizes = {
        key: target.get(key)
        for key in ("hidden_size", "intermediate_size", "num_attention_heads", "head_dim")
    }
    sizes |= {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_key_value_heads": num_kv_heads,
        "vocab_size": target["vocab_size"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
    } | config
    sizes = {key: value for key, value in sizes.items() if value is not None}
    if layout == "eagle3 of speculators":
        own = {
            key: sizes.pop(key)
            for key in ("norm_before_residual", "eagle_aux_hidden_state_layer_ids")
            if key in sizes
        }
        written = {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": len(tensors["lm_head.weight"]),
            "transformer_layer_config": sizes,
            **own,
        }
    else:
        name = "LlamaForCausalLMEagle3" if method == "eagle3" else "LlamaForCausalLM"
        written = {"architectures": [name], **sizes}
    (path / "config.json").write_text(json.dumps(written))
    named = {}
    for tensor_name, tensor in tensors.items():
        renamed = tensor_name.replace("layer.", layer, 1)
        in_model = not renamed.startswith(("lm_head", "d2t", "t2d"))
        named[(prefix if in_model else "") + renamed] = tensor.contiguous()
    save_file(named, path / "model.safetensors")
    return str(path)


class ReferenceHead:
    """What a head that `write_head` wrote says behind a text, for a Llama of transformers."""

    def __init__(
        self,
        target: str,
        method: str,
        tensors: Tensors,
        *,
        aux_layers: Sequence[int] = (),
        norm_before_residual: bool = False,
        num_kv_heads: int = 1,
    ) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.method, self.weights = method, tensors
        self.aux_layers, self.num_kv_heads = aux_layers, num_kv_heads
        self.norm_before_residual = norm_before_residual
        config = self.model.config
        self.num_heads = config.num_attention_heads
        self.head_size = getattr(config, "head_dim", None) or config.hidden_size // self.num_heads

    @torch.inference_mode()
    def drafts(
        self, text: Sequence[int], lengths: Sequence[int], count: int
    ) -> dict[int, tuple[list[int], torch.Tensor]]:
        """The most likely `count` tokens behind each of the beginnings of a text that have these
        lengths, and the state that the head leaves with the last of them, [hidden_size].
        """
        states = self.target_states(text)
        return {
            length: self._go_on(text[:length], states[: length - 1], count) for length in lengths
        }

    def _go_on(
        self, text: Sequence[int], states: torch.Tensor, count: int
    ) -> tuple[list[int], torch.Tensor]:
        ids, left = list(text[1:]), states
        for _ in range(count):
            left, logits = self.forward(torch.tensor(ids), states)
            ids.append(int(logits[-1].argmax()))
            states = torch.cat([states, left[-1:]])
        return ids[len(text) - 1 :], left[-1]

    def target_states(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[len(token_ids), hidden_size], fused already."""
        hidden = self.model(torch.tensor([list(token_ids)]), output_hidden_states=True)
        if self.method == "eagle":
            return hidden.hidden_states[-1][0]  # behind the last norm
        states = torch.cat([hidden.hidden_states[layer][0] for layer in self.aux_layers], -1)
        return functional.linear(states, self.weights["fc.weight"], self.weights.get("fc.bias"))

    def forward(self, ids: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(States left, logits of the model's tokens) of entries of tokens and states."""
        weights = self.weights
        embedding = self.model.get_input_embeddings().weight
        if self.method == "eagle3":
            embedding = weights.get("embed_tokens.weight", embedding)
        embeds = embedding[ids]
        if self.method == "eagle":
            x = self._linear("fc", torch.cat([embeds, states], -1))
            stream = x
        else:
            normed = self._norm("layer.hidden_norm", states)
            x = torch.cat([self._norm("layer.input_layernorm", embeds), normed], -1)
            stream = normed if self.norm_before_residual else states
        stream = stream + self._attention(x)
        normed = self._norm("layer.post_attention_layernorm", stream)
        gated = functional.silu(self._linear("layer.mlp.gate_proj", normed))
        gated = gated * self._linear("layer.mlp.up_proj", normed)
        left = stream + self._linear("layer.mlp.down_proj", gated)
        if self.method == "eagle":
            return left, functional.linear(left, self.model.lm_head.weight)
        own = functional.linear(self._norm("norm", left), weights["lm_head.weight"])
        logits = own.new_full((len(own), self.model.config.vocab_size), -torch.inf)
        for token, distance in enumerate(weights["d2t"].tolist()):
            logits[:, token + distance] = own[:, token]
        return left, logits

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        query = self._heads("q", x, self.num_heads)
        key = self._heads("k", x, self.num_kv_heads)
        value = self._heads("v", x, self.num_kv_heads)
        cos, sin = self._angles(len(x))
        query, key = query * cos + _turned(query) * sin, key * cos + _turned(key) * sin
        group = self.num_heads // self.num_kv_heads
        out = functional.scaled_dot_product_attention(
            query,
            key.repeat_interleave(group, 0),
            value.repeat_interleave(group, 0),
            is_causal=True,
        )
        return self._linear("layer.self_attn.o_proj", out.transpose(0, 1).flatten(1))

    def _heads(self, name: str, x: torch.Tensor, count: int) -> torch.Tensor:
        together = self._linear(f"layer.self_attn.{name}_proj", x)
        return together.unflatten(-1, (count, -1)).transpose(0, 1)

    def _angles(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.head_size
        frequencies = 10000.0 ** (-torch.arange(0, size, 2).float() / size)
        angles = (torch.arange(length)[:, None] * frequencies).repeat(1, 2)
        return angles.cos(), angles.sin()

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        bias = self.weights.get(f"{name}.bias")
        return functional.linear(x, self.weights[f"{name}.weight"], bias)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], 1e-6)


def _turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)
