"""Attention as real models launch it, to be compiled without a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from tokenmill.kernels.gpu.attention_config import AttentionConfig, TileConfig, choose_config
from tokenmill.kernels.gpu.attention_launch import partitions_at_once
from tokenmill.kernels.gpu.attention_prefill import prefill_kernel
from tokenmill.kernels.gpu.attention_shape import KernelShape, kernel_shapes
from tokenmill.kernels.gpu.attention_split import merge_kernel, plan_kernel, split_kernel
from tokenmill.kernels.gpu.launch import CompileCase

_FP16 = torch.float16
_TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def compile_cases() -> list[CompileCase]:
    return [
        _plan_case(),
        *_layer_cases("32:8x128 exact", 32, 8, 128, exact=True),
        *_layer_cases("32:8x128", 32, 8, 128),
        *_layer_cases("32:8x128 one loop", 32, 8, 128, one_loop=True),
        *_layer_cases("32:8x128 exact one loop", 32, 8, 128, exact=True, one_loop=True),
        *_layer_cases(
            "28:4x128 float8 blocks of 16", 28, 4, 128, kv_type="*fp8e4nv", block_size=16
        ),
        *_layer_cases("64:8x64 float16 window sinks", 64, 8, 64, _FP16, window=128, has_sinks=True),
        *_layer_cases(
            "16:8x256 window cap exact", 16, 8, 256, window=4096, has_cap=True, exact=True
        ),
        *_layer_cases("32:32x80 float32", 32, 32, 80, torch.float32),
        *_layer_cases("16:16x64 in both directions", 16, 16, 64, causal=False),
        *_layer_cases("16:16x64 in both directions exact", 16, 16, 64, causal=False, exact=True),
    ]


def _layer_cases(
    name: str,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    kv_type: str | None = None,
    block_size: int = 64,
    window: int | None = None,
    causal: bool = True,
    has_cap: bool = False,
    has_sinks: bool = False,
    exact: bool = False,
    one_loop: bool = False,
) -> Iterator[CompileCase]:
    config = choose_config(num_heads // num_kv_heads, head_size, dtype, exact=exact)
    config = replace(config, one_loop=one_loop)
    split, prefill = kernel_shapes(
        num_heads,
        num_kv_heads,
        head_size,
        block_size,
        2 * block_size * num_kv_heads * head_size,
        window,
        causal,
        has_cap,
        has_sinks,
        config,
    )
    yield from shape_cases(name, config, split, prefill, _TYPES[dtype], kv_type)


def shape_cases(
    name: str,
    config: AttentionConfig,
    split: KernelShape,
    prefill: KernelShape,
    type_: str,
    kv_type: str | None = None,
) -> Iterator[CompileCase]:
    """The kernels of one kind of layer, for queries of a type such as "*bf16"."""
    tensors = {
        "query": type_,
        "kv_cache": kv_type or type_,
        "block_table": "*i32",
        "seq_lens": "*i32",
        "query_start_loc": "*i32",
        "out": type_,
        "num_reqs": "i32",
        "query_stride": "i32:16",
        "out_stride": "i32:16",
        "table_stride": "i32",
        "qk_scale": "fp32",
        "soft_cap": "fp32",
        "v_scale": "fp32",
    }
    partial = {"plan": "*i32", "workspace": "*fp32", "plan_stride": "i32", "capacity": "i32"}
    sinks = {"sinks": "*fp32"} if split.has_sinks else {}
    no_sinks = {} if sinks else {"sinks": None}

    def case(
        kind: str, kernel: object, signature: dict[str, str], shape: KernelShape, tile: TileConfig
    ) -> CompileCase:
        constants = {**no_sinks, "S": shape, "OVERLAPS": True}
        return CompileCase(
            f"attention {kind} {name}",
            kernel,
            signature | sinks,
            constants,
            tile.num_warps,
            tile.num_stages,
            tile.max_registers,
        )

    yield case("split", split_kernel, tensors | partial, split, config.split)
    # The plan's third row begins anywhere.
    tile_starts = {"tile_starts": "*i32"}
    yield case("prefill", prefill_kernel, tensors | tile_starts, prefill, config.prefill)
    merged = {key: tensors[key] for key in ("query_start_loc", "out", "out_stride", "v_scale")}
    unroll = partitions_at_once(4, split.block_d)
    yield CompileCase(
        f"attention merge {name}",
        merge_kernel,
        merged | partial | sinks,
        {**no_sinks, "ROWS": 4, "UNROLL": unroll, "S": split, "OVERLAPS": True},
        num_warps=4,
        num_stages=1,
    )


def _plan_case() -> CompileCase:
    return CompileCase(
        "attention plan",
        plan_kernel,
        {
            "seq_lens": "*i32",
            "query_start_loc": "*i32",
            "plan": "*i32",
            "num_reqs": "i32",
            "plan_stride": "i32",
            "capacity": "i32",
        },
        {
            "GROUP": 4,
            "WINDOW": 4096,
            "PARTITION": 256,
            "SPLIT_TOKENS": 4,
            "PREFILL_TOKENS": 32,
            "BLOCK": 1024,
        },
        num_warps=4,
        num_stages=1,
    )
