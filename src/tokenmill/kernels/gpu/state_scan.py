"""The scan of state-space layers: a program goes through the tokens of a request, for one head."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from tokenmill.kernels.state_space import StateSpaceShape

TABLES = ["query_start_loc", "seq_lens", "block_table"]
"""Pointers into buffers, at any place: a variant for each would be compiled while a step waits."""


@dataclass(frozen=True, slots=True)
class ScanShape:
    """What the scan is compiled for."""

    num_heads: int
    num_groups: int
    head_size: int
    state_size: int
    kernel_size: int
    block_size: int
    """Tokens of a block of states."""

    @property
    def inner(self) -> int:
        """Values of all heads; as many gates lie in front of the inputs."""
        return self.num_heads * self.head_size

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return self.inner + 2 * self.num_groups * self.state_size

    @property
    def past(self) -> int:
        """Values of a state in front of the heads' matrices: inputs of the convolution."""
        return (self.kernel_size - 1) * self.channels

    @property
    def values(self) -> int:
        """Of a state."""
        return self.past + self.inner * self.state_size

    @property
    def heads_of_group(self) -> int:
        """Heads that share B and C."""
        return self.num_heads // self.num_groups

    @property
    def block_p(self) -> int:
        """The head size, rounded up to a power of two."""
        return 1 << (self.head_size - 1).bit_length()

    @property
    def block_n(self) -> int:
        """The state size, rounded up to a power of two."""
        return 1 << (self.state_size - 1).bit_length()

    @property
    def num_warps(self) -> int:
        """So that a state takes about half of the registers."""
        return max(1, min(8, self.block_p * self.block_n // 2048))


def scan_shape(shape: StateSpaceShape, block_size: int) -> ScanShape:
    """Of layers of this shape."""
    return ScanShape(
        num_heads=shape.num_heads,
        num_groups=shape.num_groups,
        head_size=shape.head_size,
        state_size=shape.state_size,
        kernel_size=shape.kernel_size,
        block_size=block_size,
    )


@triton.jit
def _input(
    at: tl.tensor,
    column: tl.tensor,
    is_column: tl.tensor,
    source: tl.tuple,
    S: tl.constexpr,
) -> tl.tensor:
    """Inputs of the convolution at a token of the step; in front of its first, of the past.

    The source is (pointer to the step's inputs, their stride, pointer to the state before, tokens
    that it has seen).
    """
    inputs, stride, before, seen = source
    is_new = column * 0 + at >= 0
    row = inputs + tl.cast(at, tl.int64) * stride
    new = tl.load(row + column, mask=is_column & is_new, other=0.0)
    is_old = is_column & (column * 0 + tl.where(seen > 0, at, 0) < 0)
    past = before + (S.kernel_size - 1 + at) * S.channels
    old = tl.load(past + column, mask=is_old, other=0.0)
    return tl.where(is_new, new.to(tl.float32), old)


@triton.jit
def _convolved(
    token: tl.tensor,
    column: tl.tensor,
    is_column: tl.tensor,
    source: tl.tuple,
    conv_weight: tl.tensor,
    conv_bias: tl.tensor,
    S: tl.constexpr,
) -> tl.tensor:
    """silu(convolution) of some channels at a token."""
    total = tl.load(conv_bias + column, mask=is_column, other=0.0)
    TAPS: tl.constexpr = S.kernel_size
    for tap in tl.static_range(TAPS):
        x = _input(token + (tap - TAPS + 1), column, is_column, source, S)
        total += x * tl.load(conv_weight + tap * S.channels + column, mask=is_column, other=0.0)
    return total / (1.0 + tl.exp(-total))


@triton.jit
def _keep_inputs(
    kept: tl.tensor,
    token: tl.tensor,
    column: tl.tensor,
    is_column: tl.tensor,
    source: tl.tuple,
    S: tl.constexpr,
) -> None:
    """Store the last inputs of some channels, up to a token."""
    ROWS: tl.constexpr = S.kernel_size - 1
    for row in tl.static_range(ROWS):
        x = _input(token + (row - ROWS + 1), column, is_column, source, S)
        tl.store(kept + row * S.channels + column, x, mask=is_column)


@triton.jit
def _time_step(dt: tl.tensor, bias: tl.tensor, dt_low: tl.tensor, dt_high: tl.tensor) -> tl.tensor:
    """softplus(dt + bias), within limits."""
    dt = dt.to(tl.float32) + bias
    dt = tl.where(dt > 20.0, dt, tl.log(1.0 + tl.exp(tl.minimum(dt, 20.0))))
    return tl.minimum(tl.maximum(dt, dt_low), dt_high)


@triton.jit
def _keep(
    state: tl.tensor,
    kept: tl.tensor,
    token: tl.tensor,
    head: tl.tensor,
    source: tl.tuple,
    S: tl.constexpr,
) -> None:
    """Store a head's part of the state behind a token; a group's first head what all share."""
    p, n = tl.arange(0, S.block_p), tl.arange(0, S.block_n)
    matrix = S.past + (head * S.head_size + p)[:, None] * S.state_size + n[None, :]
    is_p, is_n = p < S.head_size, n < S.state_size
    tl.store(kept + matrix, state, mask=is_p[:, None] & is_n[None, :])
    _keep_inputs(kept, token, head * S.head_size + p, is_p, source, S)
    is_shared = n < tl.where(head % S.heads_of_group == 0, S.state_size, 0)
    b_column = S.inner + head // S.heads_of_group * S.state_size + n
    _keep_inputs(kept, token, b_column, is_shared, source, S)
    c_column = b_column + S.num_groups * S.state_size
    _keep_inputs(kept, token, c_column, is_shared, source, S)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=TABLES)
def scan_kernel(
    projected: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    block_table: tl.tensor,
    places: tl.tensor,
    conv_weight: tl.tensor,
    conv_bias: tl.tensor,
    a: tl.tensor,
    d: tl.tensor,
    dt_bias: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    table_stride: tl.tensor,
    dt_low: tl.tensor,
    dt_high: tl.tensor,
    S: tl.constexpr,
) -> None:
    """Grid (num_reqs, num_heads)."""
    req = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(query_start_loc + req)
    query_len = tl.load(query_start_loc + req + 1) - start
    if query_len > 0:
        seen = tl.load(seq_lens + req) - query_len
        table = block_table + req.to(tl.int64) * table_stride
        read_block = tl.load(table + tl.maximum(seen - 1, 0) // S.block_size)
        place = tl.load(places + req)
        before = values + (read_block.to(tl.int64) * 2 + place) * S.values
        inputs = projected + start.to(tl.int64) * stride + S.inner
        source = (inputs, stride, before, seen)
        p, n = tl.arange(0, S.block_p), tl.arange(0, S.block_n)
        is_p, is_n = p < S.head_size, n < S.state_size
        x_column = head * S.head_size + p
        b_column = S.inner + head // S.heads_of_group * S.state_size + n
        c_column = b_column + S.num_groups * S.state_size
        is_there = is_p[:, None] & (n < tl.where(seen > 0, S.state_size, 0))[None, :]
        matrix = S.past + x_column[:, None] * S.state_size + n[None, :]
        state = tl.load(before + matrix, mask=is_there, other=0.0)
        rate, skip, bias = tl.load(a + head), tl.load(d + head), tl.load(dt_bias + head)
        for token in range(query_len):
            x = _convolved(token, x_column, is_p, source, conv_weight, conv_bias, S)
            b = _convolved(token, b_column, is_n, source, conv_weight, conv_bias, S)
            c = _convolved(token, c_column, is_n, source, conv_weight, conv_bias, S)
            dt = tl.load(inputs + tl.cast(token, tl.int64) * stride + S.channels + head)
            dt = _time_step(dt, bias, dt_low, dt_high)
            state = state * tl.exp(dt * rate) + (dt * x)[:, None] * b[None, :]
            y = tl.sum(state * c[None, :], 1) + skip * x
            tl.store(out + (start + token).to(tl.int64) * S.inner + x_column, y, mask=is_p)
            end = seen + token + 1
            if (end % S.block_size == 0) | (token == query_len - 1):
                block = tl.load(table + (end - 1) // S.block_size)
                if block > 0:
                    own = tl.where((seen > 0) & (block == read_block), 1 - place, 0)
                    kept = values + (block.to(tl.int64) * 2 + own) * S.values
                    _keep(state, kept, token, head, source, S)
