"""Experts in four bits: the matrices of all of them, as their grouped product reads them.

    int4     code * scale + minimum                            `int4.py`, groups of 32 values
    mxfp4    e2m1 float of the code * 2 ** (exponent - 127)    Open Compute Project, 2023

    e2m1    0  0.5  1  1.5  2  3  4  6   for codes 0 to 7, the same below zero for 8 to 15

    codes    uint8 [num_experts, N, padded K / 2]      as `PackedInt4` has them
    scales   int32 [num_experts, padded K / 32, N]     bfloat16 scale below, bfloat16 minimum above
             uint8 of that shape                       or exponents

An exponent of 0 counts as no value at all: bfloat16 has no such scale, nor have weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from tokenmill.kernels.gpu.int4 import PackedInt4, pack_codes, padded_depth, unpack_codes

GROUP_SIZE = 32
"""Values of a row that share a scale."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class FourBitExperts:
    """One matrix [N, K] of each expert."""

    codes: torch.Tensor
    scales: torch.Tensor
    in_features: int
    """K, before padding."""

    @classmethod
    def empty(
        cls,
        num_experts: int,
        out_features: int,
        in_features: int,
        device: torch.device | str,
        *,
        is_mxfp4: bool,
    ) -> FourBitExperts:
        """Room for matrices; parts of their rows are filled with `pack_int4` or `pack_mxfp4`."""
        depth = padded_depth(in_features)
        shape = num_experts, depth // GROUP_SIZE, out_features
        return cls(
            torch.empty(num_experts, out_features, depth // 2, dtype=torch.uint8, device=device),
            torch.empty(shape, dtype=torch.uint8 if is_mxfp4 else torch.int32, device=device),
            in_features,
        )

    @property
    def is_mxfp4(self) -> bool:
        return self.scales.dtype == torch.uint8

    @property
    def shape(self) -> tuple[int, int, int]:
        """(num_experts, N, K), as of a plain tensor."""
        return len(self.codes), self.codes.shape[1], self.in_features

    def __len__(self) -> int:
        return len(self.codes)

    def pack_int4(
        self,
        expert: int,
        rows: slice,
        codes: torch.Tensor,
        scale: torch.Tensor,
        minimum: torch.Tensor,
    ) -> None:
        """Fill rows of an expert, as `PackedInt4.pack_rows`."""
        assert not self.is_mxfp4
        self._int4(expert).pack_rows(rows, codes, scale, minimum)

    def pack_mxfp4(
        self, expert: int, rows: slice, codes: torch.Tensor, exponents: torch.Tensor
    ) -> None:
        """Fill rows of an expert from codes, uint8 [num_rows, K], and exponents, uint8
        [num_rows, K / 32 rounded up], on any device.
        """
        assert self.is_mxfp4
        device = self.codes.device
        self.codes[expert, rows] = pack_codes(codes.to(device), GROUP_SIZE)
        padding = self.scales.shape[1] - exponents.shape[1]
        padded = functional.pad(exponents.to(device), (0, padding))
        self.scales[expert][:, rows] = padded.t()

    def unpack(self, expert: int) -> torch.Tensor:
        """The matrix of an expert, bfloat16 [N, K]."""
        if not self.is_mxfp4:
            rows = torch.arange(self.shape[1], device=self.codes.device)
            return self._int4(expert).unpack_rows(rows)
        codes = unpack_codes(self.codes[expert], GROUP_SIZE)
        values = torch.tensor([*_E2M1, *(-v for v in _E2M1)], device=codes.device)[codes.int()]
        exponents = self.scales[expert].t().repeat_interleave(GROUP_SIZE, dim=1).int()
        values = torch.where(exponents == 0, 0.0, torch.ldexp(values, exponents - 127))
        return values.to(torch.bfloat16)[:, : self.in_features]

    def _int4(self, expert: int) -> PackedInt4:
        return PackedInt4(self.codes[expert], self.scales[expert], GROUP_SIZE, self.in_features)
