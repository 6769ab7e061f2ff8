"""Feed-forward blocks of which each token uses a few: a mixture of experts (Shazeer et al., 2017).

    router    a logit for each expert; the best ones are chosen, and weighted
    experts   gated MLPs; each computes the rows of the tokens that chose it, side by side

    chosen        token 0: [2, 0]   token 1: [0, 3]   token 2: [2, 0]
    rows          0 1 2 | 0 2 | 1        by expert 0, 2, 3: no padding, no expert without rows

A token's result has the same bits whatever the other tokens chose: a product's row does not depend
on its neighbours, and a token's experts are added in the order of its choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from tokenmill.checkpoint.checkpoint import RawTensor
from tokenmill.checkpoint.expert_layout import FUSED_TRANSPOSED, SEPARATE
from tokenmill.kernels.experts import ExpertGate, Routing
from tokenmill.layers.experts import ExpertShape, ExpertsMethod
from tokenmill.layers.kernels import LayerKernels
from tokenmill.layers.linear_method import Activations, StreamReader
from tokenmill.layers.mlp import GATED_MLP_NAMES
from tokenmill.layers.parallel_linear import columns_slot, rows_slot
from tokenmill.layers.weights import WeightSlot, empty_parameter, parameter_slot, plain_raw
from tokenmill.parallel.shares import Share, even_share
from tokenmill.quantization.dequantize import plain_values

CORRECTION_BIAS = "e_score_correction_bias"
"""What checkpoints call the bias on scores."""


class Router(nn.Module):
    """Chooses experts, in float32."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        routing: Routing,
        *,
        dtype: torch.dtype,
        kernels: LayerKernels,
        bias: bool = False,
        has_correction: bool = False,
    ) -> None:
        """`bias` is one on logits; with `has_correction`, there is one on scores that decides which
        experts are chosen, but not their weights.
        """
        super().__init__()
        self.num_experts = num_experts
        self.routing = routing
        self.kernels = kernels
        # Kept as well as the vocabulary, however the other matrices are quantised.
        self.method = kernels.vocab_method(num_experts, hidden_size, dtype)
        self.bias = empty_parameter(num_experts, dtype=torch.float32) if bias else None
        self.correction = (
            empty_parameter(num_experts, dtype=torch.float32) if has_correction else None
        )

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield self.method.slot(f"{prefix}.weight", slice(0, self.num_experts))
        if self.bias is not None:
            yield parameter_slot(f"{prefix}.bias", self.bias)
        if self.correction is not None:
            yield parameter_slot(f"{prefix}.{CORRECTION_BIAS}", self.correction)

    def empty_input(self, num_rows: int) -> Activations:
        """A place for the input, in the form in which it is read."""
        return self.method.empty_input(num_rows)

    def forward(self, x: Activations) -> tuple[torch.Tensor, torch.Tensor]:
        """Of x [N, hidden_size]: weights, float32, and experts, best first.

        Both are [N, num_chosen].
        """
        logits = self.method.project(x, self.bias, torch.float32)
        return self.kernels.route(logits, self.routing, self.correction)


def separate_expert_slots(
    method: ExpertsMethod,
    shape: ExpertShape,
    prefix: str,
    names: tuple[str, str, str] = GATED_MLP_NAMES,
) -> Iterator[WeightSlot]:
    """Places for tensors of one matrix each: `names` are those of gate, up and down matrices."""
    size, (gate, up, down) = shape.intermediate_size, names
    for expert, (gate_up, last) in enumerate(zip(method.gate_up, method.down, strict=True)):
        name = f"{prefix}.{expert}"
        yield gate_up.slot(f"{name}.{gate}.weight", slice(0, size))
        yield gate_up.slot(f"{name}.{up}.weight", slice(size, 2 * size))
        yield last.slot(f"{name}.{down}.weight", slice(0, shape.hidden_size))


def divided_expert_slots(
    method: ExpertsMethod,
    shape: ExpertShape,
    prefix: str,
    share: Share,
    names: tuple[str, str, str] = GATED_MLP_NAMES,
) -> Iterator[WeightSlot]:
    """As `separate_expert_slots`, of a rank that has a share of each expert's features."""
    last = f".{names[2]}.weight"
    for slot in separate_expert_slots(method, shape, prefix, names):
        is_last = slot.name.endswith(last)
        yield columns_slot(slot, share) if is_last else rows_slot(slot, [share])


class GatedExperts(nn.Module):
    """Gated MLPs, each with tensors of its own in the checkpoint; a rank has a part of each."""

    def __init__(
        self,
        shape: ExpertShape,
        kernels: LayerKernels,
        names: tuple[str, str, str] = GATED_MLP_NAMES,
    ) -> None:
        """`names` are those of an expert's gate, up and down matrices."""
        super().__init__()
        self.group = kernels.group
        self.share = even_share(shape.intermediate_size, self.group.rank, self.group.size)
        self.shape = replace(shape, intermediate_size=self.share.size)
        self.names = names
        self.method = kernels.experts_method(self.shape)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        return divided_expert_slots(self.method, self.shape, prefix, self.share, self.names)

    def empty_input(self, num_rows: int) -> Activations:
        """A place for the input, in the form in which it is read."""
        return self.method.empty_input(num_rows)

    def forward(
        self,
        x: Activations,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        base: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The weighted sum over the chosen ones of x [N, hidden_size], plus `base`, in float32."""
        base = base if self.group.rank == 0 else None
        return self.group.all_reduce(self.method.mix(x, weights, chosen, base))


class FusedExperts(GatedExperts):
    """Gated MLPs of which the checkpoint has two tensors with the matrices of all."""

    def __init__(
        self, shape: ExpertShape, kernels: LayerKernels, *, is_transposed: bool = False
    ) -> None:
        """`is_transposed`: as `checkpoint/expert_layout.py` says."""
        super().__init__(shape, kernels)
        self.is_transposed = is_transposed

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        hidden_size, size = self.shape.hidden_size, self.share.total
        for name, places, own_rows, rows, columns in (
            ("gate_up_proj", self.method.gate_up, 2 * self.share.size, 2 * size, hidden_size),
            ("down_proj", self.method.down, hidden_size, hidden_size, size),
        ):
            slots = [place.slot("", slice(0, own_rows)) for place in places]
            matrix = (columns, rows) if self.is_transposed else (rows, columns)
            own_part = self._own_rows if name == "gate_up_proj" else self._own_columns
            yield WeightSlot(
                f"{prefix}.{name}",
                (len(slots), *matrix),
                partial(self._load, slots, own_part),
                memory=partial(_memory, slots),
            )

    def _load(
        self,
        slots: list[WeightSlot],
        own_part: Callable[[torch.Tensor], torch.Tensor],
        raw: RawTensor,
    ) -> None:
        for slot, values in zip(slots, plain_values(raw), strict=True):
            slot.load(plain_raw(own_part(values.t() if self.is_transposed else values)))

    def _own_rows(self, gate_up: torch.Tensor) -> torch.Tensor:
        return torch.cat([part[self.share.start : self.share.stop] for part in gate_up.chunk(2)])

    def _own_columns(self, down: torch.Tensor) -> torch.Tensor:
        return down[:, self.share.start : self.share.stop]


def _memory(slots: list[WeightSlot]) -> list[torch.Tensor]:
    return [each for slot in slots for each in slot.memory()]


class ExpertBlock(nn.Module):
    """A block of experts: says in which form all of its parts can read the stream."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, kernels: LayerKernels) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.kernels = kernels

    def readers(self) -> list[StreamReader]:
        """The parts that read the block's input."""
        raise NotImplementedError

    def empty_input(self, num_rows: int) -> Activations:
        """A place for this block's input; plain if one of its readers wants that."""
        readers = self.readers()
        if any(isinstance(reader.empty_input(0), torch.Tensor) for reader in readers):
            return self.kernels.empty(num_rows, self.hidden_size, self.dtype)
        return readers[0].empty_input(num_rows)


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
        gate: ExpertGate = "silu",
        names: tuple[str, str, str] = GATED_MLP_NAMES,
        layout: str = SEPARATE,
    ) -> None:
        """With `renormalize`, the weights of a token's experts sum to one; `names` are those of an
        expert's gate, up and down matrices, `layout` is one of `checkpoint/expert_layout.py`.
        """
        super().__init__(hidden_size, dtype, kernels)
        routing = Routing(num_experts_per_tok, renormalize=renormalize)
        self.gate = Router(hidden_size, num_experts, routing, dtype=dtype, kernels=kernels)
        shape = ExpertShape(num_experts, hidden_size, intermediate_size, dtype, gate)
        if layout == SEPARATE:
            self.experts = GatedExperts(shape, kernels, names)
        else:
            is_transposed = layout == FUSED_TRANSPOSED
            self.experts = FusedExperts(shape, kernels, is_transposed=is_transposed)

    def readers(self) -> list[StreamReader]:
        return [self.gate, self.experts]

    def forward(self, x: Activations) -> torch.Tensor:
        """Map x [N, hidden_size] to float32 of the same shape."""
        weights, chosen = self.gate(x)
        return self.experts(x, weights, chosen)  # type: ignore[no-any-return]
