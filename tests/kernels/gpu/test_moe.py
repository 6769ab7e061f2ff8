"""Layers of experts: the order of pairs, grouped products, and the whole."""

from __future__ import annotations

import pytest
import torch

from tokenmill.kernels.experts import ClampedGate
from tokenmill.kernels.gpu.float8_experts import Float8Experts
from tokenmill.kernels.gpu.moe import (
    MOE_LARGE,
    MOE_TILES,
    MoeBuffers,
    choose_moe_tile,
    combine_experts,
    experts_mlp,
    experts_mlp_reference,
    grouped_matmul,
)
from tokenmill.kernels.gpu.moe_order import ExpertOrder, align_experts, most_tiles


def random_experts(
    num_tokens: int, k: int, num_experts: int, device: str, *, num_padded: int = 0
) -> torch.Tensor:
    """Different experts for each token; none for the last `num_padded` tokens."""
    chosen = torch.stack(
        [torch.randperm(num_experts)[:k] for _ in range(num_tokens)]
        or [torch.zeros(k, dtype=torch.int64)]
    )[:num_tokens]
    chosen[num_tokens - num_padded :] = -1
    return chosen.to(device=device, dtype=torch.int32)


def align(chosen: torch.Tensor, num_experts: int, block_m: int) -> ExpertOrder:
    order = ExpertOrder.allocate(*chosen.shape, num_experts, block_m, chosen.device)
    for tensor in (order.counts, order.pair_of_row, order.row_of_pair, order.tiles):
        tensor.fill_(-77)
    align_experts(chosen, order)
    return order


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize(
    ("num_tokens", "k", "num_experts", "num_padded"),
    [(1, 1, 1, 0), (1, 2, 8, 0), (7, 2, 5, 3), (40, 4, 6, 0), (3, 3, 60, 3), (700, 2, 3, 1)],
)
def test_pairs_are_in_the_order_of_experts(
    num_tokens: int, k: int, num_experts: int, num_padded: int, block_m: int, device: str
) -> None:
    chosen = random_experts(num_tokens, k, num_experts, device, num_padded=num_padded)
    order = align(chosen, num_experts, block_m)
    flat = chosen.flatten().tolist()
    rows = [pair for expert in range(num_experts) for pair, e in enumerate(flat) if e == expert]
    assert order.pair_of_row[: len(rows)].tolist() == rows
    row_of_pair = [rows.index(pair) if e >= 0 else -1 for pair, e in enumerate(flat)]
    assert order.row_of_pair.tolist() == row_of_pair
    counts = [flat.count(expert) for expert in range(num_experts)]
    assert order.counts.tolist() == counts
    wanted, start = [], 0
    for expert, count in enumerate(counts):
        end = start + count
        wanted += [(expert, first, end) for first in range(start, end, block_m)]
        start = end
    found = order.tiles.t().tolist()
    assert [tuple(tile) for tile in found[: len(wanted)]] == wanted
    assert all(tile[0] == -1 for tile in found[len(wanted) :])


def test_tiles_suffice_for_the_worst_spread() -> None:
    for block_m in (16, 64):
        for num_experts in (1, 3, 8):
            for counts in (
                [1] * num_experts,
                [block_m + 1] * num_experts,
                [0, 5, 16][:num_experts],
            ):
                needed = sum(-(-count // block_m) for count in counts)
                assert needed <= most_tiles(sum(counts), num_experts, block_m)


@pytest.mark.parametrize("of_tokens", [True, False])
@pytest.mark.parametrize(
    "tile", [*(tile for _, tile in MOE_TILES), MOE_LARGE], ids=lambda t: f"{t.block_m}x{t.block_n}"
)
@pytest.mark.parametrize(("num_columns", "depth"), [(70, 96), (128, 130)])
def test_grouped_products(
    num_columns: int, depth: int, tile: object, of_tokens: bool, device: str
) -> None:
    assert hasattr(tile, "block_m")
    num_tokens, k, num_experts = 20, 2, 3
    chosen = random_experts(num_tokens, k, num_experts, device, num_padded=4)
    chosen[:4] = 1  # one expert has several tiles of 16
    order = align(chosen, num_experts, tile.block_m)
    num_rows = num_tokens * k
    x = torch.randn(num_tokens if of_tokens else num_rows, depth).bfloat16().to(device)
    weight = torch.randn(num_experts, num_columns, depth).bfloat16().to(device) / 8
    out = torch.full((num_rows, num_columns), torch.nan, device=device)
    grouped_matmul(x, weight, order, out, pairs_per_token=k if of_tokens else None, tile=tile)
    num_real = (num_tokens - 4) * k
    for row, pair in enumerate(order.pair_of_row[:num_real].tolist()):
        source = x[pair // k if of_tokens else row]
        wanted = weight[chosen.flatten()[pair]].double() @ source.double()
        torch.testing.assert_close(out[row].double(), wanted, rtol=1e-5, atol=1e-4)
    assert out[num_real:].isnan().all()


def test_rows_are_combined_in_order(device: str) -> None:
    chosen = random_experts(9, 3, 5, device, num_padded=2)
    order = align(chosen, 5, 16)
    rows = torch.randn(27, 1100).bfloat16().to(device)
    rows[21:] = torch.nan  # rows of no pair
    weights = torch.rand(9, 3, device=device)
    weights[7:] = torch.nan
    out = torch.full((9, 1100), torch.nan, device=device)
    combine_experts(rows, weights, order, out)
    for token in range(7):
        wanted = torch.zeros(1100, device=device)
        for choice in range(3):
            row = order.row_of_pair[token * 3 + choice]
            wanted += weights[token, choice] * rows[row].float()
        torch.testing.assert_close(out[token], wanted, rtol=1e-6, atol=1e-6)
    assert not out[7:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("num_tokens", "num_padded"), [(0, 0), (1, 0), (5, 0), (24, 7), (2, 2)])
def test_a_layer(num_tokens: int, num_padded: int, dtype: torch.dtype, device: str) -> None:
    x, gate_up, down, chosen, weights = layer(num_tokens, device, dtype, num_padded)
    buffers = MoeBuffers.allocate(x, gate_up, down, 2)
    for tensor in (buffers.gate_up, buffers.activated, buffers.down):
        tensor.fill_(torch.nan)
    out = torch.full_like(x, torch.nan)
    experts_mlp(x, gate_up, down, chosen, weights, out, buffers)
    wanted = torch.empty_like(out)
    experts_mlp_reference(x, gate_up, down, chosen, weights, wanted)
    torch.testing.assert_close(out, wanted, rtol=2**-5, atol=2**-7)


def layer(
    num_tokens: int, device: str, dtype: torch.dtype = torch.bfloat16, num_padded: int = 0
) -> tuple[torch.Tensor, ...]:
    """(x, gate_up, down, chosen, weights) of four experts."""
    x = torch.randn(num_tokens, 64)
    gate_up, down = torch.randn(4, 2 * 40, 64) / 8, torch.randn(4, 64, 40) / 6
    chosen = random_experts(num_tokens, 2, 4, device, num_padded=num_padded)
    moved = [tensor.to(dtype).to(device) for tensor in (x, gate_up, down)]
    return *moved, chosen, torch.rand(num_tokens, 2, device=device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_with_biases_and_clamped_gates(dtype: torch.dtype, device: str) -> None:
    x, gate_up, down, chosen, weights = layer(9, device, dtype, 2)
    extras = {
        "gate": ClampedGate(alpha=1.7, limit=0.8),
        "gate_up_bias": torch.randn(4, 80, device=device),
        "down_bias": torch.randn(4, 64, device=device).bfloat16(),
    }
    out, wanted = torch.full_like(x, torch.nan), torch.empty_like(x)
    buffers = MoeBuffers.allocate(x, gate_up, down, 2)
    for tensor in (buffers.gate_up, buffers.activated, buffers.down):
        tensor.fill_(torch.nan)
    experts_mlp(x, gate_up, down, chosen, weights, out, buffers, **extras)
    experts_mlp_reference(x, gate_up, down, chosen, weights, wanted, **extras)
    torch.testing.assert_close(out, wanted, rtol=2**-5, atol=2**-7)
    without = torch.empty_like(x)
    experts_mlp_reference(x, gate_up, down, chosen, weights, without)
    assert (wanted[:7] - without[:7]).abs().amax(-1).min() > 0.1, "they matter"


@pytest.mark.parametrize("depth", [64, 130])
def test_float8_experts(depth: int, device: str) -> None:
    weight = Float8Experts.empty(3, 70, depth, device)
    for expert in range(3):
        for rows in (slice(0, 30), slice(30, 70)):
            weight.quantize(expert, rows, torch.randn(rows.stop - rows.start, depth) * 9)
    chosen = random_experts(20, 2, 3, device, num_padded=4)
    order = align(chosen, 3, 16)
    x, bias = torch.randn(20, depth).bfloat16().to(device), torch.randn(3, 70, device=device)
    out = torch.full((40, 70), torch.nan, device=device)
    grouped_matmul(x, weight, order, out, bias=bias, pairs_per_token=2)
    for row, pair in enumerate(order.pair_of_row[:32].tolist()):
        expert = int(chosen.flatten()[pair])
        wanted = weight.unpack(expert).double() @ x[pair // 2].double() + bias[expert]
        torch.testing.assert_close(out[row].double(), wanted, rtol=1e-5, atol=1e-3)
    assert out[32:].isnan().all()


def test_a_token_has_the_same_bits_among_others(device: str) -> None:
    x, gate_up, down, chosen, weights = layer(30, device)

    def run(tokens: slice) -> torch.Tensor:
        out = torch.full_like(x[tokens], torch.nan)
        buffers = MoeBuffers.allocate(x[tokens], gate_up, down, 2)
        experts_mlp(x[tokens], gate_up, down, chosen[tokens], weights[tokens], out, buffers)
        return out

    together = run(slice(0, 30))
    assert torch.equal(run(slice(4, 5)), together[4:5])
    assert torch.equal(run(slice(3, 20)), together[3:20])


def test_few_pairs_take_small_tiles() -> None:
    assert choose_moe_tile(8, 128).block_m == 16
    assert choose_moe_tile(8192 * 8, 128) is MOE_LARGE


def test_torch_op(device: str) -> None:
    given = layer(6, device)
    outs = [torch.full_like(given[0], torch.nan) for _ in range(2)]
    torch.ops.tokenmill.experts_mlp(*given, outs[0])
    experts_mlp_reference(*given, outs[1])
    torch.testing.assert_close(*outs, rtol=2**-5, atol=2**-7)
