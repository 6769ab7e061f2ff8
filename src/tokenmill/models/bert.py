"""BERT and RoBERTa: encoders with learned positions, whose norms stand behind the blocks.

    word + position + type -> LayerNorm -> ( attention -> + -> LayerNorm -> MLP -> + -> LayerNorm )*

Every token sees the whole prompt. Both families share all but where positions begin, and the head
of classifiers:

    BERT       dense(first token) -> tanh -> classifier
    RoBERTa    the same, with both matrices in the head
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from tokenmill.config.parameters import ModelParameters, positive_int, read_parameters
from tokenmill.config.pooling import num_labels, position_offset
from tokenmill.errors import ConfigError, shown
from tokenmill.kernels.gelu import gelu
from tokenmill.layers.activations import Activation, read_activation
from tokenmill.layers.attention import Attention
from tokenmill.layers.embedding import EmbeddingTable, VocabEmbedding
from tokenmill.layers.kernels import LayerKernels, layer_kernels
from tokenmill.layers.linear import Linear
from tokenmill.layers.norm import LayerNorm
from tokenmill.models.base import IntermediateTensors
from tokenmill.models.config import norm_eps
from tokenmill.models.decoder import named_attention
from tokenmill.models.pooling import DenseHead

SMALLEST_HEAD = 64
"""Values of a head that the native kernels take; many small encoders have 32."""


@dataclass(frozen=True, slots=True)
class BertConfig:
    """What the model reads from its config.json."""

    sizes: ModelParameters
    num_positions: int
    num_types: int
    position_offset: int
    norm_eps: float
    activation: Activation

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any]) -> BertConfig:
        """Raises `ConfigError` that names the key at fault."""
        sizes = read_parameters(hf_config)
        if sizes.hidden_size % sizes.num_heads:
            raise ConfigError(
                f"config.json: hidden_size={sizes.hidden_size} is not a multiple of"
                f" num_attention_heads={sizes.num_heads}."
            )
        kind = hf_config.get("position_embedding_type") or "absolute"
        if kind != "absolute":
            raise ConfigError(
                f"config.json: position_embedding_type={shown(kind)} is not supported; 'absolute'"
                f" is."
            )
        return cls(
            sizes=sizes,
            num_positions=positive_int(hf_config, "max_position_embeddings"),
            num_types=positive_int(hf_config, "type_vocab_size", 2),
            position_offset=position_offset(sizes.architecture, hf_config),
            norm_eps=norm_eps(hf_config, "layer_norm_eps", 1e-12),
            activation=read_activation(hf_config, "hidden_act"),
        )


@dataclass(frozen=True, slots=True)
class _Parts:
    """Makes the parts of a layer."""

    config: BertConfig
    dtype: torch.dtype
    kernels: LayerKernels

    def linear(self, in_features: int, out_features: int | Mapping[str, int]) -> Linear:
        return Linear(in_features, out_features, bias=True, dtype=self.dtype, kernels=self.kernels)

    def norm(self) -> LayerNorm:
        """The stream stays float32 from block to block."""
        sizes = self.config.sizes
        return LayerNorm(
            sizes.hidden_size, self.config.norm_eps, dtype=torch.float32, kernels=self.kernels
        )


class BertEmbeddings(nn.Module):
    """Words, positions and types, added and normalised."""

    def __init__(self, parts: _Parts) -> None:
        super().__init__()
        config, size = parts.config, parts.config.sizes.hidden_size
        self.word_embeddings = VocabEmbedding(
            config.sizes.vocab_size, size, dtype=parts.dtype, kernels=parts.kernels
        )
        self.position_embeddings = EmbeddingTable(config.num_positions, size)
        self.token_type_embeddings = EmbeddingTable(config.num_types, size)
        self.position_offset = config.position_offset
        self.last_type = config.num_types - 1
        self.LayerNorm = parts.norm()

    def forward(
        self, embeds: torch.Tensor, positions: torch.Tensor, token_types: torch.Tensor
    ) -> torch.Tensor:
        """float32 [N, hidden_size] of the words' embeddings."""
        # RoBERTa has one type for all, also in pairs.
        types = self.token_type_embeddings(token_types.clamp(max=self.last_type))
        x = embeds.float() + types + self.position_embeddings(positions + self.position_offset)
        return self.LayerNorm(x)[0]  # type: ignore[no-any-return]


class BertSelfAttention(nn.Module):
    """Queries, keys and values in one projection, and attention in both directions."""

    def __init__(self, name: str, parts: _Parts) -> None:
        super().__init__()
        sizes = parts.config.sizes
        names = dict.fromkeys(("query", "key", "value"), sizes.hidden_size)
        self.qkv = parts.linear(sizes.hidden_size, names)
        self.head_size = sizes.hidden_size // sizes.num_heads
        self.attn = Attention(
            name,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_heads,
            head_size=max(self.head_size, SMALLEST_HEAD),
            scale=self.head_size**-0.5,
            rotary=None,
            causal=False,
        )

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        query, key, value = map(self._padded, self.qkv(x).chunk(3, dim=-1))
        attended = self.attn(positions, query, key, value)
        heads = attended.reshape(len(attended), -1, self.attn.head_size)
        return heads[..., : self.head_size].flatten(-2)  # type: ignore[no-any-return]

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        """Zeros behind every head that is too small for the kernels: they add nothing."""
        more = self.attn.head_size - self.head_size
        if not more:
            return rows
        return functional.pad(rows.reshape(len(rows), -1, self.head_size), (0, more)).flatten(-2)


class BertOutput(nn.Module):
    """The end of a block: projection, addition to the stream, norm."""

    def __init__(self, in_features: int, parts: _Parts) -> None:
        super().__init__()
        self.dense = parts.linear(in_features, parts.config.sizes.hidden_size)
        self.LayerNorm = parts.norm()

    def forward(self, x: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.dense(x), stream)[0]  # type: ignore[no-any-return]


class BertAttention(nn.Module):
    """The first block of a layer; its parts are called as in checkpoints."""

    def __init__(self, name: str, parts: _Parts) -> None:
        super().__init__()
        self.add_module("self", BertSelfAttention(name, parts))
        self.output = BertOutput(parts.config.sizes.hidden_size, parts)
        self.dtype = parts.dtype

    def forward(self, positions: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        attended = self.get_submodule("self")(positions, stream.to(self.dtype))
        return self.output(attended, stream)  # type: ignore[no-any-return]


class BertIntermediate(nn.Module):
    """The beginning of the second block."""

    def __init__(self, parts: _Parts) -> None:
        super().__init__()
        sizes = parts.config.sizes
        self.dense = parts.linear(sizes.hidden_size, sizes.intermediate_size)
        activation = parts.config.activation
        self.activation = parts.kernels.gelu if activation is gelu else activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.dense(x))


class BertLayer(nn.Module):
    """Attention, then MLP, each added to the stream, which is then normalised."""

    def __init__(self, index: int, parts: _Parts) -> None:
        super().__init__()
        self.attention = BertAttention(f"encoder.layer.{index}.attention.self", parts)
        self.intermediate = BertIntermediate(parts)
        self.output = BertOutput(parts.config.sizes.intermediate_size, parts)
        self.dtype = parts.dtype

    def forward(self, positions: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        stream = self.attention(positions, stream)
        return self.output(  # type: ignore[no-any-return]
            self.intermediate(stream.to(self.dtype)), stream
        )


class BertEncoder(nn.Module):
    """The layers."""

    def __init__(self, parts: _Parts) -> None:
        super().__init__()
        self.layer = nn.ModuleList(
            BertLayer(index, parts) for index in range(parts.config.sizes.num_layers)
        )

    def forward(self, positions: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        for layer in self.layer:
            stream = layer(positions, stream)
        return stream


class BertModel(nn.Module):
    """An encoder without a head."""

    config_defaults: ClassVar[Mapping[str, Any]] = {}
    embedding_name: ClassVar[str] = "embeddings.word_embeddings.weight"
    optional_prefix: ClassVar[str] = ""
    unused_tensors: ClassVar[frozenset[str]] = frozenset(
        {"pooler.dense.weight", "pooler.dense.bias"}
    )
    """What checkpoints have for the task that they were trained on first."""

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
        parts = _Parts(BertConfig.from_hf(hf_config), dtype, kernels or layer_kernels(dtype))
        self.embeddings = BertEmbeddings(parts)
        self.encoder = BertEncoder(parts)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embeddings.word_embeddings(input_ids)  # type: ignore[no-any-return]

    def encode(
        self, input_ids: torch.Tensor, positions: torch.Tensor, token_types: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states, float32 [num_tokens, hidden_size]."""
        stream = self.embeddings(self.embed_input_ids(input_ids), positions, token_types)
        return self.encoder(positions, stream)  # type: ignore[no-any-return]

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states of texts alone. It is not cut into pipeline ranks."""
        assert intermediate_tensors is None
        embeds = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        stream = self.embeddings(embeds, positions, torch.zeros_like(positions))
        return self.encoder(positions, stream)  # type: ignore[no-any-return]

    def attention_layers(self) -> Mapping[str, Attention]:
        return named_attention(self)


class _Classifier(nn.Module):
    """A body under a name of its own, and a head."""

    config_defaults: ClassVar[Mapping[str, Any]] = {}
    optional_prefix: ClassVar[str] = ""
    body_name: ClassVar[str]

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        *,
        dtype: torch.dtype,
        max_model_len: int,
        kernels: LayerKernels | None = None,
    ) -> None:
        """Parameters are allocated, not filled."""
        super().__init__()
        self.add_module(
            self.body_name,
            BertModel(hf_config, dtype=dtype, max_model_len=max_model_len, kernels=kernels),
        )

    @property
    def body(self) -> BertModel:
        """The encoder."""
        body = self.get_submodule(self.body_name)
        assert isinstance(body, BertModel)
        return body

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.body.embed_input_ids(input_ids)

    def encode(
        self, input_ids: torch.Tensor, positions: torch.Tensor, token_types: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states, float32 [num_tokens, hidden_size]."""
        return self.body.encode(input_ids, positions, token_types)

    def attention_layers(self) -> Mapping[str, Attention]:
        return named_attention(self)


class BertForSequenceClassification(_Classifier):
    """A BERT that scores texts, or pairs of them."""

    body_name: ClassVar[str] = "bert"
    embedding_name: ClassVar[str] = "bert.embeddings.word_embeddings.weight"

    def __init__(self, hf_config: Mapping[str, Any], **settings: Any) -> None:
        super().__init__(hf_config, **settings)
        size = positive_int(hf_config, "hidden_size")
        self.body.pooler = nn.ModuleDict({"dense": DenseHead(size, size, bias=True)})
        self.classifier = DenseHead(size, num_labels(hf_config), bias=True)

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """float32 [n, hidden_size] to logits, float32 [n, num_labels]."""
        hidden = torch.tanh(self.body.get_submodule("pooler.dense")(pooled))
        return self.classifier(hidden)  # type: ignore[no-any-return]


class RobertaForSequenceClassification(_Classifier):
    """A RoBERTa that scores texts, or pairs of them."""

    body_name: ClassVar[str] = "roberta"
    embedding_name: ClassVar[str] = "roberta.embeddings.word_embeddings.weight"

    def __init__(self, hf_config: Mapping[str, Any], **settings: Any) -> None:
        super().__init__(hf_config, **settings)
        size = positive_int(hf_config, "hidden_size")
        self.classifier = nn.ModuleDict(
            {
                "dense": DenseHead(size, size, bias=True),
                "out_proj": DenseHead(size, num_labels(hf_config), bias=True),
            }
        )

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        """float32 [n, hidden_size] to logits, float32 [n, num_labels]."""
        hidden = torch.tanh(self.classifier["dense"](pooled))
        return self.classifier["out_proj"](hidden)  # type: ignore[no-any-return]
