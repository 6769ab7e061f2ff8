"""Adapters: rows of several and of none in one batch, merged projections, padding."""

from __future__ import annotations

import pytest
import torch

from tokenmill.kernels.gpu.lora import (
    lora_expand,
    lora_expand_reference,
    lora_shrink,
    lora_shrink_reference,
    segment_depth,
    shrink_segments,
)

NUM_SLOTS = 5
SLOTS = {
    "none": lambda n: torch.full((n,), -1),
    "one": lambda n: torch.full((n,), 3),
    "alternating": lambda n: torch.arange(n) % NUM_SLOTS,
    "mixed": lambda n: torch.randint(-1, NUM_SLOTS, (n,)),
    "padded": lambda n: torch.where(torch.arange(n) < n // 2, 1, -1),
}


def values(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape).to(dtype).to(device)


def slots_of(kind: str, num_rows: int, device: str) -> torch.Tensor:
    return SLOTS[kind](num_rows).to(device=device, dtype=torch.int32)


def shrink(x: torch.Tensor, a: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    shape = (shrink_segments(x.shape[1]), len(x), a.shape[1])
    out = torch.full(shape, torch.nan, device=x.device)
    lora_shrink(x, a, slots, out)
    return out


@pytest.mark.parametrize("kind", SLOTS)
@pytest.mark.parametrize(
    ("num_rows", "rank", "depth"),
    [(0, 8, 64), (1, 1, 1), (3, 16, 130), (20, 48, 1100), (33, 70, 200)],
)
def test_shrink(num_rows: int, rank: int, depth: int, kind: str, device: str) -> None:
    x = values(num_rows, depth + 8, device=device)[:, :depth]
    a = values(NUM_SLOTS, rank, depth, device=device) / depth**0.5
    slots = slots_of(kind, num_rows, device)
    out = shrink(x, a, slots)
    wanted = torch.empty_like(out)
    lora_shrink_reference(x, a, slots, wanted)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", SLOTS)
@pytest.mark.parametrize(
    ("num_rows", "rank", "slices"),
    [(0, 8, (40,)), (1, 1, (1,)), (18, 16, (130,)), (20, 8, (70, 30, 64)), (5, 33, (64, 20))],
)
def test_expand(num_rows: int, rank: int, slices: tuple[int, ...], kind: str, device: str) -> None:
    num_columns = sum(slices)
    shrunk = values(3, num_rows, len(slices) * rank, device=device, dtype=torch.float32)
    # Exact in bfloat16, as is their sum: the reference does not round it.
    shrunk = (shrunk * 4).round() / 4
    b = values(NUM_SLOTS, num_columns, rank, device=device)
    slots = slots_of(kind, num_rows, device)
    scale = values(NUM_SLOTS, device=device, dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float32):
        wide = values(num_rows, num_columns + 5, device=device, dtype=dtype)
        wanted = wide.clone()
        lora_expand_reference(shrunk, b, slots, scale, wanted[:, :num_columns], slices=slices)
        lora_expand(shrunk, b, slots, scale, wide[:, :num_columns], slices=slices)
        tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(wide, wanted, rtol=tolerance, atol=tolerance)
        assert torch.equal(wide[slots < 0], wanted[slots < 0])
        assert torch.equal(wide[:, num_columns:], wanted[:, num_columns:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_both_are_the_adapters_change(dtype: torch.dtype, device: str) -> None:
    x = values(9, 96, device=device, dtype=dtype)
    slots = torch.tensor([2, -1, 0, 0, 4, 2, -1, 1, 3], dtype=torch.int32, device=device)
    a = values(NUM_SLOTS, 2 * 4, 96, device=device, dtype=dtype) / 10
    b = values(NUM_SLOTS, 40 + 24, 4, device=device, dtype=dtype)
    scale = torch.tensor([1.0, 0.5, 2.0, -1.0, 0.25], device=device)
    base = values(9, 64, device=device, dtype=torch.float32)
    out = base.clone()
    lora_expand(shrink(x, a, slots), b, slots, scale, out, slices=(40, 24))
    for row, slot in enumerate(slots.tolist()):
        change = torch.zeros(64, device=device)
        if slot >= 0:
            low = a[slot].float() @ x[row].float()
            change = scale[slot] * torch.cat(
                [b[slot, :40].float() @ low[:4], b[slot, 40:].float() @ low[4:]]
            )
        torch.testing.assert_close(out[row] - base[row], change, rtol=2**-6, atol=2**-6)


def test_a_row_has_the_same_bits_among_others(device: str) -> None:
    x = values(40, 1100, device=device)
    a = values(NUM_SLOTS, 16, 1100, device=device)
    b = values(NUM_SLOTS, 70, 16, device=device)
    scale = torch.ones(NUM_SLOTS, device=device)
    slots = slots_of("mixed", 40, device)
    slots[7] = 2

    def change(rows: slice, slots: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(len(slots), 70, device=device)
        lora_expand(shrink(x[rows], a, slots), b, slots, scale, out)
        return out

    together = change(slice(0, 40), slots)
    assert torch.equal(change(slice(7, 8), slots[7:8])[0], together[7])
    others = torch.full_like(slots, -1)
    others[7] = 2
    assert torch.equal(change(slice(0, 40), others)[7], together[7])


def test_segments_cover_the_depth() -> None:
    for depth in (1, 512, 513, 4096, 14336, 28672):
        assert shrink_segments(depth) <= 8
        assert shrink_segments(depth) * segment_depth(depth) >= depth
        assert segment_depth(depth) % 128 == 0
    assert shrink_segments(4096) == 8


def test_torch_ops(device: str) -> None:
    x, a = values(4, 64, device=device), values(NUM_SLOTS, 8, 64, device=device)
    b = values(NUM_SLOTS, 20, 8, device=device)
    slots = slots_of("alternating", 4, device)
    scale = torch.ones(NUM_SLOTS, device=device)
    shrunk = torch.full((1, 4, 8), torch.nan, device=device)
    torch.ops.tokenmill.lora_shrink(x, a, slots, shrunk)
    torch.testing.assert_close(shrunk, shrink(x, a, slots), rtol=1e-4, atol=1e-4)
    outs = [torch.zeros(4, 20, device=device) for _ in range(2)]
    torch.ops.tokenmill.lora_expand(shrunk, b, slots, scale, outs[0], [20])
    lora_expand(shrunk, b, slots, scale, outs[1])
    torch.testing.assert_close(*outs, rtol=2**-6, atol=2**-4)
