"""Mixtures of experts: routing, and the gated MLPs that tokens chose, natively.

    route          logits of a token -> its experts, best first, and their weights
    mix_experts    the weighted sum of a token's experts, in the order of its choice

Rows are sorted by expert and multiplied side by side, without padding: csrc/experts.h draws how. A
token's result has the same bits whatever the other tokens chose, and with any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tokenmill.kernels import arena, native
from tokenmill.kernels.activation import Gate, gated_activation
from tokenmill.kernels.gemm import PackedBf16, PackedBlocks, PackedFloat32, QuantizedRows

PackedWeight = PackedBf16 | PackedFloat32 | PackedBlocks

_TINY = 1e-20
"""Keeps the sum of logistic scores from being zero."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token's experts are chosen from their logits.

    Scores are a softmax's, or logistic. Among equal ones the expert with the lower number is
    better; a NaN is better than any number, so that it cannot get lost.
    """

    num_chosen: int
    """Experts of a token."""
    by_logistic: bool = False
    renormalize: bool = False
    """Whether a token's weights sum to `factor`; else they are the scores times `factor`."""
    num_groups: int = 1
    """Neighbouring experts form so many groups of one size."""
    num_best_groups: int = 1
    """Only experts of so many groups can be chosen."""
    group_best: int = 1
    """A group is as good as the sum of its best 1 or 2 experts."""
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """(up + 1) * gate * logistic(alpha * gate); gate at most `limit`, up within [-limit, limit]."""

    alpha: float
    limit: float


ExpertGate = Gate | ClampedGate


class PackedExperts:
    """The matrices of a layer's experts, for `mix_experts`."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.reads_plain = False
        """Whether `mix_experts` needs plain rows for them; else quantised ones serve, too."""
        self.native = native.module().Experts(hidden_size, intermediate_size)
        self._kept: list[object] = []  # whose memory the native object reads

    def add(
        self,
        gate_up: Sequence[PackedWeight],
        down: Sequence[PackedWeight],
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> None:
        """The next expert: matrices [2 * intermediate_size, hidden_size], gates first, and
        [hidden_size, intermediate_size], each in parts by rows; biases float32.

        Plain parts are bfloat16, or all float32, as the activations will be.
        """
        self.native.add(_spans(gate_up), _spans(down), gate_up_bias, down_bias)
        self.reads_plain |= not all(isinstance(part, PackedBlocks) for part in gate_up)
        self._kept += [*gate_up, *down, gate_up_bias, down_bias]


def route(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights float32, experts int32), both [N, num_chosen], of float32 logits [N, experts].

    With a bias, float32 [experts], the experts with the largest score plus bias are chosen; it does
    not touch the weights.
    """
    shape = len(logits), routing.num_chosen
    weights = arena.empty(*shape, dtype=torch.float32)
    chosen = arena.empty(*shape, dtype=torch.int32)
    native.module().route(
        logits,
        bias,
        routing.by_logistic,
        routing.renormalize,
        routing.num_groups,
        routing.num_best_groups,
        routing.group_best,
        routing.factor,
        weights,
        chosen,
    )
    return weights, chosen


def mix_experts(
    x: torch.Tensor | QuantizedRows,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    experts: PackedExperts,
    gate: ExpertGate,
    *,
    dtype: torch.dtype,
    base: torch.Tensor | None = None,
) -> torch.Tensor:
    """The experts' results on x [N, hidden_size], weighted and summed: float32 of that shape.

    `weights` and `chosen`, contiguous, are those of `route`; x is of `dtype` (bfloat16 or float32)
    or quantised, and `base`, bfloat16 or float32 [N, hidden_size], is added. Products are rounded
    to `dtype`. Raises `ValueError` for an expert that there is not.
    """
    num_rows, num_chosen = weights.shape
    is_bf16 = dtype == torch.bfloat16
    num_bytes = experts.native.workspace_bytes(num_rows, num_chosen, is_bf16)
    workspace = arena.empty(num_bytes, dtype=torch.uint8)
    out = arena.empty(num_rows, experts.hidden_size, dtype=torch.float32)
    clamped = gate if isinstance(gate, ClampedGate) else None
    native.module().mix_experts(
        experts.native,
        x.buffer if isinstance(x, QuantizedRows) else x,
        weights,
        chosen,
        "clamped" if clamped else gate,
        clamped.alpha if clamped else 0.0,
        clamped.limit if clamped else 0.0,
        base,
        is_bf16,
        workspace,
        out,
    )
    return out


def route_reference(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `route`."""
    if routing.by_logistic:
        scores = 1.0 / (torch.exp(-logits) + 1.0)
    else:
        scores = torch.exp(logits - logits.amax(-1, keepdim=True))
    candidates = scores if bias is None else scores + bias
    if routing.num_best_groups < routing.num_groups:
        candidates = _within_best_groups(candidates, routing)
    chosen = _best(candidates, routing.num_chosen)[1]
    weights = scores.gather(-1, chosen)
    if routing.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + (_TINY if routing.by_logistic else 0))
    elif not routing.by_logistic:
        weights = weights / scores.sum(-1, keepdim=True)
    return weights * routing.factor, chosen.int()


def mix_experts_reference(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    run_expert: Callable[[int, torch.Tensor], torch.Tensor],
    num_experts: int,
) -> torch.Tensor:
    """As `mix_experts`, of plain x [N, hidden_size], with each expert a function of rows.

    Each is called once at most, on the rows of the tokens that chose it.
    """
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    rows = x[order // chosen.shape[1]]
    results = torch.empty_like(rows)
    start = 0
    for expert, count in enumerate(torch.bincount(flat, minlength=num_experts).tolist()):
        if count:
            part = slice(start, start + count)
            results[order[part]] = run_expert(expert, rows[part])
            start += count
    by_choice = results.view(*chosen.shape, x.shape[1])
    total = by_choice[:, 0] * weights[:, :1]
    for place in range(1, weights.shape[1]):
        total += by_choice[:, place] * weights[:, place : place + 1]
    return total


def expert_gate(gate_up: torch.Tensor, gate: ExpertGate) -> torch.Tensor:
    """gate_up [N, 2 * size], gates first, to [N, size] of its dtype; computed in float32."""
    if not isinstance(gate, ClampedGate):
        return gated_activation(gate_up, gate)
    first, up = gate_up.float().chunk(2, dim=-1)
    first, up = first.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
    activated = (up + 1.0) * (first / (torch.exp(-gate.alpha * first) + 1.0))
    return activated.to(gate_up.dtype)


def _spans(parts: Sequence[PackedWeight]) -> list[tuple[torch.Tensor, str, int]]:
    return [(part.buffer, _format(part), part.out_features) for part in parts]


def _format(weight: PackedWeight) -> str:
    if isinstance(weight, PackedBlocks):
        return weight.block_type
    return "bf16" if isinstance(weight, PackedBf16) else "float32"


def _within_best_groups(candidates: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Candidates [N, experts]; those of other groups than the best are -inf."""
    groups = candidates.view(len(candidates), routing.num_groups, -1)
    strength = _best(groups, routing.group_best)[0].sum(-1)
    kept = torch.zeros_like(strength, dtype=torch.bool)
    kept.scatter_(-1, _best(strength, routing.num_best_groups)[1], True)
    return groups.masked_fill(~kept[..., None], -torch.inf).flatten(1)


def _best(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, places) of the best along the last dimension; the first among equals."""
    ordered, places = values.sort(dim=-1, descending=True, stable=True)
    return ordered[..., :count], places[..., :count]
