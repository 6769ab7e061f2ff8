"""Norms, activations, rotation with the KV write, rows as float8."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpucheck.cases.case import BF16, CODES, ROUNDED, SAME, Case, Place

FP8 = torch.float8_e4m3fn
EPS = 1e-5


def cases(place: Place) -> Iterator[Case]:
    size, inner = (48, 80) if place.small else (4_096, 14_336)
    for num_rows in place.pick([1, 256, 8_192], [3]):
        yield _add_rms_norm(place, num_rows, size)
        yield _add_layer_norm(place, num_rows, size)
        yield _gated_activation(place, num_rows, inner)
        yield _clamped_gate(place, num_rows, inner)
        yield _activation(place, num_rows, inner)
        yield _rotate_and_write_kv(place, num_rows, BF16)
    for num_rows in place.pick([256, 8_192], [3]):
        yield _add_rms_norm_quantize(place, num_rows, size)
        yield _gated_activation_quantize(place, num_rows, inner)
        yield _quantize_rows(place, num_rows, size)
        yield _rotate_and_write_kv(place, num_rows, FP8)
        yield _write_kv(place, num_rows)


def _values(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return codes.double() * scale.double().unsqueeze(-1)


def _normed(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    total = (x.float() + residual).double()
    return total * (total.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


def _add_rms_norm(place: Place, num_rows: int, size: int) -> Case:
    from tokenmill.kernels.gpu.norm import add_rms_norm

    sets = place.sets(num_rows * size * 12)
    x, weight = [place.randn(num_rows, size) for _ in sets], place.randn(size, dtype=torch.float32)
    residual = [place.randn(num_rows, size, dtype=torch.float32) for _ in sets]
    out = place.poisoned(num_rows, size)
    before = residual[0].clone()

    def launch(i: int) -> None:
        add_rms_norm(x[i % len(x)], residual[i % len(x)], weight, EPS, out)

    def results() -> list[tuple[torch.Tensor, torch.Tensor, float]]:
        return [
            (out, _normed(x[0], before, weight), ROUNDED),
            (residual[0], x[0].float() + before, SAME),
        ]

    return Case("add_rms_norm", f"{num_rows} x {size}", launch, results, num_rows * size * 12)


def _add_layer_norm(place: Place, num_rows: int, size: int) -> Case:
    from tokenmill.kernels.gpu.norm import add_layer_norm

    sets = place.sets(num_rows * size * 12)
    x = [place.randn(num_rows, size) for _ in sets]
    weight, bias = (place.randn(size, dtype=torch.float32) for _ in range(2))
    residual = [place.randn(num_rows, size, dtype=torch.float32) + 1 for _ in sets]
    out = place.poisoned(num_rows, size)
    before = residual[0].clone()

    def launch(i: int) -> None:
        add_layer_norm(x[i % len(x)], residual[i % len(x)], weight, bias, EPS, out)

    def results() -> list[tuple[torch.Tensor, torch.Tensor, float]]:
        total = x[0].float() + before
        normed = torch.nn.functional.layer_norm(
            total.double(), (size,), weight.double(), bias.double(), EPS
        )
        return [(out, normed, ROUNDED), (residual[0], total, SAME)]

    return Case("add_layer_norm", f"{num_rows} x {size}", launch, results, num_rows * size * 12)


def _add_rms_norm_quantize(place: Place, num_rows: int, size: int) -> Case:
    from tokenmill.kernels.gpu.norm import add_rms_norm_quantize

    sets = place.sets(num_rows * size * 11)
    x, weight = [place.randn(num_rows, size) for _ in sets], place.randn(size, dtype=torch.float32)
    residual = [place.randn(num_rows, size, dtype=torch.float32) for _ in sets]
    out, scale = (
        place.poisoned(num_rows, size, dtype=FP8),
        place.poisoned(num_rows, dtype=torch.float32),
    )
    before = residual[0].clone()

    def launch(i: int) -> None:
        add_rms_norm_quantize(x[i % len(x)], residual[i % len(x)], weight, EPS, out, scale)

    return Case(
        "add_rms_norm_quantize",
        f"{num_rows} x {size}",
        launch,
        lambda: [(_values(out, scale), _normed(x[0], before, weight), CODES)],
        num_rows * size * 11,
    )


def _activated(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def _gated_activation(place: Place, num_rows: int, size: int) -> Case:
    from tokenmill.kernels.gpu.activation import gated_activation

    gate_up = [place.randn(num_rows, 2 * size) for _ in place.sets(num_rows * size * 6)]
    out = place.poisoned(num_rows, size)
    return Case(
        "gated_activation",
        f"silu {num_rows} x {size}",
        lambda i: gated_activation(gate_up[i % len(gate_up)], "silu", out),
        lambda: [(out, _activated(gate_up[0]), ROUNDED)],
        num_rows * size * 6,
    )


def _clamped_gate(place: Place, num_rows: int, size: int) -> Case:
    from tokenmill.kernels.experts import ClampedGate
    from tokenmill.kernels.gpu.activation import gated_activation

    gate = ClampedGate(alpha=1.702, limit=1.0)
    gate_up = [place.randn(num_rows, 2 * size) for _ in place.sets(num_rows * size * 6)]
    out = place.poisoned(num_rows, size)

    def results() -> list[tuple[torch.Tensor, torch.Tensor, float]]:
        first, up = gate_up[0].double().chunk(2, -1)
        first, up = first.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
        return [(out, first * torch.sigmoid(gate.alpha * first) * (up + 1), ROUNDED)]

    return Case(
        "gated_activation",
        f"clamped {num_rows} x {size}",
        lambda i: gated_activation(gate_up[i % len(gate_up)], gate, out),
        results,
        num_rows * size * 6,
    )


def _activation(place: Place, num_rows: int, size: int) -> Case:
    from tokenmill.kernels.gpu.activation import activation

    x = [place.randn(num_rows, size) for _ in place.sets(num_rows * size * 4)]
    out = place.poisoned(num_rows, size)
    return Case(
        "activation",
        f"gelu_tanh {num_rows} x {size}",
        lambda i: activation(x[i % len(x)], "gelu_tanh", out),
        lambda: [
            (out, torch.nn.functional.gelu(x[0].double(), approximate="tanh"), ROUNDED),
        ],
        num_rows * size * 4,
    )


def _gated_activation_quantize(place: Place, num_rows: int, size: int) -> Case:
    from tokenmill.kernels.gpu.activation import gated_activation_quantize

    gate_up = [place.randn(num_rows, 2 * size) for _ in place.sets(num_rows * size * 5)]
    out, scale = (
        place.poisoned(num_rows, size, dtype=FP8),
        place.poisoned(num_rows, dtype=torch.float32),
    )
    return Case(
        "gated_activation_quantize",
        f"silu {num_rows} x {size}",
        lambda i: gated_activation_quantize(gate_up[i % len(gate_up)], "silu", out, scale),
        lambda: [(_values(out, scale), _activated(gate_up[0]), CODES)],
        num_rows * size * 5,
    )


def _quantize_rows(place: Place, num_rows: int, size: int) -> Case:
    from tokenmill.kernels.gpu.row_quantization import quantize_rows

    x = [place.randn(num_rows, size) for _ in place.sets(num_rows * size * 3)]
    out, scale = (
        place.poisoned(num_rows, size, dtype=FP8),
        place.poisoned(num_rows, dtype=torch.float32),
    )
    return Case(
        "quantize_rows",
        f"{num_rows} x {size}",
        lambda i: quantize_rows(x[i % len(x)], out, scale),
        lambda: [(_values(out, scale), x[0].double(), CODES)],
        num_rows * size * 3,
    )


def _cache(
    place: Place, num_tokens: int, cache_type: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache of NaN, and slots in random order behind block 0, the last token without one."""
    heads, head_size, block_size = (2, 16, 4) if place.small else (8, 128, 64)
    num_blocks = num_tokens // block_size + 2
    shape = (num_blocks, 2, block_size, heads, head_size)
    cache = torch.full(shape, torch.nan, device=place.device).to(cache_type)
    slots = torch.randperm(num_tokens, device=place.device) + block_size
    if num_tokens > 1:
        slots[-1] = -1
    return cache, slots


def _in_slots(cache: torch.Tensor, slots: torch.Tensor, which: int) -> torch.Tensor:
    """What a cache holds in these slots, [tokens, heads * head_size]."""
    real = slots[slots >= 0]
    return cache.float()[:, which].flatten(0, 1)[real].flatten(1)


def _written_elsewhere(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Number of values outside the slots that are not NaN any more, int64 [1]."""
    untouched = torch.ones(cache.shape[0] * cache.shape[2], dtype=torch.bool, device=cache.device)
    untouched[slots[slots >= 0]] = False
    values = cache.float().transpose(1, 2).flatten(0, 1)
    return (~values[untouched].isnan()).sum().view(1)


def _rotate_and_write_kv(place: Place, num_tokens: int, cache_type: torch.dtype) -> Case:
    from tokenmill.kernels.gpu.rope_kv import rotate_and_write_kv

    num_heads, num_kv_heads, head_size = (4, 2, 16) if place.small else (32, 8, 128)
    length = 64 if place.small else 8_192
    cache, slots = _cache(place, num_tokens, cache_type)
    width = (num_heads + 2 * num_kv_heads) * head_size
    qkv = [place.randn(num_tokens, width) for _ in place.sets(num_tokens * width * 4)]
    sizes = [num_heads * head_size, num_kv_heads * head_size, num_kv_heads * head_size]
    parts = [each.split(sizes, -1) for each in qkv]
    positions = place.integers(length, num_tokens, dtype=torch.int64)
    angles = torch.arange(length, device=place.device)[:, None] * (
        500_000.0 ** (-torch.arange(0, head_size, 2, device=place.device) / head_size)
    )
    cos, sin = angles.cos().float(), angles.sin().float()
    query_out = place.poisoned(num_tokens, sizes[0])
    k_scale, v_scale = (0.05, 0.04) if cache_type == FP8 else (1.0, 1.0)

    def launch(i: int) -> None:
        query, key, value = parts[i % len(parts)]
        rotate_and_write_kv(
            query, key, value, positions, cos, sin, cache, slots, query_out, k_scale, v_scale
        )

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.double().unflatten(1, (-1, head_size)).chunk(2, -1)
        c, s = cos[positions].double().unsqueeze(1), sin[positions].double().unsqueeze(1)
        return torch.cat([first * c - second * s, second * c + first * s], -1).flatten(1)

    def results() -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
        query, key, value = parts[0]
        tolerance = CODES if cache_type == FP8 else ROUNDED
        real = slots >= 0
        yield query_out, rotated(query), ROUNDED
        yield _in_slots(cache, slots, 0) * k_scale, rotated(key)[real], tolerance
        yield _in_slots(cache, slots, 1) * v_scale, value[real], tolerance
        yield _written_elsewhere(cache, slots), torch.zeros_like(slots[:1]), SAME

    return Case(
        "rotate_and_write_kv",
        f"{num_tokens} tokens, {num_heads}:{num_kv_heads} x {head_size}, {_named(cache_type)}",
        launch,
        results,
        num_tokens * (2 * width + 2 * sizes[0] + 2 * sizes[1] * cache_type.itemsize),
    )


def _write_kv(place: Place, num_tokens: int) -> Case:
    from tokenmill.kernels.gpu.rope_kv import write_kv

    cache, slots = _cache(place, num_tokens, BF16)
    size = cache.shape[3] * cache.shape[4]
    pairs = [place.randn(num_tokens, 2 * size) for _ in place.sets(num_tokens * size * 8)]

    def launch(i: int) -> None:
        key, value = pairs[i % len(pairs)].chunk(2, -1)
        write_kv(key, value, cache, slots)

    def results() -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
        for which, expected in enumerate(pairs[0].chunk(2, -1)):
            yield _in_slots(cache, slots, which), expected[slots >= 0], SAME
        yield _written_elsewhere(cache, slots), torch.zeros_like(slots[:1]), SAME

    return Case("write_kv", f"{num_tokens} x {size}", launch, results, num_tokens * size * 8)


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
