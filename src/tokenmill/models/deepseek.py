"""DeepSeek V2 and V3: latent attention, and experts beside shared ones.

Of a token, a latent and one rotated key are cached for all heads (multi-head latent attention;
DeepSeek-AI, 2024). What makes keys and values of a latent is applied to the queries and to the
result instead, so that attention works on the cache as it is, with one KV head:

    query of a head   | rotated part | K^T * other part |      K, V [features, latent] of a head
    key of a token    | rotated key  | latent           |
    value of a token                 | latent           |      result of a head: V * sum of latents

The cache holds keys; values are parts of them.

    V2    experts by softmax; the best groups of experts by their best
    V3    experts by logistic scores, chosen with a bias; the best groups by their best two

Checkpoints rotate neighbouring pairs, and have the rotated part behind the other; the rows that
make these parts are put in order when they are loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tokenmill.checkpoint.checkpoint import PACKED_PREFIX, RawTensor
from tokenmill.config.parameters import number, positive_int
from tokenmill.errors import ConfigError
from tokenmill.kernels.experts import Routing
from tokenmill.layers.attention import Attention
from tokenmill.layers.experts import ExpertShape
from tokenmill.layers.linear import Linear
from tokenmill.layers.linear_method import Activations, StreamReader
from tokenmill.layers.moe import ExpertBlock, GatedExperts, Router
from tokenmill.layers.norm import BranchRMSNorm
from tokenmill.layers.parallel_linear import RowParallelLinear, rows_slot
from tokenmill.layers.weights import WeightSlot, plain_raw
from tokenmill.models.config import DecoderConfig
from tokenmill.models.decoder import Decoder, LayerParts, PreNormLayer
from tokenmill.models.mixtral import expert_counts
from tokenmill.parallel.shares import Share, even_share
from tokenmill.quantization.dequantize import plain_values
from tokenmill.quantization.packed_blocks import reorder_rows

_LATENT_EPS = 1e-6
"""Of the norms of latents, whatever the config says of the others."""


class OrderedLinear(Linear):
    """A projection whose rows the checkpoint has in another order; a rank has some of them."""

    def __init__(
        self,
        in_features: int,
        order: torch.Tensor,
        *,
        bias: bool,
        parts: LayerParts,
        share: Share | None = None,
    ) -> None:
        """Row i of our order is row `order[i]` there; `share` are the ones here, by default all."""
        self.share = share or Share(len(order), 0, len(order))
        super().__init__(
            in_features, self.share.size, bias=bias, dtype=parts.dtype, kernels=parts.kernels
        )
        self.order = order

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        for own in super().weight_slots(prefix):
            slot = rows_slot(own, [self.share])
            # Put in order first, and then divided: its rows lie anywhere.
            yield replace(slot, load=self._reordered(slot), rows=None)

    def row_shares(self) -> list[list[Share]]:
        return [[self.share]]

    def _reordered(self, slot: WeightSlot) -> Any:
        def load(raw: RawTensor) -> None:
            raw.need()
            if raw.format.startswith(PACKED_PREFIX):  # rows are not apart there
                block_type = raw.format.removeprefix(PACKED_PREFIX)
                data = reorder_rows(block_type, raw.data, raw.shape, self.order)
            else:
                data = raw.data.view(len(self.order), -1)[self.order].view(-1)
            raw.release()
            slot.load(replace(raw, data=data, pages=None))

        return load


class LatentMaps(nn.Module):
    """For each head that is here, the transposed matrix of keys and the matrix of values:
    `kv_b_proj`.
    """

    def __init__(
        self, heads: Share, key_size: int, value_size: int, latent: int, parts: LayerParts
    ) -> None:
        super().__init__()
        self.heads = heads
        self.key_size, self.value_size, self.latent = key_size, value_size, latent
        make = parts.kernels.parts_method
        self.keys = make(heads.size, latent, key_size, parts.dtype)
        self.values = make(heads.size, value_size, latent, parts.dtype)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        rows = self.heads.total * (self.key_size + self.value_size)
        yield WeightSlot(f"{prefix}.weight", (rows, self.latent), self._load, memory=self._memory)

    def _slots(self) -> Iterator[tuple[WeightSlot, WeightSlot]]:
        """Of each head's matrices of keys and of values, which come in one tensor."""
        for key, value in zip(self.keys.parts, self.values.parts, strict=True):
            yield key.slot("", slice(0, self.latent)), value.slot("", slice(0, self.value_size))

    def _memory(self) -> Iterator[torch.Tensor]:
        for slots in self._slots():
            for slot in slots:
                yield from slot.memory()

    def _load(self, raw: RawTensor) -> None:
        by_head = plain_values(raw).view(self.heads.total, -1, self.latent)
        own = by_head[self.heads.start : self.heads.stop]
        for (key, value), rows in zip(self._slots(), own, strict=True):
            key_rows, value_rows = torch.split(rows, [self.key_size, self.value_size])
            key.load(plain_raw(key_rows.t()))
            value.load(plain_raw(value_rows))

    def to_latents(self, queries: torch.Tensor, out: torch.Tensor) -> None:
        """Queries [N, num_heads, key_size] into out [N, num_heads, latent]."""
        self.keys.project_into(queries, out)

    def to_values(self, latents: torch.Tensor, out: torch.Tensor) -> None:
        """Sums of latents [N, num_heads, latent] into out [N, num_heads, value_size]."""
        self.values.project_into(latents, out)


class LatentAttention(nn.Module):
    """Attention of all heads to one latent a token."""

    def __init__(self, parts: LayerParts, hf_config: Mapping[str, Any]) -> None:
        super().__init__()
        config, group = parts.config, parts.kernels.group
        self.parts = parts
        heads = even_share(config.num_heads, group.rank, group.size)
        self.num_heads = heads.size
        self.rotated = positive_int(hf_config, "qk_rope_head_dim")
        self.plain = positive_int(hf_config, "qk_nope_head_dim")
        self.latent = positive_int(hf_config, "kv_lora_rank")
        bias = config.attention_bias
        in_pairs = bool(hf_config.get("rope_interleave", True))
        head = row_order(self.plain, self.rotated, in_pairs)
        size = self.plain + self.rotated
        order = torch.cat([head + index * size for index in range(config.num_heads)])
        rows = heads.of(size)
        rank = hf_config.get("q_lora_rank")
        if rank is None:
            self.q_proj = OrderedLinear(
                config.hidden_size, order, bias=False, parts=parts, share=rows
            )
        else:
            self.q_a_proj = Linear(
                config.hidden_size, rank, bias=bias, dtype=parts.dtype, kernels=parts.kernels
            )
            self.q_a_layernorm = _latent_norm(rank, parts)
            self.q_b_proj = OrderedLinear(rank, order, bias=False, parts=parts, share=rows)
        self.queries = self._direct_queries if rank is None else self._latent_queries
        self.kv_a_proj_with_mqa = OrderedLinear(
            config.hidden_size,
            row_order(self.latent, self.rotated, in_pairs),
            bias=bias,
            parts=parts,
        )
        self.kv_a_layernorm = _latent_norm(self.latent, parts)
        self.value_size = positive_int(hf_config, "v_head_dim")
        self.kv_b_proj = LatentMaps(heads, self.plain, self.value_size, self.latent, parts)
        self.attn = Attention(
            f"model.layers.{parts.index}.self_attn.attn",
            num_heads=self.num_heads,
            num_kv_heads=1,
            head_size=self.rotated + self.latent,
            scale=size**-0.5 * yarn_scale(config.ropes[parts.index].scaling),
            rotary=parts.rotary,
            value_offset=self.rotated,
        )
        self.o_proj = RowParallelLinear(
            heads.of(self.value_size),
            config.hidden_size,
            bias=bias,
            dtype=parts.dtype,
            kernels=parts.kernels,
        )

    def empty_input(self, num_rows: int) -> Activations:
        """Plain, since two projections read it."""
        return self.parts.kernels.empty(num_rows, self.parts.config.hidden_size, self.parts.dtype)

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Map x [N, hidden_size] to the same shape; positions are int64 [N]."""
        queries = self.queries(x).view(len(x), self.num_heads, -1)
        query = self._empty_heads(len(x), self.rotated + self.latent)
        self.parts.kernels.copy(queries[..., : self.rotated], query[..., : self.rotated])
        self.kv_b_proj.to_latents(queries[..., self.rotated :], query[..., self.rotated :])
        key = self.kv_a_proj_with_mqa(x)
        self.kv_a_layernorm.in_place(key[:, self.rotated :])
        latents = self.attn(positions, query.flatten(1), key, key)
        values = self._empty_heads(len(x), self.value_size)
        self.kv_b_proj.to_values(latents.view(len(x), self.num_heads, -1), values)
        return self.o_proj(values.flatten(1))  # type: ignore[no-any-return]

    def _empty_heads(self, num_rows: int, size: int) -> torch.Tensor:
        rows = self.parts.kernels.empty(num_rows, self.num_heads * size, self.parts.dtype)
        return rows.view(num_rows, self.num_heads, size)

    def _direct_queries(self, x: torch.Tensor) -> torch.Tensor:
        return self.q_proj(x)  # type: ignore[no-any-return]

    def _latent_queries(self, x: torch.Tensor) -> torch.Tensor:
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))  # type: ignore[no-any-return]


class DeepseekMoE(ExpertBlock):
    """Experts that are chosen, and shared ones that every token uses."""

    def __init__(
        self, parts: LayerParts, hf_config: Mapping[str, Any], *, by_logistic: bool
    ) -> None:
        """`by_logistic` is V3's way, else V2's."""
        hidden, dtype, kernels = parts.config.hidden_size, parts.dtype, parts.kernels
        super().__init__(hidden, dtype, kernels)
        num_experts = expert_counts(hf_config)["num_experts"]
        self.gate = Router(
            hidden,
            num_experts,
            deepseek_routing(hf_config, num_experts, by_logistic=by_logistic),
            dtype=dtype,
            kernels=kernels,
            has_correction=by_logistic,
        )
        size = positive_int(hf_config, "moe_intermediate_size")
        shape = ExpertShape(num_experts, hidden, size, dtype, parts.config.gate)
        self.experts = GatedExperts(shape, kernels)
        shared = size * positive_int(hf_config, "n_shared_experts")
        self.shared_experts = parts.gated_mlp(intermediate_size=shared, bias=False)

    def readers(self) -> list[StreamReader]:
        return [self.gate, self.experts, self.shared_experts]

    def forward(self, x: Activations) -> torch.Tensor:
        """Map x [N, hidden_size] to float32 of the same shape."""
        weights, chosen = self.gate(x)
        shared = self.shared_experts(x)
        return self.experts(x, weights, chosen, shared)  # type: ignore[no-any-return]


def deepseek_routing(
    hf_config: Mapping[str, Any], num_experts: int, *, by_logistic: bool
) -> Routing:
    """Within the best groups of experts. Raises `ConfigError` for groups that cannot be."""
    num_chosen = positive_int(hf_config, "num_experts_per_tok")
    num_groups = positive_int(hf_config, "n_group", 1)
    num_best_groups = positive_int(hf_config, "topk_group", num_groups)
    if num_experts % num_groups:
        raise ConfigError(
            f"config.json: n_routed_experts={num_experts} is not a multiple of"
            f" n_group={num_groups}."
        )
    group_size = num_experts // num_groups
    if num_best_groups > num_groups or num_chosen > num_best_groups * group_size:
        raise ConfigError(
            f"config.json: num_experts_per_tok={num_chosen} cannot be chosen from"
            f" topk_group={num_best_groups} of n_group={num_groups} groups of {group_size} experts."
        )
    if not by_logistic and hf_config.get("topk_method", "greedy") == "greedy":
        num_groups = num_best_groups = 1
    return Routing(
        num_chosen,
        by_logistic=by_logistic,
        renormalize=by_logistic and bool(hf_config.get("norm_topk_prob", True)),
        num_groups=num_groups,
        num_best_groups=num_best_groups,
        group_best=min(2, group_size) if by_logistic else 1,
        factor=number(hf_config, "routed_scaling_factor", 2.5 if by_logistic else 1.0),
    )


class DeepseekV2ForCausalLM(Decoder):
    """A DeepSeek V2 with its output head."""

    by_logistic = False
    dense_layers = 0
    """Layers at the start without experts, where the config does not say."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, Any]) -> DecoderConfig:
        # The table of angles is for the part that is rotated.
        return DecoderConfig.from_hf(
            hf_config, head_size=positive_int(hf_config, "qk_rope_head_dim")
        )

    @classmethod
    def make_layer(cls, parts: LayerParts, hf_config: Mapping[str, Any]) -> nn.Module:
        attention = LatentAttention(parts, hf_config)
        if parts.index < number(hf_config, "first_k_dense_replace", cls.dense_layers):
            return PreNormLayer(parts, attention, parts.gated_mlp())
        moe = DeepseekMoE(parts, hf_config, by_logistic=cls.by_logistic)
        return PreNormLayer(parts, attention, moe)


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """A DeepSeek V3 or R1 with its output head."""

    by_logistic = True
    dense_layers = 3


def row_order(plain: int, rotated: int, in_pairs: bool) -> torch.Tensor:
    """Where the rows of | rotated | plain | are in the checkpoint: int64 [rotated + plain].

    There, they are | plain | rotated |, and with `in_pairs` it rotates neighbours; here the halves
    are pairs.
    """
    tail = torch.arange(plain, plain + rotated)
    if in_pairs:
        tail = torch.cat([tail[0::2], tail[1::2]])
    return torch.cat([tail, torch.arange(plain)])


def yarn_scale(scaling: Mapping[str, Any]) -> float:
    """What YaRN multiplies scores by, beyond what it does to angles."""
    weight = scaling.get("mscale_all_dim")
    if scaling.get("rope_type", "default") == "default" or not weight:
        return 1.0
    factor = number(scaling, "factor")
    mscale = 1.0 if factor <= 1 else 0.1 * number(scaling, "mscale_all_dim") * math.log(factor) + 1
    return mscale * mscale


def _latent_norm(size: int, parts: LayerParts) -> BranchRMSNorm:
    return BranchRMSNorm(size, _LATENT_EPS, dtype=parts.dtype, kernels=parts.kernels)
