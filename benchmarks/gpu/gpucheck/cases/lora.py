"""Low-rank adapters beside the merged q, k and v of an 8-billion-parameter Llama."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpucheck.cases.case import MANY_ROUNDED, SUMMED, Case, Place, Result

NUM_SLOTS = 4


def cases(place: Place) -> Iterator[Case]:
    depth, slices = (600, (72, 40, 8)) if place.small else (4_096, (4_096, 1_024, 1_024))
    for rank in place.pick([16, 64], [8]):
        for num_rows in place.pick([1, 64, 1_024], [19]):
            yield _shrink(place, num_rows, depth, len(slices) * rank)
            yield _expand(place, num_rows, depth, slices, rank)


def _shrink(place: Place, num_rows: int, depth: int, rank: int) -> Case:
    from tokenmill.kernels.gpu.lora import lora_shrink, segment_depth, shrink_segments

    x = place.randn(num_rows, depth)
    a = [place.randn(NUM_SLOTS, rank, depth) for _ in place.sets(NUM_SLOTS * rank * depth * 2)]
    slot_of_row = _slots(place, num_rows)
    out = place.poisoned(shrink_segments(depth), num_rows, rank, dtype=torch.float32)

    def results() -> Iterator[Result]:
        expected = torch.zeros_like(out, dtype=torch.float64)
        size = segment_depth(depth)
        for slot in range(NUM_SLOTS):
            own = slot_of_row == slot
            parts = zip(x[own].split(size, 1), a[0][slot].split(size, 1), strict=True)
            for segment, (left, right) in enumerate(parts):
                expected[segment, own] = left.double() @ right.double().t()
        yield out, expected, SUMMED

    return Case(
        "lora_shrink",
        f"{num_rows} x {rank} x {depth}",
        lambda i: lora_shrink(x, a[i % len(a)], slot_of_row, out),
        results,
        num_bytes=x.nbytes + min(num_rows, NUM_SLOTS) * rank * depth * 2 + out.nbytes,
        num_flops=2 * num_rows * rank * depth,
    )


def _expand(place: Place, num_rows: int, depth: int, slices: tuple[int, ...], rank: int) -> Case:
    from tokenmill.kernels.gpu.lora import lora_expand, shrink_segments

    width = sum(slices)
    shape = (shrink_segments(depth), num_rows, len(slices) * rank)
    shrunk = place.randn(*shape, dtype=torch.float32)
    b = [place.randn(NUM_SLOTS, width, rank) for _ in place.sets(NUM_SLOTS * width * rank * 2)]
    scale = place.randn(NUM_SLOTS, dtype=torch.float32).abs() + 0.5
    slot_of_row = _slots(place, num_rows)
    out = place.randn(num_rows, width)
    expected = out.double()

    def results() -> Iterator[Result]:
        low = shrunk.double().sum(0).split(rank, 1)
        for slot in range(NUM_SLOTS):
            own = slot_of_row == slot
            weights = b[0][slot].double().split(slices)
            change = [part[own] @ weight.t() for part, weight in zip(low, weights, strict=True)]
            expected[own] += scale[slot].double() * torch.cat(change, dim=1)
        yield out, expected, MANY_ROUNDED

    return Case(
        "lora_expand",
        f"{num_rows} x {'+'.join(map(str, slices))} x {rank}",
        lambda i: lora_expand(shrunk, b[i % len(b)], slot_of_row, scale, out, slices=slices),
        results,
        num_bytes=shrunk.nbytes + min(num_rows, NUM_SLOTS) * width * rank * 2 + 2 * out.nbytes,
        num_flops=2 * num_rows * width * rank,
    )


def _slots(place: Place, num_rows: int) -> torch.Tensor:
    """Adapters in turn, so that neighbours differ; of several rows the last has none."""
    slots = torch.arange(num_rows, dtype=torch.int32, device=place.device) % NUM_SLOTS
    if num_rows > 1:
        slots[-1] = -1
    return slots
