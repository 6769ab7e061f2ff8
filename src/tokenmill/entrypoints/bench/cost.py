"""What a step must read and compute at least, by arithmetic.

Weights are read once a step, the keys and values of a request once a step; what fits in caches
(activations, logits) is not counted. Of experts, those are read that some token of the step is
likely to choose, if all are chosen alike. Two operations are a multiplication and an addition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenmill.config.memory import Weights
from tokenmill.layers.attention import Attention
from tokenmill.simulate.cost import WeightSizes


@dataclass(frozen=True, slots=True)
class RequestWork:
    """What a step computes of one request."""

    num_tokens: int
    seq_len: int
    """Tokens of the request behind the step: the keys that its last token sees."""
    num_logits: int


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one step, or of several together."""

    num_bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.num_bytes + other.num_bytes, self.flops + other.flops)


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """One layer's attention."""

    num_heads: int
    head_size: int
    kv_bytes_per_token: int
    window: int | None

    def of(self, work: RequestWork) -> Cost:
        """Each query sees the keys up to its own position, within the window."""
        first = work.seq_len - work.num_tokens
        window = self.window or work.seq_len
        seen = _sum_of_lengths(first, work.seq_len, window)
        keys = min(work.seq_len, window + work.num_tokens - 1)
        return Cost(keys * self.kv_bytes_per_token, 4.0 * self.num_heads * self.head_size * seen)


@dataclass(frozen=True, slots=True)
class ExpertCost:
    """The experts of all layers."""

    num_bytes: int = 0
    num_values: int = 0
    chosen_share: float = 1.0
    """Of a layer's experts, those that a token chooses."""

    def of(self, num_tokens: int) -> Cost:
        """What is not chosen by any of the tokens is not read."""
        read_share = 1.0 - (1.0 - self.chosen_share) ** num_tokens
        return Cost(
            read_share * self.num_bytes, 2.0 * self.chosen_share * self.num_values * num_tokens
        )


@dataclass(frozen=True, slots=True)
class ModelCost:
    """A model, as its weights are held."""

    layer_bytes: int
    """Experts apart."""
    layer_values: int
    head_bytes: int
    head_values: int
    attention: tuple[AttentionCost, ...]
    in_blocks: bool
    """Whether most of the layers' weights keep their 4 or 8 bits."""
    experts: ExpertCost = ExpertCost()

    def of(self, step: Sequence[RequestWork]) -> Cost:
        """The step's weights, keys and values read once, and its products."""
        num_tokens = sum(work.num_tokens for work in step)
        num_logits = sum(work.num_logits for work in step)
        cost = Cost(
            self.layer_bytes + (self.head_bytes if num_logits else 0),
            2.0 * (self.layer_values * num_tokens + self.head_values * num_logits),
        )
        cost += self.experts.of(num_tokens)
        return sum((layer.of(work) for layer in self.attention for work in step), cost)


def model_cost(
    weights: Weights,
    layers: Mapping[str, Attention],
    kv_bytes: Mapping[str, int],
    chosen_share: float = 1.0,
) -> ModelCost:
    """From the weights' shapes and formats, the attention layers, and each one's bytes per token.

    The embedding counts as the head where there is no other; `chosen_share` is `ExpertCost`'s.
    """
    sizes = WeightSizes.of(weights)
    return ModelCost(
        layer_bytes=sizes.layer_bytes,
        layer_values=sizes.layer_values,
        head_bytes=sizes.head_bytes,
        head_values=sizes.head_values,
        attention=tuple(
            AttentionCost(layer.num_heads, layer.head_size, kv_bytes[name], layer.sliding_window)
            for name, layer in layers.items()
        ),
        in_blocks=sizes.in_blocks,
        experts=ExpertCost(sizes.expert_bytes, sizes.expert_values, chosen_share),
    )


def _sum_of_lengths(first: int, last: int, window: int) -> int:
    """Keys seen by the queries at positions first .. last - 1: each min(position + 1, window)."""

    def up_to(count: int) -> int:
        short = min(count, window)
        return short * (short + 1) // 2 + (count - short) * window

    return up_to(last) - up_to(first)
