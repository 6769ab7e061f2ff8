"""Experts in four bits: how they are packed, and their grouped product."""

from __future__ import annotations

import pytest
import torch

from tokenmill.checkpoint.checkpoint import RawTensor
from tokenmill.kernels.experts import ClampedGate
from tokenmill.kernels.gpu.four_bit_experts import FourBitExperts
from tokenmill.kernels.gpu.int4 import int4_codes
from tokenmill.kernels.gpu.moe import MoeBuffers, experts_mlp, experts_mlp_reference, grouped_matmul
from tokenmill.kernels.gpu.moe_four_bit import (
    TILES,
    grouped_matmul_four_bit,
    grouped_matmul_four_bit_reference,
)
from tokenmill.kernels.gpu.moe_order import ExpertOrder, align_experts
from tokenmill.quantization.dequantize import dequantize

FORMATS = pytest.mark.parametrize("is_mxfp4", [True, False], ids=["mxfp4", "int4"])


def random_experts(
    num_experts: int, num_columns: int, depth: int, device: str, *, is_mxfp4: bool
) -> FourBitExperts:
    """In two parts of rows, in memory that held something else before."""
    experts = FourBitExperts.empty(num_experts, num_columns, depth, device, is_mxfp4=is_mxfp4)
    experts.codes.fill_(0xA5)
    experts.scales.fill_(77)
    for expert in range(num_experts):
        for rows in (slice(0, num_columns // 3), slice(num_columns // 3, num_columns)):
            count = rows.stop - rows.start
            if is_mxfp4:
                codes = torch.randint(16, (count, depth), dtype=torch.uint8)
                exponents = torch.randint(121, 127, (count, -(-depth // 32)), dtype=torch.uint8)
                experts.pack_mxfp4(expert, rows, codes, exponents)
            else:
                experts.pack_int4(expert, rows, *int4_codes(torch.randn(count, depth) / 8, 32))
    return experts


def test_mxfp4_is_kept() -> None:
    """Every code and every exponent but 0 and those of NaN, as the file's format has them."""
    blocks = torch.randint(256, (24, 9, 17), dtype=torch.uint8)
    blocks[..., 0] = torch.arange(1, 1 + 24 * 9).view(24, 9)
    raw = RawTensor((24, 9 * 32), "MXFP4", blocks.view(-1))
    experts = FourBitExperts.empty(2, 24, 9 * 32, "cpu", is_mxfp4=True)
    codes = torch.cat([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], dim=-1).flatten(1)
    experts.pack_mxfp4(1, slice(0, 24), codes, blocks[..., 0])
    assert torch.equal(experts.unpack(1), dequantize(raw, torch.bfloat16))
    experts.scales.zero_()
    assert not experts.unpack(1).any()


@FORMATS
def test_parts_of_rows_go_to_their_places(is_mxfp4: bool) -> None:
    experts = random_experts(2, 30, 96, "cpu", is_mxfp4=is_mxfp4)
    other = FourBitExperts.empty(1, 30, 96, "cpu", is_mxfp4=is_mxfp4)
    other.codes.copy_(experts.codes[1:])
    other.scales.copy_(experts.scales[1:])
    assert experts.shape == (2, 30, 96)
    assert len(experts) == 2
    assert torch.equal(other.unpack(0), experts.unpack(1))
    assert not torch.equal(experts.unpack(0), experts.unpack(1))


def ordered(chosen: torch.Tensor, num_experts: int, block_m: int) -> ExpertOrder:
    order = ExpertOrder.allocate(*chosen.shape, num_experts, block_m, chosen.device)
    align_experts(chosen, order)
    return order


def choices(num_tokens: int, device: str) -> torch.Tensor:
    """Two of three experts each; one has several tiles of 16, and the last tokens have none."""
    chosen = torch.stack([torch.randperm(3)[:2] for _ in range(num_tokens)])
    chosen[: num_tokens // 2, 0] = 1
    chosen[: num_tokens // 2, 1] = 2
    chosen[num_tokens - 2 :] = -1
    return chosen.to(device=device, dtype=torch.int32)


@FORMATS
@pytest.mark.parametrize("block_m", TILES)
@pytest.mark.parametrize(("num_columns", "depth", "of_tokens"), [(70, 96, True), (128, 160, False)])
def test_grouped_products(
    num_columns: int, depth: int, of_tokens: bool, block_m: int, is_mxfp4: bool, device: str
) -> None:
    experts = random_experts(3, num_columns, depth, device, is_mxfp4=is_mxfp4)
    chosen = choices(40, device)
    order = ordered(chosen, 3, block_m)
    x = torch.randn(40 if of_tokens else 80, depth).bfloat16().to(device)
    bias = torch.randn(3, num_columns, device=device) if of_tokens else None
    per_token = 2 if of_tokens else None
    out, wanted = (torch.full((80, num_columns), torch.nan, device=device) for _ in range(2))
    grouped_matmul_four_bit(x, experts, order, out, bias=bias, pairs_per_token=per_token)
    grouped_matmul_four_bit_reference(
        x, experts, order, wanted, bias=bias, pairs_per_token=per_token
    )
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-3, equal_nan=True)
    assert wanted[76:].isnan().all(), "rows of no pair are not written"
    pair = int(order.pair_of_row[0])
    source = x[pair // 2 if of_tokens else 0]
    product = experts.unpack(0).double() @ source.double()
    product = product if bias is None else product + bias[0].double()
    torch.testing.assert_close(wanted[0].double(), product, rtol=1e-5, atol=1e-4)


@FORMATS
def test_a_layer_has_the_same_bits_in_any_batch(is_mxfp4: bool, device: str) -> None:
    gate_up = random_experts(3, 2 * 40, 64, device, is_mxfp4=is_mxfp4)
    down = random_experts(3, 64, 40, device, is_mxfp4=is_mxfp4)
    chosen, weights = choices(40, device), torch.rand(40, 2, device=device)
    x = torch.randn(40, 64).bfloat16().to(device) / 8
    extras = {"gate": ClampedGate(1.7, 0.8), "gate_up_bias": torch.randn(3, 80, device=device)}

    def run(tokens: slice) -> torch.Tensor:
        out = torch.full_like(x[tokens], torch.nan)
        buffers = MoeBuffers.allocate(x[tokens], gate_up, down, 2)
        for tensor in (buffers.gate_up, buffers.activated, buffers.down):
            tensor.fill_(torch.nan)
        experts_mlp(
            x[tokens], gate_up, down, chosen[tokens], weights[tokens], out, buffers, **extras
        )
        return out

    together = run(slice(0, 40))
    plain = [torch.stack([each.unpack(e) for e in range(3)]) for each in (gate_up, down)]
    wanted = torch.empty_like(x)
    experts_mlp_reference(x, *plain, chosen, weights, wanted, **extras)
    torch.testing.assert_close(together, wanted, rtol=2**-5, atol=2**-5)
    assert torch.equal(run(slice(4, 5)), together[4:5])
    assert torch.equal(run(slice(3, 20)), together[3:20])


def test_no_tokens(device: str) -> None:
    experts = random_experts(2, 16, 32, device, is_mxfp4=True)
    order = ExpertOrder.allocate(0, 2, 2, 16, device)
    x = torch.empty(0, 32, dtype=torch.bfloat16, device=device)
    grouped_matmul(x, experts, order, x.new_empty(0, 16), pairs_per_token=2)
