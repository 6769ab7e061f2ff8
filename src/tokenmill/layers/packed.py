"""Weights packed for the native kernels: plain, or the codes and scales of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from tokenmill.attention.backend import AttentionMetadataBuilder
from tokenmill.checkpoint.checkpoint import PACKED_PREFIX, RawTensor
from tokenmill.kernels import arena, fused
from tokenmill.kernels.activation import Gate
from tokenmill.kernels.experts import Routing, route
from tokenmill.kernels.float8_rows import Float8Rows
from tokenmill.kernels.gelu import gelu
from tokenmill.kernels.gemm import (
    BLOCK_VALUES,
    GROUP_SIZE,
    PANEL_COLUMNS,
    PackedBlocks,
    PackedFloat32,
    QuantizedRows,
    gemm_bf16,
    gemm_blocks,
    gemm_float32,
    quantize_rows,
)
from tokenmill.kernels.state_space import StateCache, StateSpaceShape, StateSpaceWeights
from tokenmill.layers.experts import ExpertShape, NativeExperts
from tokenmill.layers.linear_method import Activations
from tokenmill.layers.pack_parts import PackedWeight, pack_parts
from tokenmill.layers.packed_states import PackedStateBuilder, PackedStateSpace
from tokenmill.layers.state_steps import StateSpace
from tokenmill.layers.weights import WeightSlot
from tokenmill.parallel.group import SOLO, TensorGroup
from tokenmill.quantization.packed_blocks import Quantization


@dataclass(frozen=True, slots=True)
class _Span:
    """Neighbouring rows of the matrix in one format."""

    rows: slice
    weight: PackedWeight


@dataclass(slots=True)
class PackedLinearMethod:
    """A matrix in spans: parts of a merged layer that have one format are one product.

    Among bfloat16 activations, block types that the kernels know keep their codes, and plain
    weights become bfloat16 or are quantised. Among float32 activations all weights become float32.
    """

    out_features: int
    in_features: int
    dtype: torch.dtype = torch.bfloat16
    """Of the activations: bfloat16 or float32."""
    quantization: Quantization | None = None
    """What plain weights become; of rows that are no multiple of 32 values, bfloat16."""
    bias_dtype: torch.dtype = torch.float32
    _loaded: dict[int, RawTensor] = field(default_factory=dict)
    """Parts by their first row, until all are there; they are mapped, not copied."""
    _spans: list[_Span] = field(default_factory=list)

    def slot(self, name: str, rows: slice) -> WeightSlot:
        def load(raw: RawTensor) -> None:
            self._loaded[rows.start] = raw
            if sum(part.shape[0] for part in self._loaded.values()) == self.out_features:
                self._pack()

        shape = rows.stop - rows.start, self.in_features
        return WeightSlot(name, shape, load, memory=lambda: (w.buffer for w in self.weights))

    @property
    def weights(self) -> list[PackedWeight]:
        """Parts of the loaded matrix, in the order of its rows."""
        return [span.weight for span in self._spans]

    def empty_input(self, num_rows: int) -> Activations:
        if all(isinstance(span.weight, PackedBlocks) for span in self._spans):
            return fused.empty_quantized(num_rows, self.in_features)
        return arena.empty(num_rows, self.in_features, dtype=self.dtype)

    def project(
        self, x: Activations, bias: torch.Tensor | None, out_dtype: torch.dtype
    ) -> torch.Tensor:
        num_rows = x.num_rows if isinstance(x, QuantizedRows) else len(x)
        out = arena.empty(num_rows, self.out_features, dtype=out_dtype)
        self.project_into(x, bias, out)
        return out

    def project_into(self, x: Activations, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """As `project`, into out [N, out_features], whose rows may lie apart, like those of x."""
        for span in self._spans:
            part = out[:, span.rows]
            part_bias = None if bias is None else bias[span.rows]
            assert not isinstance(x, Float8Rows)
            if isinstance(span.weight, PackedBlocks):
                x = x if isinstance(x, QuantizedRows) else quantize_rows(x)
                gemm_blocks(x, span.weight, part_bias, out=part)
                continue
            assert isinstance(x, torch.Tensor)
            if isinstance(span.weight, PackedFloat32):
                gemm_float32(x, span.weight, part_bias, out=part)
            else:
                gemm_bf16(x, span.weight, part_bias, out=part)

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        (span,) = self._spans
        return span.weight.unpack_rows(ids)

    def _pack(self) -> None:
        start, before, self._spans = 0, self._spans, []
        in_order = [self._loaded[first] for first in sorted(self._loaded)]
        for parts in self._spans_of(in_order):
            key = self._packed_format(parts[0])
            stop = start + sum(part.shape[0] for part in parts)
            into = before[len(self._spans)].weight if before else None
            self._spans.append(_Span(slice(start, stop), pack_parts(key, parts, into)))
            start = stop
        self._loaded.clear()

    def _spans_of(self, in_order: list[RawTensor]) -> Iterator[list[RawTensor]]:
        """Parts of one format; those that are packed already join where panels are whole."""
        for key, group in groupby(in_order, key=self._packed_format):
            parts = list(group)
            if key.startswith(PACKED_PREFIX) and any(
                part.shape[0] % PANEL_COLUMNS for part in parts[:-1]
            ):
                yield from ([part] for part in parts)
            else:
                yield parts

    def _packed_format(self, raw: RawTensor) -> str:
        if self.dtype == torch.float32:
            return "float32"
        if raw.format in BLOCK_VALUES or raw.format.startswith(PACKED_PREFIX):
            return raw.format
        is_whole = self.in_features % GROUP_SIZE == 0
        return self.quantization if self.quantization and is_whole else "bfloat16"


@dataclass(frozen=True, slots=True)
class PackedParts:
    """A matrix for each part of a row."""

    parts: Sequence[PackedLinearMethod]

    def project_into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        for part, method in enumerate(self.parts):
            method.project_into(x[:, part], None, out[:, part])


class NativeKernels:
    """The kernels of a layer, compiled, for activations in bfloat16 or float32.

    The residual is float32.
    """

    device = torch.device("cpu")
    has_torch_path = True

    def empty(self, num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        return arena.empty(num_rows, size, dtype=dtype)

    def __init__(self, quantization: Quantization | None = None, group: TensorGroup = SOLO) -> None:
        """Plain matrices become `quantization`, and the vocabulary then int8."""
        self.quantization = quantization
        self.group = group

    def linear_method(
        self, out_features: int, in_features: int, dtype: torch.dtype
    ) -> PackedLinearMethod:
        return PackedLinearMethod(out_features, in_features, dtype, self.quantization)

    def vocab_method(
        self, vocab_size: int, hidden_size: int, dtype: torch.dtype
    ) -> PackedLinearMethod:
        quantization: Quantization | None = "int8" if self.quantization else None
        return PackedLinearMethod(vocab_size, hidden_size, dtype, quantization)

    def experts_method(self, shape: ExpertShape) -> NativeExperts:
        return NativeExperts(shape, self.linear_method)

    def route(
        self, logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return route(logits, routing, bias)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        out: Activations,
    ) -> torch.Tensor:
        assert not isinstance(out, Float8Rows)
        stream, starts_stream = _stream(x, residual)
        fused.add_rms_norm(x, stream, weight, eps, out, starts_stream=starts_stream)
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
        assert not isinstance(out, Float8Rows)
        stream, starts_stream = _stream(x, residual)
        fused.add_layer_norm(x, stream, weight, bias, eps, out, starts_stream=starts_stream)
        return stream

    def add_residual(
        self, x: torch.Tensor, residual: torch.Tensor | None, out: Activations
    ) -> torch.Tensor:
        assert not isinstance(out, Float8Rows)
        stream, starts_stream = _stream(x, residual)
        fused.add_residual(x, stream, out, starts_stream=starts_stream)
        return stream

    def head_rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = arena.empty(*x.shape, dtype=x.dtype)
        fused.head_rms_norm(x, weight, eps, out)
        return out

    def gated_activation(self, gate_up: torch.Tensor, gate: Gate, out: Activations) -> None:
        assert not isinstance(out, Float8Rows)
        fused.gated_activation(gate_up, gate, out)

    def activation(self, x: torch.Tensor, gate: Gate, out: Activations) -> None:
        assert not isinstance(out, Float8Rows)
        fused.activation(x, gate, out)

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        return gelu(x)

    def add_rows(self, x: torch.Tensor, table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        out = arena.empty(*x.shape, dtype=torch.float32)
        fused.add_rows(x, table, rows, out)
        return out

    def copy(self, x: torch.Tensor, out: torch.Tensor) -> None:
        fused.copy(x, out)

    def parts_method(
        self, num_parts: int, out_features: int, in_features: int, dtype: torch.dtype
    ) -> PackedParts:
        methods = [self.linear_method(out_features, in_features, dtype) for _ in range(num_parts)]
        return PackedParts(methods)

    def state_builder(self, block_size: int, num_blocks: int) -> AttentionMetadataBuilder:
        return PackedStateBuilder(block_size, num_blocks)

    def state_space(
        self, shape: StateSpaceShape, weights: StateSpaceWeights, cache: StateCache
    ) -> StateSpace:
        return PackedStateSpace(shape, weights, cache)


def _stream(x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, bool]:
    """The residual, or room for the one that begins with x; and whether it begins."""
    if residual is not None:
        return residual, False
    return arena.empty(*x.shape, dtype=torch.float32), True
