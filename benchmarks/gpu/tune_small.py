"""What fused products with few rows gain in a decoder layer, and which cut of the work suits them.

    PYTHONPATH=src python3 benchmarks/gpu/tune_small.py [--seconds 60]

tiles   each product alone in several cuts, as a fraction of what the card copies
layers  the products, norms and activation of some layers in a row, without attention:
        torch's products, the exact product, fused products, and fused products whose launches
        overlap (dependent launch)
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional
from tune_gemm import L2_BYTES, SHAPES, random_matrices, seconds_of

from tokenmill.kernels.gpu.activation import gated_activation
from tokenmill.kernels.gpu.gemm_bf16 import matmul_exact
from tokenmill.kernels.gpu.gemm_config import SplitWorkspace
from tokenmill.kernels.gpu.gemm_small import FEW_ROWS, ONE_ROW, SmallConfig, linear_small
from tokenmill.kernels.gpu.norm import add_rms_norm

ONE_ROW_CUTS = [
    ONE_ROW,
    SmallConfig(2, 1024, 4, 1),
    SmallConfig(8, 1024, 4, 1),
    SmallConfig(4, 512, 2, 1),
    SmallConfig(8, 512, 4, 1),
    SmallConfig(4, 2048, 8, 1),
    SmallConfig(1, 2048, 4, 1),
]
FEW_ROWS_CUTS = [
    FEW_ROWS,
    SmallConfig(64, 128, 4, 5),
    SmallConfig(64, 64, 4, 6),
    SmallConfig(128, 128, 4, 4),
    SmallConfig(128, 64, 4, 6),
    SmallConfig(32, 128, 4, 5),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="stop measuring after these")
    deadline = time.monotonic() + parser.parse_args().seconds
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    bandwidth = 2 * len(source) / seconds_of([lambda: target.copy_(source)], 5e-4)
    print(f"copy {bandwidth / 1e12:.2f} TB/s")
    compare_layers(bandwidth)
    compare_tiles(bandwidth, deadline)


def compare_tiles(bandwidth: float, deadline: float) -> None:
    workspace = SplitWorkspace.allocate("cuda")
    for (name, (num_columns, depth)), num_rows in itertools.product(SHAPES.items(), (1, 4, 16)):
        copies = L2_BYTES // (2 * num_columns * depth) + 2
        weights = random_matrices(copies, num_columns, depth)
        (x,) = random_matrices(1, num_rows, depth)
        out = x.new_empty(num_rows, num_columns)
        limit = 2 * num_columns * depth / bandwidth
        torch_seconds = seconds_of([partial(functional.linear, x, w) for w in weights], limit)
        cells = [f"torch {torch_seconds * 1e6:.1f} ({limit / torch_seconds:.0%})"]
        for config in ONE_ROW_CUTS if num_rows == 1 else FEW_ROWS_CUTS:
            if time.monotonic() > deadline:
                return
            product = partial(linear_small, x, out=out, workspace=workspace, config=config)
            seconds = seconds_of([partial(product, w) for w in weights], limit)
            cut = f"{config.block_n}x{config.block_k}/{config.num_warps}/{config.num_stages}"
            cells.append(f"{cut} {seconds * 1e6:.1f} ({limit / seconds:.0%})")
        print(f"{name:<11}{num_rows:>3} rows  {'   '.join(cells)}", flush=True)


@dataclass
class Layer:
    """Weights of a decoder layer, and where its steps write."""

    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norm: torch.Tensor

    @classmethod
    def random(cls, model: str) -> Layer:
        parts = [
            random_matrices(1, *SHAPES[f"{model} {p}"])[0] for p in ("qkv", "o", "gate_up", "down")
        ]
        for part in parts:
            part.mul_(part.shape[1] ** -0.5)
        return cls(*parts, norm=torch.ones(parts[0].shape[1], device="cuda"))

    @property
    def num_bytes(self) -> int:
        return sum(2 * w.numel() for w in (self.qkv, self.o, self.gate_up, self.down))


def compare_layers(bandwidth: float) -> None:
    """The same layers in four ways; what stands for attention is the queries as they are."""
    for model, num_layers in (("1b", 12), ("8b", 6)):
        layers = [Layer.random(model) for _ in range(num_layers)]
        for num_rows in (1, 2, 4, 8, 16):
            residual = torch.randn(num_rows, layers[0].o.shape[0], device="cuda")
            limit = sum(layer.num_bytes for layer in layers) / bandwidth
            ways = {
                "torch": unfused(layers, residual.clone(), functional.linear),
                "exact": unfused(layers, residual.clone(), exact_product()),
                "fused": fused(layers, residual.clone(), dependent_launch=False),
                "overlapping": fused(layers, residual.clone(), dependent_launch=True),
            }
            cells = []
            for way, run in ways.items():
                seconds = seconds_of([run], limit)
                cells.append(f"{way} {seconds / num_layers * 1e6:.1f} ({limit / seconds:.0%})")
            print(f"{model} layer{num_rows:>3} rows  microseconds: {'   '.join(cells)}", flush=True)


def exact_product() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    workspace = SplitWorkspace.allocate("cuda")

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(len(x), len(weight))
        matmul_exact(x, weight, None, out, workspace)
        return out

    return product


def unfused(
    layers: list[Layer],
    residual: torch.Tensor,
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Callable[[], None]:
    normed = residual.bfloat16()
    start = residual.bfloat16()

    def run() -> None:
        x = start
        for layer in layers:
            add_rms_norm(x, residual, layer.norm, 1e-5, normed)
            queries = product(normed, layer.qkv)[:, : residual.shape[1]]
            x = product(queries.contiguous(), layer.o)
            add_rms_norm(x, residual, layer.norm, 1e-5, normed)
            gate_up = product(normed, layer.gate_up)
            activated = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
            gated_activation(gate_up, "silu", activated)
            x = product(activated, layer.down)

    return run


def fused(
    layers: list[Layer], residual: torch.Tensor, *, dependent_launch: bool
) -> Callable[[], None]:
    workspace = SplitWorkspace.allocate("cuda")
    num_rows, size = residual.shape
    qkv = residual.new_empty(num_rows, len(layers[0].qkv), dtype=torch.bfloat16)
    queries = residual.new_empty(num_rows, size, dtype=torch.bfloat16)
    gate_up = residual.new_empty(num_rows, len(layers[0].gate_up), dtype=torch.bfloat16)

    def run() -> None:
        options = {"dependent_launch": dependent_launch}
        for layer in layers:
            norm = {"norm_weight": layer.norm, "eps": 1e-5}
            linear_small(residual, layer.qkv, qkv, workspace, **norm, **options)
            queries.copy_(qkv[:, :size])
            linear_small(queries, layer.o, residual, workspace, accumulates=True, **options)
            linear_small(residual, layer.gate_up, gate_up, workspace, **norm, **options)
            linear_small(
                gate_up, layer.down, residual, workspace, gated=True, accumulates=True, **options
            )

    return run


if __name__ == "__main__":
    main()
