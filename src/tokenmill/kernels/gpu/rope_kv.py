"""RoPE of queries and keys, and the write of keys and values to the paged cache, in one launch.

A program takes one token and some of its heads. Query programs rotate into `query_out`; key
programs rotate keys, and copy the values of the same heads:

    program  (token, 0) ... | (token, last)
             query heads    | KV heads: key rotated, value as it is -> kv_cache[slot]

Cosines and sines are those of `layers/rope.py`, elements i and i + rotary_dim / 2 of a head a pair.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tokenmill.kernels.gpu.launch import CompileCase, cdiv, define_op, next_power_of_2
from tokenmill.kernels.gpu.overlap import let_next_start, overlaps, wait_for_previous
from tokenmill.kernels.rotary import apply_rotary

_VALUES = 1024
"""Elements of a program, about: vector loads of half of them, for each thread one."""
_NUM_WARPS = 2
LAUNCH: dict[str, Any] = {"num_warps": _NUM_WARPS, "num_stages": 1}

_LARGEST_FLOAT8 = tl.constexpr(448.0)


def rotate_and_write_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    query_out: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Rotate queries into query_out, rotate keys, and write keys and values to their slots.

    query is [N, num_heads * head_size], key and value [N, num_kv_heads * head_size], all of one
    dtype, bfloat16, float16 or float32; query_out is of query's shape and dtype; rows of all may
    lie apart. positions is int64 [N]; cos and sin are float32 [max_len, rotary_dim / 2]. What lies
    behind rotary_dim in a head passes. Rotation is computed in float32 and rounded once to query's
    dtype.

    kv_cache is [num_blocks, 2, block_size, num_kv_heads, head_size], bfloat16, float16, float32, or
    float8_e4m3fn, which saturates; it takes key / k_scale and value / v_scale. slot_mapping is
    int64 [N]; a negative slot writes nothing. Tokens have slots of their own.
    """
    num_tokens, (num_kv_heads, head_size) = len(positions), kv_cache.shape[3:]
    check_rotation(query, positions, cos, sin, query_out, head_size)
    _check_cache(key, value, kv_cache, slot_mapping)
    assert key.dtype == query.dtype
    if num_tokens == 0:
        return
    num_heads = query.shape[1] // head_size
    heads = heads_of_program(num_heads, num_kv_heads, head_size)
    rope_kv_kernel[(num_tokens, cdiv(num_heads, heads) + cdiv(num_kv_heads, heads))](
        query,
        key,
        value,
        positions,
        cos,
        sin,
        kv_cache,
        slot_mapping,
        query_out,
        1.0 / k_scale,
        1.0 / v_scale,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        query_out.stride(0),
        kv_cache.stride(0),
        BLOCK_SIZE=kv_cache.shape[2],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        HALF=cos.shape[1],
        HEADS=heads,
        OVERLAPS=overlaps(key.device),
        launch_pdl=overlaps(key.device),
        **LAUNCH,
    )


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write keys and values to their slots as they are; arguments as in `rotate_and_write_kv`."""
    _check_cache(key, value, kv_cache, slot_mapping)
    if len(slot_mapping) == 0:
        return
    num_kv_heads, head_size = kv_cache.shape[3:]
    heads = heads_of_program(0, num_kv_heads, head_size)
    rope_kv_kernel[(len(slot_mapping), cdiv(num_kv_heads, heads))](
        None,
        key,
        value,
        None,
        None,
        None,
        kv_cache,
        slot_mapping,
        None,
        1.0 / k_scale,
        1.0 / v_scale,
        0,
        key.stride(0),
        value.stride(0),
        0,
        kv_cache.stride(0),
        BLOCK_SIZE=kv_cache.shape[2],
        NUM_HEADS=0,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        HALF=0,
        HEADS=heads,
        OVERLAPS=overlaps(key.device),
        launch_pdl=overlaps(key.device),
        **LAUNCH,
    )


def rotate_and_write_kv_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    query_out: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """`rotate_and_write_kv` in torch."""
    head_size = kv_cache.shape[4]
    cos, sin = cos[positions], sin[positions]
    query_out.copy_(apply_rotary(query.unflatten(1, (-1, head_size)), cos, sin).flatten(1))
    rotated = apply_rotary(key.unflatten(1, (-1, head_size)), cos, sin).flatten(1)
    write_kv_reference(rotated, value, kv_cache, slot_mapping, k_scale, v_scale)


def write_kv_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """`write_kv` in torch."""
    _, _, block_size, num_kv_heads, head_size = kv_cache.shape
    is_real = slot_mapping >= 0
    slots = slot_mapping[is_real]
    for which, (x, scale) in enumerate(((key, k_scale), (value, v_scale))):
        scaled = x[is_real].float().unflatten(1, (num_kv_heads, head_size)) * (1.0 / scale)
        if kv_cache.dtype == torch.float8_e4m3fn:
            scaled = scaled.clamp(-448.0, 448.0)
        # By bytes, since torch does not scatter float8.
        target = kv_cache[:, which].view(torch.uint8)
        target[slots // block_size, slots % block_size] = scaled.to(kv_cache.dtype).view(
            torch.uint8
        )


def check_rotation(
    query: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    query_out: torch.Tensor,
    head_size: int,
) -> None:
    num_tokens, width = query.shape
    assert width % head_size == 0
    assert query_out.shape == query.shape
    assert query_out.dtype == query.dtype
    assert query.stride(1) == query_out.stride(1) == 1
    assert positions.shape == (num_tokens,)
    assert positions.dtype == torch.int64
    assert positions.is_contiguous()
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == sin.shape
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    assert 2 * cos.shape[1] <= head_size


def _check_cache(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    num_kv_heads, head_size = kv_cache.shape[3:]
    assert kv_cache.shape[1] == 2
    assert kv_cache[:1].is_contiguous()
    assert key.shape == value.shape == (len(slot_mapping), num_kv_heads * head_size)
    assert key.dtype == value.dtype
    assert key.stride(1) == value.stride(1) == 1
    assert slot_mapping.dtype == torch.int64
    assert slot_mapping.is_contiguous()


def heads_of_program(num_heads: int, num_kv_heads: int, head_size: int) -> int:
    fitting = max(_VALUES // next_power_of_2(head_size), 1)
    return min(fitting, next_power_of_2(max(num_heads, num_kv_heads)))


@triton.jit
def _store(target: tl.tensor, x: tl.tensor, inverse_scale: tl.tensor, mask: tl.tensor) -> None:
    """Store x / scale in the target's dtype."""
    scaled = x.to(tl.float32) * inverse_scale
    if target.dtype.element_ty == tl.float8e4nv:
        scaled = tl.clamp(scaled, -_LARGEST_FLOAT8, _LARGEST_FLOAT8, tl.PropagateNan.ALL)
    tl.store(target, scaled.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _copy_heads(
    source: tl.tensor,
    target: tl.tensor,
    inverse_scale: tl.tensor,
    head: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    FIRST: tl.constexpr,
) -> None:
    """Copy elements FIRST to HEAD_SIZE of some heads of a token, from its row to its place."""
    element = FIRST + tl.arange(0, triton.next_power_of_2(HEAD_SIZE - FIRST))
    offset = head[:, None] * HEAD_SIZE + element[None, :]
    mask = (head[:, None] < NUM_HEADS) & (element[None, :] < HEAD_SIZE)
    _store(target + offset, tl.load(source + offset, mask=mask), inverse_scale, mask)


@triton.jit
def _rotate_heads(
    source: tl.tensor,
    target: tl.tensor,
    cos_row: tl.tensor,
    sin_row: tl.tensor,
    inverse_scale: tl.tensor,
    head: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    """Rotate some heads of a token on the way from its row to its place."""
    element = tl.arange(0, triton.next_power_of_2(HALF))
    offset = head[:, None] * HEAD_SIZE + element[None, :]
    mask = (head[:, None] < NUM_HEADS) & (element[None, :] < HALF)
    x1 = tl.load(source + offset, mask=mask)
    x2 = tl.load(source + offset + HALF, mask=mask)
    cos = tl.load(cos_row + element, mask=element < HALF)[None, :]
    sin = tl.load(sin_row + element, mask=element < HALF)[None, :]
    first = x1.to(tl.float32) * cos - x2.to(tl.float32) * sin
    second = x2.to(tl.float32) * cos + x1.to(tl.float32) * sin
    # A key is rounded to the model's dtype before it is scaled to the cache's, as a query is.
    _store(target + offset, first.to(x1.dtype), inverse_scale, mask)
    _store(target + offset + HALF, second.to(x1.dtype), inverse_scale, mask)
    if 2 * HALF < HEAD_SIZE:
        _copy_heads(source, target, inverse_scale, head, NUM_HEADS, HEAD_SIZE, 2 * HALF)


@triton.jit
def rope_kv_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    positions: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    kv_cache: tl.tensor,
    slot_mapping: tl.tensor,
    query_out: tl.tensor,
    inverse_k_scale: tl.tensor,
    inverse_v_scale: tl.tensor,
    query_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    query_out_stride: tl.tensor,
    block_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Without queries if NUM_HEADS is 0, without rotation if HALF is 0."""
    QUERY_PROGRAMS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    ROW: tl.constexpr = NUM_KV_HEADS * HEAD_SIZE
    token = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    let_next_start(OVERLAPS)
    wait_for_previous(OVERLAPS)
    cos_row = cos
    sin_row = sin
    if HALF > 0:
        position = tl.load(positions + token)
        cos_row += position * HALF
        sin_row += position * HALF
    if NUM_HEADS > 0:  # noqa: SIM102  the outer one is decided when the kernel is compiled
        if program < QUERY_PROGRAMS:
            head = program * HEADS + tl.arange(0, HEADS)
            source = query + token * query_stride
            target = query_out + token * query_out_stride
            _rotate_heads(source, target, cos_row, sin_row, 1.0, head, NUM_HEADS, HEAD_SIZE, HALF)
            return
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        head = (program - QUERY_PROGRAMS) * HEADS + tl.arange(0, HEADS)
        source = key + token * key_stride
        keys = kv_cache + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * ROW
        if HALF > 0:
            _rotate_heads(
                source, keys, cos_row, sin_row, inverse_k_scale, head, NUM_KV_HEADS, HEAD_SIZE, HALF
            )
        else:
            _copy_heads(source, keys, inverse_k_scale, head, NUM_KV_HEADS, HEAD_SIZE, 0)
        if value is not None:
            source = value + token * value_stride
            values = keys + BLOCK_SIZE * ROW
            _copy_heads(source, values, inverse_v_scale, head, NUM_KV_HEADS, HEAD_SIZE, 0)


define_op(
    "rotate_and_write_kv(Tensor query, Tensor key, Tensor value, Tensor positions, Tensor cos,"
    " Tensor sin, Tensor(a!) kv_cache, Tensor slot_mapping, Tensor(b!) query_out,"
    " float k_scale=1.0, float v_scale=1.0) -> ()",
    cuda=rotate_and_write_kv,
    cpu=rotate_and_write_kv_reference,
)
define_op(
    "write_kv(Tensor key, Tensor value, Tensor(a!) kv_cache, Tensor slot_mapping,"
    " float k_scale=1.0, float v_scale=1.0) -> ()",
    cuda=write_kv,
    cpu=write_kv_reference,
)


def compile_cases() -> list[CompileCase]:
    return [
        _case("bf16", 32, 8, 128, 64),
        _case("fp8e4nv", 32, 8, 128, 64),
        _case("bf16", 32, 32, 80, 16),
        _case("bf16", 0, 8, 128, 0),
        _case("fp8e4nv", 0, 8, 128, 0),
    ]


def _case(
    cache_type: str, num_heads: int, num_kv_heads: int, head_size: int, half: int
) -> CompileCase:
    of_query = {"query": "*bf16", "query_out": "*bf16", "positions": "*i64"}
    of_query |= {"cos": "*fp32", "sin": "*fp32"}
    signature = {"key": "*bf16", "value": "*bf16"}
    signature |= {"kv_cache": f"*{cache_type}", "slot_mapping": "*i64"}
    signature |= {"inverse_k_scale": "fp32", "inverse_v_scale": "fp32"}
    signature |= {f"{name}_stride": "i32:16" for name in ("key", "value", "block")}
    signature |= {f"{name}_stride": "i32:16" for name in ("query", "query_out")}
    constants: dict[str, Any] = {
        "BLOCK_SIZE": 16,
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_SIZE": head_size,
        "HALF": half,
        "HEADS": heads_of_program(num_heads, num_kv_heads, head_size),
        "OVERLAPS": True,
    }
    if num_heads:
        signature |= of_query
        name = f"rotate_and_write_kv {cache_type} {num_heads} {num_kv_heads} {head_size} {half}"
    else:
        constants |= dict.fromkeys(of_query)
        name = f"write_kv {cache_type} {num_kv_heads} {head_size}"
    return CompileCase(name, rope_kv_kernel, signature, constants, _NUM_WARPS, num_stages=1)
