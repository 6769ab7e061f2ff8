"""Rotation and the KV write, against a float64 rotation of complex numbers and a loop of slots."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tokenmill.kernels.gpu.rope_kv import (
    rotate_and_write_kv,
    rotate_and_write_kv_reference,
    write_kv,
    write_kv_reference,
)

NAN = float("nan")
FLOAT8 = torch.float8_e4m3fn
ROUNDING = {torch.float32: 2**-19, torch.float16: 2**-10, torch.bfloat16: 2**-7}
MAX_LEN, NUM_BLOCKS = 50, 9


@dataclass
class Heads:
    """A model's heads. The cases have padded tiles on every axis."""

    query: int
    kv: int
    size: int
    rotary_dim: int


CASES = [
    Heads(1, 1, 16, 16),
    Heads(4, 2, 64, 64),
    Heads(12, 3, 32, 32),
    Heads(3, 3, 80, 32),  # partial rotation, nothing a power of two
    Heads(20, 10, 128, 128),  # several programs for each token
    Heads(2, 1, 24, 22),
]


@dataclass
class Step:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    angles: torch.Tensor
    kv_cache: torch.Tensor
    slot_mapping: torch.Tensor


def make_step(
    heads: Heads,
    num_tokens: int,
    device: str,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    block_size: int = 4,
) -> Step:
    """Query, key and value are parts of the rows of one projection; every third token is padded."""
    widths = [heads.query * heads.size, heads.kv * heads.size, heads.kv * heads.size]
    rows = torch.randn(num_tokens, sum(widths), device=device).to(dtype)
    query, key, value = rows.split(widths, dim=1)
    angles = torch.rand(MAX_LEN, heads.rotary_dim // 2, device=device, dtype=torch.float64) * 6.3
    slots = torch.randperm((NUM_BLOCKS - 1) * block_size, device=device)[:num_tokens] + block_size
    assert len(slots) == num_tokens
    slots[::3] = -1
    cache = torch.full((NUM_BLOCKS, 2, block_size, heads.kv, heads.size), NAN, device=device).to(
        cache_dtype or dtype
    )
    return Step(
        query=query,
        key=key,
        value=value,
        positions=torch.randint(0, MAX_LEN, (num_tokens,), device=device),
        cos=angles.cos().float(),
        sin=angles.sin().float(),
        angles=angles,
        kv_cache=cache,
        slot_mapping=slots,
    )


def rotated(x: torch.Tensor, step: Step, heads: Heads) -> torch.Tensor:
    """Pairs of elements as complex numbers, turned by an angle; float64 [N, heads, size]."""
    x = x.double().unflatten(1, (-1, heads.size))
    half = heads.rotary_dim // 2
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half])
    angle = step.angles[step.positions].unsqueeze(1)
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], dim=-1)


def assert_cached(
    step: Step, keys: torch.Tensor, values: torch.Tensor, rtol: float, step_size: float = 0.0
) -> None:
    """Slots hold their tokens' keys and values [N, heads, size]; all else is still NaN."""
    expected = torch.full(step.kv_cache.shape, NAN, device=keys.device, dtype=torch.float64)
    block_size = expected.shape[2]
    for token, slot in enumerate(step.slot_mapping.tolist()):
        if slot >= 0:
            expected[slot // block_size, 0, slot % block_size] = keys[token]
            expected[slot // block_size, 1, slot % block_size] = values[token]
    torch.testing.assert_close(
        step.kv_cache.double(), expected, rtol=rtol, atol=1e-5 + step_size, equal_nan=True
    )


@pytest.mark.parametrize("heads", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_rotation_and_write(device: str, heads: Heads, dtype: torch.dtype, num_tokens: int) -> None:
    step = make_step(heads, num_tokens, device, dtype)
    out = torch.full((num_tokens, heads.query * heads.size + 8), NAN, device=device, dtype=dtype)
    query_out = out[:, : heads.query * heads.size]
    rotate_and_write_kv(
        step.query, step.key, step.value, step.positions, step.cos, step.sin, step.kv_cache,
        step.slot_mapping, query_out,
    )  # fmt: skip
    rounding = ROUNDING[dtype]
    expected = rotated(step.query, step, heads)
    torch.testing.assert_close(
        query_out.double().view(expected.shape), expected, rtol=rounding, atol=1e-5
    )
    assert out[:, heads.query * heads.size :].isnan().all(), "written past a row's end"
    values = step.value.double().unflatten(1, (-1, heads.size))
    assert_cached(step, rotated(step.key, step, heads), values, rounding)


@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_bits_of_the_reference(device: str, dtype: torch.dtype) -> None:
    """Rounded once: in the 16-bit dtypes a fused multiply-add seldom shows, another order would."""
    heads = Heads(4, 2, 32, 32)
    step = make_step(heads, 20, device, dtype)
    results = []
    for function in (rotate_and_write_kv, rotate_and_write_kv_reference):
        query_out = torch.full(step.query.shape, NAN, device=device, dtype=dtype)
        cache = torch.zeros_like(step.kv_cache)
        function(
            step.query, step.key, step.value, step.positions, step.cos, step.sin, cache,
            step.slot_mapping, query_out,
        )  # fmt: skip
        results.append(torch.cat([query_out.flatten(), cache.flatten()]))
    difference = (results[0].double() - results[1].double()).abs()
    if dtype == torch.float32:
        assert difference.max() < 1e-6
    else:
        assert (difference != 0).double().mean() < 2e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
def test_another_cache_dtype(device: str, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    heads = Heads(4, 2, 32, 32)
    step = make_step(heads, 11, device, dtype, cache_dtype, block_size=5)
    query_out = torch.full(step.query.shape, NAN, device=device, dtype=dtype)
    rotate_and_write_kv(
        step.query, step.key, step.value, step.positions, step.cos, step.sin, step.kv_cache,
        step.slot_mapping, query_out,
    )  # fmt: skip
    values = step.value.double().unflatten(1, (-1, heads.size))
    rounding = max(ROUNDING[dtype], ROUNDING[cache_dtype])
    assert_cached(step, rotated(step.key, step, heads), values, rounding)


def test_float8_cache_scales_and_saturates(device: str) -> None:
    heads = Heads(4, 2, 32, 16)
    step = make_step(heads, 13, device, torch.bfloat16, FLOAT8)
    step.value[1] *= 500.0
    k_scale, v_scale = 0.01, 0.3
    query_out = torch.full(step.query.shape, NAN, device=device).bfloat16()
    rotate_and_write_kv(
        step.query, step.key, step.value, step.positions, step.cos, step.sin, step.kv_cache,
        step.slot_mapping, query_out, k_scale, v_scale,
    )  # fmt: skip
    assert step.kv_cache.float().nan_to_num(0.0).abs().max() == 448.0
    keys = (rotated(step.key, step, heads) / k_scale).clamp(-448.0, 448.0)
    values = step.value.double().unflatten(1, (-1, heads.size)) / v_scale
    # Half a step of float8, and what rounding to bfloat16 before it adds; then the subnormals.
    assert_cached(step, keys, values.clamp(-448.0, 448.0), 2**-4 + 2**-8, step_size=2**-10)


@pytest.mark.parametrize("heads", CASES, ids=str)
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FLOAT8])
@pytest.mark.parametrize("num_tokens", [0, 1, 10])
def test_write_as_they_are(
    device: str, heads: Heads, cache_dtype: torch.dtype, num_tokens: int
) -> None:
    step = make_step(heads, num_tokens, device, torch.bfloat16, cache_dtype)
    write_kv(step.key, step.value, step.kv_cache, step.slot_mapping, 0.5, 2.0)
    keys = step.key.double().unflatten(1, (-1, heads.size)) / 0.5
    values = step.value.double().unflatten(1, (-1, heads.size)) / 2.0
    exact = cache_dtype == torch.bfloat16  # the scales are powers of two
    assert_cached(step, keys, values, 0.0 if exact else 2**-4, 0.0 if exact else 2**-10)


def test_blocks_may_lie_apart(device: str) -> None:
    """A layer's cache may be a part of a pool whose blocks hold all layers."""
    heads = Heads(4, 2, 32, 32)
    step = make_step(heads, 9, device)
    pool = torch.full((NUM_BLOCKS, 3, *step.kv_cache.shape[1:]), NAN, device=device).bfloat16()
    step.kv_cache = pool[:, 1]
    write_kv(step.key, step.value, step.kv_cache, step.slot_mapping)
    keys, values = (x.double().unflatten(1, (-1, heads.size)) for x in (step.key, step.value))
    assert_cached(step, keys, values, 0.0)
    assert pool[:, 0].isnan().all()
    assert pool[:, 2].isnan().all()


def test_queries_may_be_rotated_in_place(device: str) -> None:
    heads = Heads(20, 2, 64, 64)
    step = make_step(heads, 12, device)
    expected = rotated(step.query, step, heads)
    rotate_and_write_kv(
        step.query, step.key, step.value, step.positions, step.cos, step.sin, step.kv_cache,
        step.slot_mapping, step.query,
    )  # fmt: skip
    torch.testing.assert_close(
        step.query.double().unflatten(1, (-1, 64)), expected, rtol=2**-7, atol=1e-5
    )


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float32, FLOAT8])
def test_references_agree_with_float64(cache_dtype: torch.dtype) -> None:
    heads = Heads(3, 3, 80, 32)
    step = make_step(heads, 10, "cpu", torch.bfloat16, cache_dtype)
    query_out = torch.full(step.query.shape, NAN).bfloat16()
    rotate_and_write_kv_reference(
        step.query, step.key, step.value, step.positions, step.cos, step.sin, step.kv_cache,
        step.slot_mapping, query_out, 0.5, 2.0,
    )  # fmt: skip
    expected = rotated(step.query, step, heads)
    torch.testing.assert_close(
        query_out.double().view(expected.shape), expected, rtol=2**-7, atol=1e-5
    )
    is_float8 = cache_dtype == FLOAT8
    rounding, smallest = (2**-4 + 2**-8, 2**-10) if is_float8 else (2**-7, 0.0)
    values = step.value.double().unflatten(1, (-1, heads.size)) / 2.0
    assert_cached(step, rotated(step.key, step, heads) / 0.5, values, rounding, smallest)

    step.kv_cache.copy_(torch.full(step.kv_cache.shape, NAN))
    write_kv_reference(step.key, step.value, step.kv_cache, step.slot_mapping, 0.5, 2.0)
    keys = step.key.double().unflatten(1, (-1, heads.size)) / 0.5
    assert_cached(step, keys, values, rounding, smallest)


def test_torch_ops(device: str) -> None:
    heads = Heads(4, 2, 32, 32)
    step = make_step(heads, 5, device)
    query_out = torch.full(step.query.shape, NAN, device=device).bfloat16()
    torch.ops.tokenmill.rotate_and_write_kv(
        step.query, step.key, step.value, step.positions, step.cos, step.sin, step.kv_cache,
        step.slot_mapping, query_out, v_scale=2.0,
    )  # fmt: skip
    values = step.value.double().unflatten(1, (-1, heads.size)) / 2.0
    assert_cached(step, rotated(step.key, step, heads), values, 2**-7)
    torch.ops.tokenmill.write_kv(step.key, step.value, step.kv_cache, step.slot_mapping)
    keys, values = (x.double().unflatten(1, (-1, 32)) for x in (step.key, step.value))
    assert_cached(step, keys, values, 0.0)
