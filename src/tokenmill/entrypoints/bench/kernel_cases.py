"""Calls of kernels on random data, and what each must read and compute.

Data that a model has once for each layer is used in turn, so that it comes from where it comes from
in a step: weights larger than the caches from memory. Activations stay where the last call left
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from tokenmill.checkpoint.gguf_types import TENSOR_TYPES
from tokenmill.config.parameters import ModelParameters
from tokenmill.kernels import fused, gemm
from tokenmill.kernels.paged_attention import (
    KV_DTYPES,
    AttentionPlan,
    PagedAttentionShape,
    kv_cache_shape,
    paged_attention,
    rotate_and_write_kv,
    unsupported_reasons,
)

WORKING_SET = 100 << 20
"""Bytes of weights that are used in turn; a small model's worth, and more than caches hold."""
QUANTIZED_BYTES = 1.375
"""Of one activation in int8: its code, and its share of its group's scale and sums."""
LOGITS_ROWS = 64
"""Rows of logits that a step computes at once."""

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """One call, to be measured."""

    group: str
    kernel: str
    shape: str
    num_rows: int
    num_bytes: int
    """That it reads and writes, at least."""
    flops: float
    working_set: int
    """Bytes of the data that the calls use in turn."""
    call: Call


def matrix_cases(
    sizes: ModelParameters, rows: Sequence[int], formats: Sequence[str]
) -> Iterator[Case]:
    """Products with every matrix of a layer, and with the head."""
    for name, (n, k) in matrix_shapes(sizes).items():
        for weights in formats:
            yield from product_cases(name, n, k, rows, weights)


def matrix_shapes(sizes: ModelParameters) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the matrices of a layer, and of the head."""
    heads = sizes.num_heads * sizes.head_size
    keys = sizes.num_kv_heads * sizes.head_size
    return {
        "qkv": (heads + 2 * keys, sizes.hidden_size),
        "output": (sizes.hidden_size, heads),
        "gate, up": (2 * sizes.intermediate_size, sizes.hidden_size),
        "down": (sizes.hidden_size, sizes.intermediate_size),
        "head": (sizes.vocab_size, sizes.hidden_size),
    }


def product_cases(name: str, n: int, k: int, rows: Sequence[int], weights: str) -> Iterator[Case]:
    """Products with a matrix of one format; none if it cannot have that format."""
    if k % gemm.BLOCK_VALUES.get(weights, 1):
        return
    num_bytes, product_of = _weights(weights, n, k)
    for m in rows:
        yield Case(
            group="matrix products",
            kernel=weights,
            shape=f"{name} {n} x {k}",
            num_rows=m,
            num_bytes=num_bytes,
            flops=2.0 * m * n * k,
            working_set=max(WORKING_SET, num_bytes),
            call=product_of(m),
        )


def _weights(weights: str, n: int, k: int) -> tuple[int, Callable[[int], Call]]:
    """Bytes of a matrix, and for a number of rows a call that multiplies by the next of many."""
    if weights in gemm.BLOCK_TYPES:
        return _block_weights(weights, n, k)
    dtype = torch.float32 if weights == "f32" else torch.bfloat16
    num_bytes = dtype.itemsize * n * k
    copies = range(WORKING_SET // num_bytes + 1)
    weight = torch.randn(n, k).to(dtype)
    if weights == "torch":
        plain = cycle([weight.clone() for _ in copies])

        def with_torch(m: int) -> Call:
            x = torch.randn(m, k).bfloat16()
            return lambda: functional.linear(x, next(plain))

        return num_bytes, with_torch
    if weights == "f32":
        floats = cycle([gemm.PackedFloat32.pack(weight) for _ in copies])

        def with_float32(m: int) -> Call:
            x, out = torch.randn(m, k), torch.empty(m, n)
            return lambda: gemm.gemm_float32(x, next(floats), out=out)

        return num_bytes, with_float32
    packed = cycle([gemm.PackedBf16.pack(weight) for _ in copies])

    def with_bf16(m: int) -> Call:
        x, out = torch.randn(m, k).bfloat16(), torch.empty(m, n, dtype=torch.bfloat16)
        return lambda: gemm.gemm_bf16(x, next(packed), out=out)

    return num_bytes, with_bf16


def _block_weights(block_type: str, n: int, k: int) -> tuple[int, Callable[[int], Call]]:
    # Codes and scales are random bytes; below 60, none of them makes an infinite scale.
    kind = next(kind for kind in TENSOR_TYPES.values() if kind.name == block_type)
    num_bytes = n * k // kind.block_size * kind.block_bytes
    raw = torch.randint(0, 60, (num_bytes,), dtype=torch.uint8)
    first = gemm.PackedBlocks.pack(block_type, raw, n, k)
    num_bytes = first.buffer.nbytes
    others = range(WORKING_SET // num_bytes)
    packed = cycle([first, *(gemm.PackedBlocks.pack(block_type, raw, n, k) for _ in others)])

    def with_blocks(m: int) -> Call:
        x = gemm.quantize_rows(torch.randn(m, k))
        out = torch.empty(m, n, dtype=torch.bfloat16)
        return lambda: gemm.gemm_blocks(x, next(packed), out=out)

    return num_bytes, with_blocks


def attention_cases(
    sizes: ModelParameters, rows: Sequence[int], contexts: Sequence[int], block_size: int
) -> Iterator[Case]:
    """Decoding, a row a request, at given lengths; and whole prompts, a row a token."""
    for kv_dtype in KV_DTYPES:
        if unsupported_reasons(
            kv_dtype, sizes.num_heads, sizes.num_kv_heads, sizes.head_size, block_size
        ):
            continue
        shape = PagedAttentionShape(
            kv_dtype, sizes.num_heads, sizes.num_kv_heads, sizes.head_size, block_size, 0.125
        )
        for context in contexts:
            for m in rows:
                yield _attention(shape, sizes.num_layers, [(context - 1, context)] * m, "decode")
        for m in rows:
            if m > 1:
                yield _attention(shape, sizes.num_layers, [(0, m)], "prompt")


def _attention(
    shape: PagedAttentionShape, num_layers: int, spans: list[tuple[int, int]], kind: str
) -> Case:
    """Requests that compute positions [start, end) each, on one cache a layer."""
    length = spans[0][1]
    blocks_each = -(-length // shape.block_size)
    num_blocks = 1 + blocks_each * len(spans)
    caches = [_random_cache(shape, num_blocks) for _ in range(num_layers)]
    plan = AttentionPlan()
    counts = torch.tensor([end - start for start, end in spans], dtype=torch.int32)
    starts = functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    seq_lens = torch.tensor([end for _, end in spans], dtype=torch.int32)
    table = torch.arange(1, num_blocks, dtype=torch.int32).view(len(spans), blocks_each)
    plan.build(shape, starts, seq_lens, table, num_blocks)
    query = torch.randn(int(starts[-1]), shape.num_heads * shape.head_size).bfloat16()
    out, in_turn = torch.empty_like(query), cycle(caches)
    token_bytes = caches[0].nbytes // (num_blocks * shape.block_size)
    seen = sum((start + 1 + end) * (end - start) // 2 for start, end in spans)
    what = f"{kind}, {length} tokens" if kind == "decode" else kind
    return Case(
        group="attention",
        kernel=f"{shape.kv_dtype} KV",
        shape=f"{what}, {shape.num_heads}/{shape.num_kv_heads} x {shape.head_size}",
        num_rows=len(query),
        num_bytes=sum(end for _, end in spans) * token_bytes,
        flops=4.0 * shape.num_heads * shape.head_size * seen,
        working_set=sum(cache.nbytes for cache in caches),
        call=lambda: paged_attention(shape, plan, query, next(in_turn), out),
    )


def _random_cache(shape: PagedAttentionShape, num_blocks: int) -> torch.Tensor:
    """A cache of one layer, with random tokens in it."""
    size = kv_cache_shape(
        num_blocks, shape.block_size, shape.num_kv_heads, shape.head_size, shape.kv_dtype
    )
    cache = torch.zeros(size, dtype=getattr(torch, shape.kv_dtype))
    num_tokens = num_blocks * shape.block_size
    _write(shape, torch.arange(num_tokens), cache)()
    return cache


def _write(shape: PagedAttentionShape, slots: torch.Tensor, cache: torch.Tensor) -> Call:
    """A call that rotates random queries and keys, and stores keys and values in `slots`."""
    heads, keys = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    qkv = torch.randn(len(slots), heads + 2 * keys).bfloat16()
    query, key, value = qkv[:, :heads], qkv[:, heads : heads + keys], qkv[:, heads + keys :]
    angles = torch.rand(4096, shape.head_size // 2)
    cos, sin = angles.cos(), angles.sin()
    positions, out = torch.arange(len(slots)) % 4096, torch.empty_like(query)
    return lambda: rotate_and_write_kv(
        shape, query, key, value, cache, slots, positions, cos, sin, out
    )


def fused_cases(sizes: ModelParameters, rows: Sequence[int]) -> Iterator[Case]:
    """Norms, activations, and what is done with logits. Bounded by bytes alone."""
    cases = [case for m in rows for case in _elementwise(sizes, m)]
    for m in dict.fromkeys(min(m, LOGITS_ROWS) for m in rows):
        cases += _choosers(sizes.vocab_size, m)
    for kernel in dict.fromkeys(case.kernel for case in cases):
        yield from (case for case in cases if case.kernel == kernel)


def _elementwise(sizes: ModelParameters, m: int) -> Iterator[Case]:
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    x, residual, weight = (
        torch.randn(m, hidden).bfloat16(),
        torch.randn(m, hidden),
        torch.ones(hidden),
    )
    gate_up = torch.randn(m, 2 * inner).bfloat16()
    outs: dict[str, tuple[float, Callable[[int], torch.Tensor | gemm.QuantizedRows]]] = {
        "bfloat16": (2.0, lambda size: torch.empty(m, size, dtype=torch.bfloat16))
    }
    if hidden % gemm.GROUP_SIZE == 0 and inner % gemm.GROUP_SIZE == 0:
        outs["int8"] = QUANTIZED_BYTES, lambda size: fused.empty_quantized(m, size)
    for name, (out_bytes, empty) in outs.items():
        normed, activated = empty(hidden), empty(inner)
        yield _by_bytes(
            f"add, norm to {name}",
            f"{hidden}",
            m,
            m * hidden * (2 + 4 + 4 + out_bytes),
            lambda out=normed: fused.add_rms_norm(x, residual, weight, 1e-5, out),  # type: ignore[misc]
        )
        yield _by_bytes(
            f"silu * up to {name}",
            f"2 x {inner}",
            m,
            m * inner * (4 + out_bytes),
            lambda out=activated: fused.gated_activation(gate_up, "silu", out),  # type: ignore[misc]
        )


def _choosers(vocab_size: int, m: int) -> Iterator[Case]:
    logits = 4 * torch.randn(m, vocab_size)
    chosen = np.random.default_rng(0).integers(0, vocab_size, m)
    columns: dict[str, npt.NDArray[Any]] = {
        "is_greedy": np.zeros(m, np.bool_),
        "temperature": np.full(m, 0.8, np.float32),
        "min_p": np.zeros(m, np.float32),
        "top_k": np.full(m, 40, np.int64),
        "top_p": np.full(m, 0.9, np.float64),
        "seed": np.arange(m, dtype=np.uint64),
        "position": np.arange(m, dtype=np.int64),
    }
    calls: dict[str, Call] = {
        "greedy token": lambda: fused.sample(
            logits, **columns | {"is_greedy": np.ones(m, np.bool_)}
        ),
        "top-k, top-p token": lambda: fused.sample(logits, **columns),
        "top-p token": lambda: fused.sample(logits, **columns | {"top_k": np.zeros(m, np.int64)}),
        "log-probability": lambda: fused.score_tokens(logits, chosen, np.zeros(m, np.int64)),
    }
    for name, call in calls.items():
        yield _by_bytes(name, f"{vocab_size} logits", m, 4 * m * vocab_size, call)


def _by_bytes(kernel: str, shape: str, m: int, num_bytes: float, call: Call) -> Case:
    return Case("fused", kernel, shape, m, int(num_bytes), 0.0, int(num_bytes), call)
