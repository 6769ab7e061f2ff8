"""Layers on an NVIDIA GPU: the Triton kernels of `kernels/gpu`, and torch's products.

Activations have the model's dtype, the residual stream is float32. Nothing here reads a device
value on the host, so that a forward pass can be captured in a graph.

    format    weights                             products
    plain     as the activations                  matmul_exact, cuBLAS
    fp8       float8, a scale a row               matmul_fp8, cuBLAS; activations in float8, too
    int4      four bits, a scale a group          matmul_int4

Experts are in `gpu_experts.py`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from tokenmill.checkpoint.checkpoint import RawTensor
from tokenmill.kernels.activation import Gate
from tokenmill.kernels.experts import Routing
from tokenmill.kernels.float8_rows import Float8Rows
from tokenmill.kernels.gpu.activation import (
    activation,
    activation_quantize,
    gated_activation,
    gated_activation_quantize,
)
from tokenmill.kernels.gpu.gemm_bf16 import matmul_exact
from tokenmill.kernels.gpu.gemm_config import SplitWorkspace
from tokenmill.kernels.gpu.gemm_fp8 import (
    dequantize_fp8,
    matmul_fp8,
    quantize_weight_fp8,
    scaled_mm,
)
from tokenmill.kernels.gpu.gemm_int4 import matmul_int4
from tokenmill.kernels.gpu.int4 import PackedInt4, int4_codes
from tokenmill.kernels.gpu.norm import (
    add_layer_norm,
    add_layer_norm_quantize,
    add_rms_norm,
    add_rms_norm_quantize,
)
from tokenmill.kernels.gpu.row_quantization import quantize_rows
from tokenmill.kernels.linear import linear_float32
from tokenmill.kernels.state_space import StateCache, StateSpaceShape, StateSpaceWeights
from tokenmill.layers.experts import ExpertShape
from tokenmill.layers.gpu_experts import GpuExperts, route
from tokenmill.layers.gpu_parts import GpuParts
from tokenmill.layers.gpu_states import GpuStateBuilder, GpuStateSpace
from tokenmill.layers.linear_method import Activations, LinearMethod
from tokenmill.layers.torch_rows import TorchRows
from tokenmill.layers.weights import WeightSlot, empty_parameter, parameter_slot
from tokenmill.parallel.group import SOLO, TensorGroup
from tokenmill.quantization.dequantize import dequantize
from tokenmill.quantization.four_bit import FOUR_BIT_FORMATS, GROUP_SIZE, four_bit_parts

WeightFormat = Literal["plain", "fp8", "int4"]


class GpuKernels(TorchRows):
    """The kernels of a layer on one device and one stream."""

    group: TensorGroup = SOLO
    has_torch_path = False
    """Torch's reductions choose their order by the number of rows."""

    def __init__(
        self,
        device: torch.device,
        *,
        exact: bool,
        weight_format: WeightFormat = "plain",
        most_own_rows: int = 32,
    ) -> None:
        """With `exact`, a row's result does not depend on how many rows there are.

        Without it, 16-bit products of at most `most_own_rows` rows run on our kernels nevertheless
        (up to the default they were the faster ones on an H200), larger ones on torch's, which
        choose another order of summation for another number of rows. Another `weight_format` than
        plain takes models in bfloat16; their vocabulary stays plain.
        """
        self.device = device
        self.exact = exact
        self.weight_format = weight_format
        self.most_own_rows = most_own_rows
        self.workspace = SplitWorkspace.allocate(device)

    def empty(self, num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_rows, size, dtype=dtype, device=self.device)

    def linear_method(
        self, out_features: int, in_features: int, dtype: torch.dtype
    ) -> LinearMethod:
        if self.weight_format == "plain":
            return GpuLinearMethod(out_features, in_features, dtype, self)
        assert dtype == torch.bfloat16
        method = Fp8LinearMethod if self.weight_format == "fp8" else Int4LinearMethod
        return method(out_features, in_features, self)

    def vocab_method(
        self, vocab_size: int, hidden_size: int, dtype: torch.dtype
    ) -> GpuLinearMethod:
        return GpuLinearMethod(vocab_size, hidden_size, dtype, self)

    def parts_method(
        self, num_parts: int, out_features: int, in_features: int, dtype: torch.dtype
    ) -> GpuParts:
        return GpuParts(num_parts, out_features, in_features, dtype, self)

    def experts_method(self, shape: ExpertShape) -> GpuExperts:
        return GpuExperts(shape, self)

    def route(
        self, logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return route(logits, routing, bias)

    def state_builder(self, block_size: int, num_blocks: int) -> GpuStateBuilder:
        return GpuStateBuilder(block_size)

    def state_space(
        self, shape: StateSpaceShape, weights: StateSpaceWeights, cache: StateCache
    ) -> GpuStateSpace:
        return GpuStateSpace(shape, weights, cache)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        out: Activations,
    ) -> torch.Tensor:
        starts = residual is None
        stream = _new_stream(x) if residual is None else residual
        if isinstance(out, Float8Rows):
            add_rms_norm_quantize(
                x, stream, weight, eps, out.codes, out.scales, starts_stream=starts
            )
        else:
            assert isinstance(out, torch.Tensor)
            add_rms_norm(x, stream, weight, eps, out, starts_stream=starts)
        return stream

    def add_layer_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        out: Activations,
    ) -> torch.Tensor:
        starts = residual is None
        stream = _new_stream(x) if residual is None else residual
        if isinstance(out, Float8Rows):
            add_layer_norm_quantize(
                x, stream, weight, bias, eps, out.codes, out.scales, starts_stream=starts
            )
        else:
            assert isinstance(out, torch.Tensor)
            add_layer_norm(x, stream, weight, bias, eps, out, starts_stream=starts)
        return stream

    def add_residual(
        self, x: torch.Tensor, residual: torch.Tensor | None, out: Activations
    ) -> torch.Tensor:
        if not isinstance(out, Float8Rows):
            return super().add_residual(x, residual, out)
        stream = x.float() if residual is None else residual + x
        quantize_rows(stream, out.codes, out.scales)
        return stream

    def head_rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        heads = x.reshape(-1, len(weight))  # a copy: heads lie closer together than rows of x
        out = torch.empty_like(heads)
        stream = torch.empty(heads.shape, dtype=torch.float32, device=x.device)
        add_rms_norm(heads, stream, weight, eps, out, starts_stream=True)
        return out.view(x.shape)

    def gated_activation(self, gate_up: torch.Tensor, gate: Gate, out: Activations) -> None:
        if isinstance(out, Float8Rows):
            gated_activation_quantize(gate_up, gate, out.codes, out.scales)
        else:
            assert isinstance(out, torch.Tensor)
            gated_activation(gate_up, gate, out)

    def activation(self, x: torch.Tensor, gate: Gate, out: Activations) -> None:
        if isinstance(out, Float8Rows):
            activation_quantize(x, gate, out.codes, out.scales)
        else:
            assert isinstance(out, torch.Tensor)
            activation(x, gate, out)

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape)
        activation(x.view(-1, x.shape[-1]), "gelu", out.view(-1, x.shape[-1]))
        return out

    def runs_own(self, num_rows: int, dtype: torch.dtype) -> bool:
        """Whether a product of so many rows runs on a kernel of ours where torch has one, too."""
        is_faster = num_rows <= self.most_own_rows and dtype != torch.float32
        return self.exact or is_faster


class GpuLinearMethod(nn.Module):
    """A matrix in the activations' dtype, on the device."""

    def __init__(
        self, out_features: int, in_features: int, dtype: torch.dtype, kernels: GpuKernels
    ) -> None:
        super().__init__()
        with kernels.device:
            self.weight = empty_parameter(out_features, in_features, dtype=dtype)
        self.bias_dtype = dtype
        self._kernels = kernels

    def slot(self, name: str, rows: slice) -> WeightSlot:
        return parameter_slot(name, self.weight[rows])

    def empty_input(self, num_rows: int) -> torch.Tensor:
        return self.weight.new_empty(num_rows, self.weight.shape[1])

    def project(
        self, x: Activations, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        if self._kernels.runs_own(len(x), self.weight.dtype):
            out = x.new_empty(len(x), len(self.weight), dtype=out_dtype)
            matmul_exact(x, self.weight, bias, out, self._kernels.workspace)
            return out
        if out_dtype == self.weight.dtype:
            return functional.linear(x, self.weight, bias)
        product = _linear_float32(x, self.weight)
        return product if bias is None else product + bias

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.weight)


class Fp8LinearMethod(nn.Module):
    """A matrix in float8 with a scale for each row, quantised while it is loaded."""

    bias_dtype = torch.bfloat16

    def __init__(self, out_features: int, in_features: int, kernels: GpuKernels) -> None:
        super().__init__()
        with kernels.device:
            self.codes = empty_parameter(out_features, in_features, dtype=torch.float8_e4m3fn)
            self.scale = empty_parameter(out_features, dtype=torch.float32)
        self._kernels = kernels
        # Shapes that torch's product takes.
        self._fits_torch = out_features % 16 == 0 and in_features % 16 == 0

    def slot(self, name: str, rows: slice) -> WeightSlot:
        def load(raw: RawTensor) -> None:
            weight = dequantize(raw, torch.bfloat16).to(self.codes.device)
            codes, scale = quantize_weight_fp8(weight)
            self.codes[rows].copy_(codes)
            self.scale[rows].copy_(scale)

        return WeightSlot(name, tuple(self.codes[rows].shape), load)

    def empty_input(self, num_rows: int) -> Float8Rows:
        return Float8Rows.empty(num_rows, self.codes.shape[1], self.codes.device)

    def project(
        self, x: Activations, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            rows = self.empty_input(len(x))
            quantize_rows(x, rows.codes, rows.scales)
            x = rows
        assert isinstance(x, Float8Rows)
        if (
            self._kernels.runs_own(len(x), self.codes.dtype)
            or not self._fits_torch
            or bias is not None
            or out_dtype != torch.bfloat16
        ):
            out = self._kernels.empty(len(x), len(self.codes), out_dtype)
            matmul_fp8(
                x.codes, x.scales, self.codes, self.scale, bias, out, self._kernels.workspace
            )
            return out
        return scaled_mm(x.codes, x.scales, self.codes, self.scale)

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        # As bytes: torch does not index float8 everywhere.
        codes = self.codes.view(torch.uint8)[ids].view(torch.float8_e4m3fn)
        return dequantize_fp8(codes, self.scale[ids]).to(torch.bfloat16)


class Int4LinearMethod(nn.Module):
    """A matrix in four bits with a scale and a minimum for each 32 values of a row.

    Codes of a checkpoint in such a format are kept; other weights are quantised while they are
    loaded.
    """

    bias_dtype = torch.bfloat16

    def __init__(self, out_features: int, in_features: int, kernels: GpuKernels) -> None:
        super().__init__()
        self.weight = PackedInt4.empty(out_features, in_features, GROUP_SIZE, kernels.device)
        self._kernels = kernels

    def slot(self, name: str, rows: slice) -> WeightSlot:
        def load(raw: RawTensor) -> None:
            if raw.format in FOUR_BIT_FORMATS:
                parts = four_bit_parts(raw)
            else:
                weight = dequantize(raw, torch.bfloat16).to(self.weight.codes.device)
                parts = int4_codes(weight, GROUP_SIZE)
            self.weight.pack_rows(rows, *parts)

        return WeightSlot(name, (rows.stop - rows.start, self.weight.in_features), load)

    def empty_input(self, num_rows: int) -> torch.Tensor:
        return self._kernels.empty(num_rows, self.weight.in_features, torch.bfloat16)

    def project(
        self, x: Activations, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        out = self._kernels.empty(len(x), self.weight.out_features, out_dtype)
        matmul_int4(x, self.weight, bias, out, self._kernels.workspace)
        return out

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight.unpack_rows(ids)


def _new_stream(x: torch.Tensor) -> torch.Tensor:
    """Room for a residual stream that begins with x."""
    return torch.empty(x.shape, dtype=torch.float32, device=x.device)


def _linear_float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute x @ weight.T in float32, without a float32 copy of the weight on a GPU."""
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return linear_float32(x, weight)
