"""Experts in float8: the matrices of all of them, a scale for each row of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenmill.kernels.gpu.gemm_fp8 import dequantize_fp8, quantize_weight_fp8


@dataclass(frozen=True, slots=True)
class Float8Experts:
    """One matrix [N, K] of each expert: value = code * scale of the row."""

    codes: torch.Tensor
    """float8_e4m3fn [num_experts, N, K]."""
    scales: torch.Tensor
    """float32 [num_experts, N]."""

    @classmethod
    def empty(
        cls, num_experts: int, out_features: int, in_features: int, device: torch.device | str
    ) -> Float8Experts:
        """Room for matrices; parts of their rows are filled with `quantize`."""
        shape = num_experts, out_features
        return cls(
            torch.empty(*shape, in_features, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )

    @property
    def shape(self) -> torch.Size:
        """(num_experts, N, K), as of a plain tensor."""
        return self.codes.shape

    def __len__(self) -> int:
        return len(self.codes)

    def quantize(self, expert: int, rows: slice, values: torch.Tensor) -> None:
        """Fill rows of an expert with the nearest to values [num_rows, K], on the device."""
        codes, scales = quantize_weight_fp8(values)
        self.codes[expert, rows].copy_(codes)
        self.scales[expert, rows].copy_(scales)

    def unpack(self, expert: int) -> torch.Tensor:
        """The matrix of an expert, float64 [N, K]."""
        return dequantize_fp8(self.codes[expert], self.scales[expert])
