"""RoPE of queries and of a token's one key, and the write of the key to a paged cache of latents.

The kernel is that of keys and values (`rope_kv.py`), without values: they are parts of the keys.
"""

from __future__ import annotations

import torch

from tokenmill.kernels.gpu.launch import CompileCase, cdiv, define_op
from tokenmill.kernels.gpu.overlap import overlaps
from tokenmill.kernels.gpu.rope_kv import LAUNCH, check_rotation, heads_of_program, rope_kv_kernel
from tokenmill.kernels.rotary import apply_rotary


def rotate_and_write_latents(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    query_out: torch.Tensor,
    k_scale: float = 1.0,
) -> None:
    """Rotate queries into query_out, and write rotated keys to their slots.

    query is [N, num_heads * key_size], key [N, key_size], the cache [num_blocks, 1, block_size, 1,
    key_size]; all else is as for `rotate_and_write_kv`. The first elements of a query and of a key
    are rotated, 2 * cos.shape[1] of them.
    """
    num_tokens, key_size = key.shape
    check_rotation(query, positions, cos, sin, query_out, key_size)
    assert key.dtype == query.dtype
    assert key.stride(1) == 1
    assert cache.shape[1] == cache.shape[3] == 1
    assert cache.shape[4] == key_size
    assert cache[:1].is_contiguous()
    assert slot_mapping.shape == (num_tokens,)
    assert slot_mapping.dtype == torch.int64
    assert slot_mapping.is_contiguous()
    if num_tokens == 0:
        return
    num_heads = query.shape[1] // key_size
    heads = heads_of_program(num_heads, 1, key_size)
    rope_kv_kernel[(num_tokens, cdiv(num_heads, heads) + 1)](
        query,
        key,
        None,
        positions,
        cos,
        sin,
        cache,
        slot_mapping,
        query_out,
        1.0 / k_scale,
        1.0,
        query.stride(0),
        key.stride(0),
        0,
        query_out.stride(0),
        cache.stride(0),
        BLOCK_SIZE=cache.shape[2],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=1,
        HEAD_SIZE=key_size,
        HALF=cos.shape[1],
        HEADS=heads,
        OVERLAPS=overlaps(key.device),
        launch_pdl=overlaps(key.device),
        **LAUNCH,
    )


def rotate_and_write_latents_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    query_out: torch.Tensor,
    k_scale: float = 1.0,
) -> None:
    """`rotate_and_write_latents` in torch."""
    cos, sin = cos[positions], sin[positions]
    query_out.copy_(apply_rotary(query.unflatten(1, (-1, key.shape[1])), cos, sin).flatten(1))
    is_real = slot_mapping >= 0
    slots = slot_mapping[is_real]
    rows = apply_rotary(key.unsqueeze(1), cos, sin)[is_real, 0].float() * (1.0 / k_scale)
    if cache.dtype == torch.float8_e4m3fn:
        rows = rows.clamp(-448.0, 448.0)
    # By bytes, since torch does not scatter float8.
    places = slots // cache.shape[2], slots % cache.shape[2]
    cache[:, 0, :, 0].view(torch.uint8)[places] = rows.to(cache.dtype).view(torch.uint8)


define_op(
    "rotate_and_write_latents(Tensor query, Tensor key, Tensor positions, Tensor cos, Tensor sin,"
    " Tensor(a!) cache, Tensor slot_mapping, Tensor(b!) query_out, float k_scale=1.0) -> ()",
    cuda=rotate_and_write_latents,
    cpu=rotate_and_write_latents_reference,
)


def compile_cases() -> list[CompileCase]:
    """The sizes of DeepSeek V2-Lite and of V3, whose cache is in float8."""
    return [_case(16, "bf16"), _case(128, "fp8e4nv")]


def _case(num_heads: int, cache_type: str) -> CompileCase:
    signature = dict.fromkeys(("query", "key", "query_out"), "*bf16")
    signature |= {"kv_cache": f"*{cache_type}", "cos": "*fp32", "sin": "*fp32"}
    signature |= {"positions": "*i64", "slot_mapping": "*i64"}
    signature |= {"inverse_k_scale": "fp32", "inverse_v_scale": "fp32"}
    names = ("query", "key", "query_out", "block")
    signature |= {f"{name}_stride": "i32:16" for name in names}
    constants = {
        "value": None,
        "value_stride": 0,
        "BLOCK_SIZE": 16,
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": 1,
        "HEAD_SIZE": 576,
        "HALF": 32,
        "HEADS": heads_of_program(num_heads, 1, 576),
        "OVERLAPS": True,
    }
    name = f"rotate_and_write_latents {cache_type} {num_heads}"
    return CompileCase(
        name, rope_kv_kernel, signature, constants, LAUNCH["num_warps"], LAUNCH["num_stages"]
    )
