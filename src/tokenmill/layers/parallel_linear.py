"""Linear layers of which each rank has a part, as of Megatron-LM (Shoeybi et al., 2019).

    ColumnParallelLinear   rows of the weight: a rank makes its part of the outputs
    RowParallelLinear      columns of the weight: a rank reads its part of the inputs; sums are put
                           together

One behind the other they need one exchange: the part that a rank makes is the part that it reads.
With one rank they are `Linear`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from tokenmill.checkpoint.checkpoint import RawTensor
from tokenmill.layers.kernels import LayerKernels
from tokenmill.layers.linear import Linear
from tokenmill.layers.linear_method import Activations
from tokenmill.layers.weights import WeightSlot
from tokenmill.parallel.shares import Share
from tokenmill.quantization.slices import columns_of, rows_of


class ColumnParallelLinear(Linear):
    """One projection, or several of the same input, and of each the rows that this rank has."""

    def __init__(
        self,
        in_features: int,
        out_features: Mapping[str, Share] | Sequence[Share],
        *,
        bias: bool,
        dtype: torch.dtype,
        kernels: LayerKernels,
    ) -> None:
        """`out_features` are by the name of a tensor, as of `Linear`, or those of one tensor, one
        behind the other.
        """
        if isinstance(out_features, Mapping):
            self.shares = {name: [share] for name, share in out_features.items()}
        else:
            self.shares = {"": list(out_features)}
        sizes = {name: sum(each.size for each in parts) for name, parts in self.shares.items()}
        super().__init__(
            in_features,
            sizes if isinstance(out_features, Mapping) else sizes[""],
            bias=bias,
            dtype=dtype,
            kernels=kernels,
        )

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        slots = super().weight_slots(prefix)
        per_part = 1 if self.bias is None else 2
        for shares in self.shares.values():
            for _ in range(per_part):
                yield rows_slot(next(slots), shares)

    def row_shares(self) -> list[list[Share]]:
        return list(self.shares.values())


class RowParallelLinear(Linear):
    """One projection, and of its inputs those that this rank has."""

    def __init__(
        self,
        in_features: Share,
        out_features: int | Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        kernels: LayerKernels,
    ) -> None:
        super().__init__(in_features.size, out_features, bias=bias, dtype=dtype, kernels=kernels)
        self.share = in_features
        self.group = kernels.group
        self._partial_dtype = kernels.group.partial_dtype(dtype)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        for slot in super().weight_slots(prefix):
            yield columns_slot(slot, self.share) if len(slot.shape) == 2 else slot

    def column_share(self) -> Share:
        return self.share

    def forward(self, x: Activations) -> torch.Tensor:
        """Project x [N, this rank's in_features] to [N, out_features]; the bias counts once."""
        bias = self.bias if self.group.rank == 0 else None
        return self.group.all_reduce(self.method.project(x, bias, self._partial_dtype))


def rows_slot(slot: WeightSlot, shares: Sequence[Share]) -> WeightSlot:
    """A slot for the whole of a tensor, of which `slot` has these rows, one behind the other."""
    if all(share.is_whole for share in shares):
        return slot
    starts = [sum(each.total for each in shares[:index]) for index in range(len(shares))]
    rows = [
        range(start + share.start, start + share.stop)
        for start, share in zip(starts, shares, strict=True)
    ]

    def load(raw: RawTensor) -> None:
        slot.load(rows_of(raw, rows))

    total = sum(share.total for share in shares)
    read = rows[0] if len(rows) == 1 else None
    return WeightSlot(slot.name, (total, *slot.shape[1:]), load, read)


def columns_slot(slot: WeightSlot, share: Share) -> WeightSlot:
    """A slot for the whole of a matrix, of which `slot` has these columns."""
    if share.is_whole:
        return slot

    def load(raw: RawTensor) -> None:
        slot.load(columns_of(raw, range(share.start, share.stop), slot.name))

    return WeightSlot(slot.name, (slot.shape[0], share.total), load)
