"""Launches without a GPU: Triton binds the arguments and compiles for one, but runs nothing.

Run as a program, it launches the kernels of a step at growing batch sizes, and prints for each
batch how many compiled variants each kernel has then.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tokenmill.kernels.gpu import (
    activation,
    attention,
    attention_config,
    attention_launch,
    inputs,
    latent_attention,
    latent_kv,
    norm,
    rope_kv,
    row_quantization,
    state_space,
    tables,
)
from tokenmill.kernels.state_space import StateCache, StateSpaceShape, StateSpaceWeights

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, HIDDEN, INTERMEDIATE = 32, 8, 128, 4096, 14336


class CompilingDriver:
    """What Triton asks of a driver until a kernel is compiled."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_launches() -> dict[str, int]:
    """From now on a launch only compiles; the numbers of variants, by kernel, as they grow."""
    driver.set_active(CompilingDriver())
    num_variants: dict[str, int] = {}

    def subscript(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(size > 0 for size in grid), grid

        def launch(*args: Any, **kwargs: Any) -> None:
            kernel.run(*args, grid=grid, warmup=True, **kwargs)
            num_variants[kernel.fn.__name__] = len(kernel.device_caches[0][0])

        return launch

    JITFunction.__getitem__ = subscript
    return num_variants


def launch_step(n: int) -> None:
    """Every kernel of a step with n tokens, requests and rows."""
    ints = torch.zeros(3, n + 1, dtype=torch.int32)
    rows, seq_lens, query_start_loc = ints[0, :n], ints[1, :n], ints[2]
    longs = torch.zeros(n, dtype=torch.int64)
    staged = torch.zeros(n + 1, dtype=torch.int64)[1:]
    token_ids, block_ids = (torch.zeros(8, size, dtype=torch.int32) for size in (8192, 512))
    block_table = torch.zeros(n, 512, dtype=torch.int32)
    input_ids = torch.zeros(n, dtype=torch.int32)
    prepared = (input_ids, longs, longs, block_table)
    inputs.prepare_step(rows, query_start_loc, seq_lens, token_ids, block_ids, *prepared, 16)
    inputs.prepare_inputs(rows, query_start_loc, seq_lens, token_ids, input_ids, longs)
    inputs.map_slots(rows, query_start_loc, longs, block_ids, longs, 16)
    inputs.gather_block_table(rows, seq_lens, block_ids, block_table, 16)
    tables.write_segments(token_ids.view(-1), seq_lens, staged, query_start_loc)
    tables.write_segments(token_ids.view(-1), input_ids, longs, query_start_loc)
    tables.commit_tokens(token_ids, rows, longs, longs)
    tables.commit_tokens(token_ids, rows, staged, longs, torch.ones(n, dtype=torch.bool))

    x = torch.zeros(n, HIDDEN, dtype=torch.bfloat16)
    residual, weight = torch.zeros(n, HIDDEN), torch.zeros(HIDDEN)
    quantized = x.to(torch.float8_e4m3fn), torch.zeros(n)
    tables.gather_rows(x, longs, x)
    norm.add_rms_norm(x, residual, weight, 1e-5, x, starts_stream=True)
    norm.add_rms_norm(x, residual, weight, 1e-5, x)
    norm.add_rms_norm_quantize(x, residual, weight, 1e-5, *quantized)
    norm.add_layer_norm(x, residual, weight, weight, 1e-5, x)
    row_quantization.quantize_rows(x, *quantized)

    qkv = torch.zeros(n, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_SIZE, dtype=torch.bfloat16)
    width = NUM_KV_HEADS * HEAD_SIZE
    query, key, value = qkv.split([NUM_HEADS * HEAD_SIZE, width, width], dim=1)
    angles = torch.zeros(64, HEAD_SIZE // 2)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        cache = torch.zeros(2, 2, 16, NUM_KV_HEADS, HEAD_SIZE).to(dtype)
        rope_kv.rotate_and_write_kv(
            query, key, value, longs, angles, angles, cache, longs, torch.empty_like(query)
        )
        rope_kv.write_kv(key, value, cache, longs, 0.5, 0.5)

    cache = torch.zeros(2, 2, 16, NUM_KV_HEADS, HEAD_SIZE, dtype=torch.bfloat16)
    size = attention_launch.workspace_size(n, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, 4096)
    for num_tokens, max_query_len in ((n, 1), (n + 40, 41)):  # decoding, and with a prompt
        tokens = torch.zeros(num_tokens, NUM_HEADS * HEAD_SIZE, dtype=torch.bfloat16)
        attention.paged_attention(
            tokens, cache, block_table, seq_lens, query_start_loc, torch.empty_like(tokens),
            workspace=torch.zeros(size), max_query_len=max_query_len, max_seq_len=4096,
            scale=0.1, exact=True,
        )  # fmt: skip

    _launch_latents(n, block_table, seq_lens, query_start_loc)
    _launch_states(n, block_table, seq_lens, query_start_loc)

    gate_up = torch.zeros(n, 2 * INTERMEDIATE, dtype=torch.bfloat16)
    out = torch.zeros(n, INTERMEDIATE, dtype=torch.bfloat16)
    activation.gated_activation(gate_up, "silu", out)
    activation.activation(out, "gelu_tanh", out)
    activation.gated_activation_quantize(
        gate_up, "silu", out.to(torch.float8_e4m3fn), torch.zeros(n)
    )


def _launch_latents(
    n: int, block_table: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor
) -> None:
    """The cache of latents, and attention to it; small ones compile sooner."""
    longs, angles = torch.zeros(n, dtype=torch.int64), torch.zeros(64, 8)
    cache = torch.zeros(2, 1, 16, 1, 80, dtype=torch.bfloat16)
    query = torch.zeros(n, 4 * 80, dtype=torch.bfloat16)
    latent_kv.rotate_and_write_latents(
        query, query[:, :80], longs, angles, angles, cache, longs, torch.empty_like(query)
    )
    config = attention_config.choose_latent_config(torch.bfloat16)
    size = latent_attention.latent_workspace_size(n, 4, 64, 4096, config=config)
    latent_attention.latent_attention(
        query, cache, block_table, seq_lens, query_start_loc,
        torch.zeros(n, 4 * 64, dtype=torch.bfloat16), rotated=16, workspace=torch.zeros(size),
        max_query_len=1, max_seq_len=4096, scale=0.1,
    )  # fmt: skip


def _launch_states(
    n: int, block_table: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor
) -> None:
    """A small state-space layer."""
    shape = StateSpaceShape(2, 16, 16, 1, 4, (0.0, float("inf")), 1e-5)
    heads = torch.zeros(shape.num_heads)
    channels = torch.zeros(shape.kernel_size, shape.num_channels)
    weights = StateSpaceWeights(
        channels, channels[0], heads, heads, heads, torch.zeros(shape.num_inner)
    )
    projected = torch.zeros(n, sum(shape.parts), dtype=torch.bfloat16)
    state_space.state_space(
        shape,
        weights,
        StateCache.empty(2, shape.spec),
        (query_start_loc, seq_lens, block_table),
        16,
        projected,
        projected.new_zeros(n, shape.num_inner),
    )


def main() -> None:
    num_variants = compile_launches()
    for n in (0, 1, 2, 3, 16, 100, 128, 500):
        launch_step(n)
        print(json.dumps({"n": n, **num_variants}))


if __name__ == "__main__":
    main()
