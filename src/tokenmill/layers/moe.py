"""Feed-forward blocks of which each token uses a few: a mixture of experts (Shazeer et al., 2017).

    router    a logit for each expert; the best `num_experts_per_tok` are chosen, and weighted
    experts   gated MLPs; each computes the rows of the tokens that chose it, side by side

    chosen        token 0: [2, 0]   token 1: [0, 3]   token 2: [2, 0]
    rows          0 1 2 | 0 2 | 1        by expert 0, 2, 3: no padding, no expert without rows

A token's result has the same bits whatever the other tokens chose: a product's row does not depend
on its neighbours, and a token's experts are added in the order of its choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from tokenmill.kernels.activation import Gate
from tokenmill.layers.kernels import LayerKernels, require_torch_path
from tokenmill.layers.linear_method import Activations
from tokenmill.layers.mlp import GATED_MLP_NAMES, GatedMLP
from tokenmill.layers.weights import WeightSlot, empty_parameter, parameter_slot


class Router(nn.Module):
    """Chooses experts by the softmax of their logits, in float32."""

    def __init__(
        self,
        hidden_size: int,
        *,
        num_experts: int,
        num_experts_per_tok: int,
        renormalize: bool,
        dtype: torch.dtype,
        kernels: LayerKernels,
        bias: bool = False,
    ) -> None:
        """With `renormalize`, the weights of a token's experts sum to one."""
        super().__init__()
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.renormalize = renormalize
        # Kept as well as the vocabulary, however the other matrices are quantised.
        self.method = kernels.vocab_method(num_experts, hidden_size, dtype)
        self.bias = empty_parameter(num_experts, dtype=torch.float32) if bias else None

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield self.method.slot(f"{prefix}.weight", slice(0, self.num_experts))
        if self.bias is not None:
            yield parameter_slot(f"{prefix}.bias", self.bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of x [N, hidden_size]: weights, float32, and experts, int64, best first.

        Both are [N, num_experts_per_tok].
        """
        logits = self.method.project(x, None, torch.float32)
        if self.bias is not None:
            logits = logits + self.bias
        return choose_experts(logits, self.num_experts_per_tok, renormalize=self.renormalize)


class ExpertBlock(nn.Module):
    """A block of experts, in torch around products on packed weights; it is not recorded."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, kernels: LayerKernels) -> None:
        super().__init__()
        require_torch_path(kernels, "A mixture of experts")
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.kernels = kernels

    def empty_input(self, num_rows: int) -> Activations:
        """A place for this block's input: plain, since its rows are shared out."""
        return self.kernels.empty(num_rows, self.hidden_size, self.dtype)


class SparseMoE(ExpertBlock):
    """A router, and gated MLPs as experts."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        num_experts_per_tok: int,
        renormalize: bool,
        dtype: torch.dtype,
        kernels: LayerKernels,
        gate: Gate = "silu",
        names: tuple[str, str, str] = GATED_MLP_NAMES,
    ) -> None:
        """`names` are those of an expert's gate, up and down matrices."""
        super().__init__(hidden_size, dtype, kernels)
        self.gate = Router(
            hidden_size,
            num_experts=num_experts,
            num_experts_per_tok=num_experts_per_tok,
            renormalize=renormalize,
            dtype=dtype,
            kernels=kernels,
        )
        self.experts = nn.ModuleList(
            GatedMLP(
                hidden_size,
                intermediate_size,
                bias=False,
                dtype=dtype,
                kernels=kernels,
                gate=gate,
                names=names,
            )
            for _ in range(num_experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [N, hidden_size] to float32 of the same shape."""
        weights, chosen = self.gate(x)
        return mixed(x, weights, chosen, self._run, len(self.experts))

    def _run(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        return self.experts[expert](x)  # type: ignore[no-any-return]


def mixed(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    run_expert: Callable[[int, torch.Tensor], torch.Tensor],
    num_experts: int,
) -> torch.Tensor:
    """The chosen experts' results on x [N, hidden_size], weighted: float32 of x's shape.

    `weights` and `chosen` are those of `Router`. Each expert is run once at most, on the rows of
    the tokens that chose it.
    """
    order, counts = rows_by_expert(chosen, num_experts)
    rows = x[order // chosen.shape[1]]
    results = torch.empty_like(rows)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            part = slice(start, start + count)
            results[order[part]] = run_expert(expert, rows[part])
            start += count
    return weighted_sum(results.view(*chosen.shape, -1), weights)


def choose_experts(
    logits: torch.Tensor, num_experts_per_tok: int, *, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights float32, experts int64), both [N, num_experts_per_tok], of float32 [N, experts]."""
    scores = torch.exp(logits - logits.amax(-1, keepdim=True))
    weights, chosen = scores.topk(num_experts_per_tok, dim=-1)
    return weights / (weights if renormalize else scores).sum(-1, keepdim=True), chosen


def rows_by_expert(chosen: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, list[int]]:
    """The places of flattened `chosen` in order of their experts, and how many each expert has."""
    flat = chosen.flatten()
    return flat.argsort(stable=True), torch.bincount(flat, minlength=num_experts).tolist()


def weighted_sum(results: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum results [N, k, size] with weights, float32 [N, k]: float32 [N, size], in order of k."""
    total = results[:, 0] * weights[:, :1]
    for place in range(1, weights.shape[1]):
        total += results[:, place] * weights[:, place : place + 1]
    return total
