"""Seconds of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tokenmill.config.memory import Weights
from tokenmill.simulate.work import StepWork

HEAD = "lm_head.weight"
EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight", "wte.weight")
"""What families call it."""
EXPERTS = ".experts."
"""In the names of the tensors of experts that are chosen."""


class CostModel(Protocol):
    """What a step takes."""

    def seconds(self, work: StepWork) -> float:
        """From its plan to its result."""
        ...


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """A model's matrices: bytes as the engine holds them, and values."""

    layer_bytes: int
    """Experts apart."""
    layer_values: int
    head_bytes: int
    head_values: int
    expert_bytes: int = 0
    """Of all experts of all layers."""
    expert_values: int = 0

    @property
    def in_blocks(self) -> bool:
        """Whether most of the layers' weights keep their 4 or 8 bits."""
        num_values = self.layer_values + self.expert_values
        return self.layer_bytes + self.expert_bytes < 1.5 * num_values

    @classmethod
    def of(cls, weights: Weights) -> WeightSizes:
        """From shapes and formats. The embedding counts as the head where there is no other."""
        heads = [name for name in (HEAD, *EMBEDDINGS) if name in weights.shapes]
        matrices = [
            name for name, shape in weights.shapes.items() if len(shape) > 1 and name not in heads
        ]
        experts = _only(weights, [name for name in matrices if EXPERTS in name])
        dense = _only(weights, [name for name in matrices if EXPERTS not in name])
        head = _only(weights, heads[:1])
        return cls(
            layer_bytes=dense.num_bytes,
            layer_values=dense.num_values,
            head_bytes=head.num_bytes,
            head_values=head.num_values,
            expert_bytes=experts.num_bytes,
            expert_values=experts.num_values,
        )


@dataclass(frozen=True, slots=True)
class MachineFigures:
    """What a machine does, as far as a model gets it; divide by what is reached of the best."""

    bandwidth: float
    """Bytes read per second."""
    flops: float
    """Operations per second, a multiplication and an addition being two."""
    step_seconds: float = 0.0
    """Of each step, whatever is in it."""
    request_seconds: float = 0.0
    """Of each request in a step."""


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """The longer of reading and computing, and what the host adds.

    Weights are read once a step, of experts those that some token is likely to choose, and the keys
    and values of a request once a step.
    """

    sizes: WeightSizes
    machine: MachineFigures
    bytes_per_key: int
    """K and V of one token in one layer."""
    flops_per_score: int
    """Of one query and one key: 4 for each value of a head, in all heads."""
    chosen_share: float = 1.0
    """Of a layer's experts, those that a token chooses."""

    def seconds(self, work: StepWork) -> float:
        sizes, machine = self.sizes, self.machine
        num_bytes = sizes.layer_bytes + self.bytes_per_key * work.num_keys
        values = sizes.layer_values
        if work.num_logits:
            num_bytes += sizes.head_bytes
        if sizes.expert_bytes:
            unread_share = (1.0 - self.chosen_share) ** work.num_tokens
            num_bytes += int((1.0 - unread_share) * sizes.expert_bytes)
            values += int(self.chosen_share * sizes.expert_values)
        flops = 2 * (values * work.num_tokens + sizes.head_values * work.num_logits)
        flops += self.flops_per_score * work.num_scores
        return (
            machine.step_seconds
            + machine.request_seconds * work.num_requests
            + max(num_bytes / machine.bandwidth, flops / machine.flops)
        )


def _only(weights: Weights, names: Sequence[str]) -> Weights:
    return replace(weights, shapes={name: weights.shapes[name] for name in names})
