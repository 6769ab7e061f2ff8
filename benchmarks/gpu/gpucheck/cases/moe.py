"""Layers of experts as wide as Qwen3-30B-A3B's and gpt-oss-20b's: their parts, and all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from gpucheck.cases.case import MANY_ROUNDED, ROUNDED, SAME, SUMMED, Case, Place, Result


@dataclass(frozen=True, slots=True)
class Layer:
    num_experts: int
    k: int
    hidden: int
    intermediate: int


QWEN = Layer(num_experts=128, k=8, hidden=2_048, intermediate=768)
GPT_OSS = Layer(num_experts=32, k=4, hidden=2_880, intermediate=2_880)
SMALL = Layer(num_experts=6, k=2, hidden=72, intermediate=40)


def cases(place: Place) -> Iterator[Case]:
    layer = SMALL if place.small else QWEN
    count, hidden, intermediate = layer.num_experts, layer.hidden, layer.intermediate
    gate_up = place.randn(count, 2 * intermediate, hidden, scale=hidden**-0.5)
    down = place.randn(count, hidden, intermediate, scale=intermediate**-0.5)
    for num_tokens in place.pick([1, 16, 256, 4_096], [7]):
        yield _route(place, layer, num_tokens)
        yield _align(place, layer, num_tokens)
        yield _grouped_matmul(place, layer, num_tokens, gate_up)
        yield _experts_mlp(place, layer, num_tokens, gate_up, down)
    layer = SMALL if place.small else GPT_OSS
    for num_tokens in place.pick([1, 16, 256, 4_096], [7]):
        for kind in KINDS:
            weight = _packed(place, layer, 2 * layer.intermediate, layer.hidden, kind)
            yield _grouped_matmul(place, layer, num_tokens, weight, kind)
        yield _clamped_experts(place, layer, num_tokens)


KINDS = ("fp8", "int4", "mxfp4")
"""Weights of fewer bits than their activations."""


def _packed(place: Place, layer: Layer, num_columns: int, depth: int, kind: str) -> Any:
    """A matrix of each expert with random codes and scales."""
    from tokenmill.kernels.gpu.float8_experts import Float8Experts
    from tokenmill.kernels.gpu.four_bit_experts import FourBitExperts
    from tokenmill.kernels.gpu.int4 import pack_scales

    sizes = layer.num_experts, num_columns, depth
    if kind == "fp8":
        scales = place.randn(*sizes[:2], dtype=torch.float32).abs() * depth**-0.5
        return Float8Experts(place.randn(*sizes).to(torch.float8_e4m3fn), scales)
    weight = FourBitExperts.empty(*sizes, place.device, is_mxfp4=kind == "mxfp4")
    weight.codes.copy_(place.integers(256, *weight.codes.shape, dtype=torch.uint8))
    if kind == "mxfp4":
        exponents = 118 + place.integers(6, *weight.scales.shape, dtype=torch.uint8)
        weight.scales.copy_(exponents)
    else:
        scale = place.randn(*weight.scales.shape, dtype=torch.float32, scale=depth**-0.5 / 8)
        weight.scales.copy_(pack_scales(scale, -8 * scale))
    return weight


def _plain(weight: Any, expert: int) -> torch.Tensor:
    """The matrix of an expert, float64."""
    matrix = weight[expert] if isinstance(weight, torch.Tensor) else weight.unpack(expert)
    return matrix.double()


def _num_bytes(weight: Any) -> int:
    """Of all experts."""
    if isinstance(weight, torch.Tensor):
        return weight.nbytes
    return int(weight.codes.nbytes + weight.scales.nbytes)


def _route(place: Place, layer: Layer, num_tokens: int) -> Case:
    from tokenmill.kernels.experts import Routing
    from tokenmill.kernels.gpu.moe_routing import route

    logits = place.randn(num_tokens, layer.num_experts, dtype=torch.float32)
    weights = place.poisoned(num_tokens, layer.k, dtype=torch.float32)
    chosen = place.poisoned(num_tokens, layer.k, dtype=torch.int32)
    routing = Routing(layer.k, by_logistic=False, renormalize=True)

    def results() -> Iterator[Result]:
        values, ids = logits.topk(layer.k, dim=1)
        yield chosen, ids.int(), SAME
        yield weights, values.double().softmax(1), SUMMED

    return Case(
        "route",
        f"{num_tokens} tokens, {layer.k} of {layer.num_experts} experts",
        lambda i: route(logits, None, weights, chosen, routing),
        results,
        num_bytes=logits.nbytes + weights.nbytes + chosen.nbytes,
    )


def _align(place: Place, layer: Layer, num_tokens: int) -> Case:
    from tokenmill.kernels.gpu.moe import choose_moe_tile
    from tokenmill.kernels.gpu.moe_order import ExpertOrder, align_experts

    count, num_pairs = layer.num_experts, num_tokens * layer.k
    chosen = _choices(place, layer, num_tokens)
    block_m = choose_moe_tile(num_pairs, count).block_m
    order = ExpertOrder.allocate(num_tokens, layer.k, count, block_m, place.device)
    for tensor in (order.counts, order.pair_of_row, order.row_of_pair, order.tiles):
        tensor.fill_(-7)

    def results() -> Iterator[Result]:
        flat = chosen.flatten()
        by_expert = torch.argsort(flat, stable=True)
        pairs = by_expert[flat[by_expert] >= 0]
        rows = torch.full_like(flat, -1)
        rows[pairs] = torch.arange(len(pairs), dtype=torch.int32, device=place.device)
        counts = torch.bincount(flat[pairs], minlength=count)
        tiles, first = [], 0
        for expert, own in enumerate(counts.tolist()):
            tiles += [(expert, first + i, first + own) for i in range(0, own, block_m)]
            first += own
        yield order.counts, counts, SAME
        yield order.pair_of_row[: len(pairs)], pairs, SAME
        yield order.row_of_pair, rows, SAME
        expected = torch.tensor(tiles, device=place.device).t()
        yield order.tiles[:, : len(tiles)], expected, SAME
        behind = order.tiles[0, len(tiles) :]
        if len(behind):
            yield behind, torch.full_like(behind, -1), SAME

    return Case(
        "align_experts",
        f"{num_tokens} tokens, {layer.k} of {count} experts",
        lambda i: align_experts(chosen, order),
        results,
    )


def _grouped_matmul(
    place: Place, layer: Layer, num_tokens: int, weight: Any, kind: str = "bfloat16"
) -> Case:
    """Gate and up of each token's experts."""
    from tokenmill.kernels.gpu.moe import choose_moe_tile, grouped_matmul
    from tokenmill.kernels.gpu.moe_order import ExpertOrder, align_experts

    (count, num_columns, depth), num_pairs = weight.shape, num_tokens * layer.k
    x = place.randn(num_tokens, depth)
    chosen = _choices(place, layer, num_tokens)
    tile = choose_moe_tile(num_pairs, count)
    order = ExpertOrder.allocate(num_tokens, layer.k, count, tile.block_m, place.device)
    align_experts(chosen, order)
    out = place.poisoned(num_pairs, num_columns)

    def results() -> list[Result]:
        flat = chosen.flatten()
        products = [
            x[(flat == expert).nonzero().flatten() // layer.k].double() @ _plain(weight, expert).t()
            for expert in range(count)
        ]
        expected = torch.cat(products)
        return [(out[: len(expected)], expected, ROUNDED)]

    num_used, num_real = len(chosen[chosen >= 0].unique()), int((chosen >= 0).sum())
    return Case(
        "grouped_matmul",
        f"{num_tokens} tokens, {layer.k} of {count} experts, {num_columns} x {depth}, {kind}",
        lambda i: grouped_matmul(x, weight, order, out, pairs_per_token=layer.k),
        results,
        num_bytes=num_used * _num_bytes(weight) / count + x.nbytes + num_real * num_columns * 2,
        num_flops=2 * num_real * num_columns * depth,
    )


def _experts_mlp(
    place: Place, layer: Layer, num_tokens: int, gate_up: torch.Tensor, down: torch.Tensor
) -> Case:
    from tokenmill.kernels.gpu.moe import MoeBuffers, experts_mlp

    x = place.randn(num_tokens, layer.hidden)
    chosen = _choices(place, layer, num_tokens)
    weights = place.randn(num_tokens, layer.k, dtype=torch.float32).softmax(-1)
    out = place.poisoned(num_tokens, layer.hidden)
    buffers = MoeBuffers.allocate(x, gate_up, down, layer.k)
    for tensor in (buffers.gate_up, buffers.activated, buffers.down):
        tensor.fill_(torch.nan)

    def results() -> Iterator[Result]:
        expected = torch.zeros_like(out, dtype=torch.float64)
        for expert in range(layer.num_experts):
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            gate, up = (x[tokens].double() @ gate_up[expert].double().t()).chunk(2, dim=1)
            product = (functional.silu(gate) * up) @ down[expert].double().t()
            expected.index_add_(0, tokens, product * weights[tokens, places, None].double())
        yield out, expected, MANY_ROUNDED

    num_used, num_real = len(chosen[chosen >= 0].unique()), int((chosen >= 0).sum())
    values = 3 * layer.hidden * layer.intermediate
    return Case(
        "experts_mlp",
        f"{num_tokens} tokens, {layer.k} of {layer.num_experts} experts,"
        f" {layer.hidden} to {layer.intermediate}",
        lambda i: experts_mlp(x, gate_up, down, chosen, weights, out, buffers),
        results,
        num_bytes=num_used * values * 2 + x.nbytes + out.nbytes,
        num_flops=2 * num_real * values,
    )


def _clamped_experts(place: Place, layer: Layer, num_tokens: int) -> Case:
    """All of gpt-oss' layer but the choice: MXFP4, biases, clamped gates."""
    from tokenmill.kernels.experts import ClampedGate
    from tokenmill.kernels.gpu.moe import MoeBuffers, experts_mlp

    gate = ClampedGate(alpha=1.702, limit=7.0)
    gate_up = _packed(place, layer, 2 * layer.intermediate, layer.hidden, "mxfp4")
    down = _packed(place, layer, layer.hidden, layer.intermediate, "mxfp4")
    biases = [
        place.randn(layer.num_experts, size, dtype=torch.float32)
        for size in (2 * layer.intermediate, layer.hidden)
    ]
    x = place.randn(num_tokens, layer.hidden)
    chosen = _choices(place, layer, num_tokens)
    weights = place.randn(num_tokens, layer.k, dtype=torch.float32).softmax(-1)
    out = place.poisoned(num_tokens, layer.hidden)
    buffers = MoeBuffers.allocate(x, gate_up, down, layer.k)
    for tensor in (buffers.gate_up, buffers.activated, buffers.down):
        tensor.fill_(torch.nan)

    def launch(i: int) -> None:
        experts_mlp(
            x, gate_up, down, chosen, weights, out, buffers,
            gate=gate, gate_up_bias=biases[0], down_bias=biases[1],
        )  # fmt: skip

    def results() -> Iterator[Result]:
        expected = torch.zeros_like(out, dtype=torch.float64)
        for expert in range(layer.num_experts):
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            both = x[tokens].double() @ _plain(gate_up, expert).t() + biases[0][expert].double()
            first, up = both.chunk(2, dim=1)
            first, up = first.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
            activated = first * torch.sigmoid(gate.alpha * first) * (up + 1)
            product = activated @ _plain(down, expert).t() + biases[1][expert].double()
            expected.index_add_(0, tokens, product * weights[tokens, places, None].double())
        yield out, expected, MANY_ROUNDED

    num_used, num_real = len(chosen[chosen >= 0].unique()), int((chosen >= 0).sum())
    return Case(
        "experts_mlp",
        f"{num_tokens} tokens, {layer.k} of {layer.num_experts} experts,"
        f" {layer.hidden} to {layer.intermediate}, mxfp4, biases, clamped",
        launch,
        results,
        num_bytes=num_used * (_num_bytes(gate_up) + _num_bytes(down)) / layer.num_experts
        + x.nbytes
        + out.nbytes,
        num_flops=6 * num_real * layer.hidden * layer.intermediate,
    )


def _choices(place: Place, layer: Layer, num_tokens: int) -> torch.Tensor:
    """Different experts of each token; of several tokens the last is padding."""
    scores = place.randn(num_tokens, layer.num_experts, dtype=torch.float32)
    chosen = scores.topk(layer.k, dim=1).indices.int().contiguous()
    if num_tokens > 1:
        chosen[-1] = -1
    return chosen
