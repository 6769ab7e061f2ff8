"""Products with few rows, at most 16, and what stands before and behind them in a decoder layer.

    before    nothing, RMSNorm of the residual stream, or silu(gate) * up
    behind    the result in `out`, or added to the residual stream

At a batch of one a kernel works for a few microseconds, about what it takes to start the next: with
these, a layer has five kernels instead of eight. A single row is multiplied without the matrix
units, from registers; 2 to 16 rows as in `gemm_bf16.py`.

The norm's scale is a factor of the whole row, so it is applied to the product, and the sum of
squares is gathered while the row is read for the product. A row has the same bits among 2 to 16
rows, but others alone, and others than those of a norm and `matmul_exact`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenmill.kernels.gpu.dot import dot
from tokenmill.kernels.gpu.gemm_config import SplitWorkspace, choose_segments, segment_depth
from tokenmill.kernels.gpu.gemm_tiles import leave_segment, sum_segments
from tokenmill.kernels.gpu.launch import CompileCase, cdiv, define_op
from tokenmill.kernels.norm import rms_norm

MOST_ROWS = 16

Before = Literal["nothing", "rms_norm", "silu"]


@dataclass(frozen=True, slots=True)
class SmallConfig:
    """How the work is cut; what suits is found on the device."""

    block_n: int
    """Rows of the weight that a program takes."""
    block_k: int
    num_warps: int
    num_stages: int


ONE_ROW = SmallConfig(block_n=4, block_k=1024, num_warps=4, num_stages=1)
FEW_ROWS = SmallConfig(block_n=64, block_k=128, num_warps=4, num_stages=4)


@dataclass(frozen=True, slots=True)
class SmallPlan:
    """What a kernel is compiled for."""

    block_n: int
    block_k: int
    num_segments: int
    before: Before
    accumulates: bool
    dependent_launch: bool


def linear_small(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    workspace: SplitWorkspace,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    accumulates: bool = False,
    dependent_launch: bool = False,
    config: SmallConfig | None = None,
) -> None:
    """Put x' [M, K] @ weight [N, K].T into out [M, N], or add it to out; M is at most 16.

    x' is x; with `norm_weight` (float32 [K]) the RMSNorm of x, which then is float32 [M, K]; with
    `gated`, silu(x[:, :K]) * x[:, K:] of x [M, 2 * K]. The weight is bfloat16, as is x but for the
    norm. out is bfloat16 or float32; float32 if the product `accumulates`. All are contiguous.

    With `dependent_launch` the kernel may start before the one launched in front of it has ended,
    which must not be the one that writes the weight: it reads its first weights meanwhile.
    """
    num_rows, (num_columns, depth) = len(x), weight.shape
    _check(x, weight, out, norm_weight, gated, accumulates)
    if num_rows == 0 or num_columns == 0:
        return
    dependent_launch = dependent_launch and x.is_cuda
    config = config or (ONE_ROW if num_rows == 1 else FEW_ROWS)
    # A single row is multiplied by so many programs that its sums need not be cut.
    num_segments = 1 if num_rows == 1 else choose_segments(num_columns, depth)
    per_segment = segment_depth(depth, num_segments)
    before: Before = "rms_norm" if norm_weight is not None else "silu" if gated else "nothing"
    plan = SmallPlan(
        config.block_n,
        config.block_k,
        cdiv(depth, per_segment),
        before,
        accumulates,
        dependent_launch,
    )
    num_tiles = cdiv(num_columns, config.block_n)
    rest: tuple[object, ...] = (eps, num_columns, depth)
    if num_rows > 1:
        # A row of the tile more: its sums of squares.
        tile_values = MOST_ROWS * (config.block_n + 1)
        assert workspace.holds(num_tiles, plan.num_segments, tile_values)
        rest = (workspace.partial, workspace.arrivals, eps, num_rows, *rest[1:], per_segment)
    kernel = _one_row_kernel if num_rows == 1 else _few_rows_kernel
    kernel[(num_tiles * plan.num_segments,)](
        x,
        weight,
        norm_weight,
        out,
        *rest,
        S=plan,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        launch_pdl=dependent_launch,
    )


def linear_small_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    accumulates: bool = False,
) -> None:
    """What `linear_small` approximates, in float64."""
    x = x.double()
    if norm_weight is not None:
        x = rms_norm(x, norm_weight.double(), eps)
    elif gated:
        gate, up = x.chunk(2, dim=-1)
        x = gate * torch.sigmoid(gate) * up
    product = x @ weight.double().t()
    out.copy_(product + out.double() if accumulates else product)


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    norm_weight: torch.Tensor | None,
    gated: bool,
    accumulates: bool,
) -> None:
    (num_columns, depth), num_rows = weight.shape, len(x)
    assert num_rows <= MOST_ROWS
    assert weight.dtype == torch.bfloat16
    assert x.shape == (num_rows, 2 * depth if gated else depth)
    assert out.shape == (num_rows, num_columns)
    assert out.dtype == torch.float32 or (out.dtype == torch.bfloat16 and not accumulates)
    assert all(t.is_contiguous() for t in (x, weight, out))
    if norm_weight is None:
        assert x.dtype == torch.bfloat16
    else:
        assert x.dtype == norm_weight.dtype == torch.float32
        assert norm_weight.shape == (depth,)
        assert not gated


@triton.jit
def _read_values(
    source: tl.tensor,
    norm_weight: tl.tensor,
    inner: tl.tensor,
    inside: tl.tensor,
    mask: tl.tensor,
    depth: tl.tensor,
    S: tl.constexpr,
) -> tl.tuple:
    """(what the weight is multiplied with, what the norm's sum of squares is of), float32.

    Pointers and mask have one shape; `inner` are columns of K, `inside` whether they exist.
    """
    values = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    stream = values
    if S.before == "rms_norm":
        values *= tl.load(norm_weight + inner, mask=inside, other=0.0)
    elif S.before == "silu":
        up = tl.load(source + depth, mask=mask, other=0.0).to(tl.float32)
        values = values / (1.0 + tl.exp(-values)) * up
    return values, stream


@triton.jit
def _one_row_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    norm_weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    num_columns: tl.tensor,
    depth: tl.tensor,
    S: tl.constexpr,
) -> None:
    N: tl.constexpr = S.block_n
    K: tl.constexpr = S.block_k
    columns = tl.program_id(0) * N + tl.arange(0, N)
    is_column = columns < num_columns
    steps = tl.arange(0, K)
    rows = tl.minimum(columns, num_columns - 1).to(tl.int64) * depth
    tiles = weight + rows[:, None] + steps[None, :]
    if S.dependent_launch:
        gdc_launch_dependents()
    # Each tile is on its way while the one in front of it is multiplied.
    tile = tl.load(tiles, mask=(steps < depth)[None, :], other=0.0)
    if S.dependent_launch:
        gdc_wait()
    total = tl.zeros((N, K), tl.float32)
    squares = tl.zeros((K,), tl.float32)
    for k in range(0, depth, K):
        following = tl.load(tiles + k + K, mask=(steps < depth - k - K)[None, :], other=0.0)
        inside = steps < depth - k
        values, stream = _read_values(
            x + k + steps, norm_weight, k + steps, inside, inside, depth, S
        )
        total += tile.to(tl.float32) * values[None, :]
        if S.before == "rms_norm":
            squares += stream * stream
        tile = following
    result = tl.sum(total, axis=1)
    if S.before == "rms_norm":
        result *= 1.0 / tl.sqrt_rn(tl.sum(squares, axis=0) / depth + eps)
    if S.accumulates:
        result += tl.load(out + columns, mask=is_column, other=0.0)
    tl.store(out + columns, result.to(out.dtype.element_ty), mask=is_column)


@triton.jit
def _finish_rows(
    total: tl.tensor, square_sums: tl.tensor, out: tl.tensor, eps: tl.tensor, target: tl.tuple,
    S: tl.constexpr,
) -> None:  # fmt: skip
    """Scale a tile's sums [block_n, rows] and store or add them."""
    rows, columns, num_rows, num_columns, depth = target
    result = tl.trans(total)
    if S.before == "rms_norm":
        result *= (1.0 / tl.sqrt_rn(square_sums / depth + eps))[:, None]
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    place = out + rows[:, None] * num_columns + columns[None, :]
    if S.accumulates:
        result += tl.load(place, mask=mask, other=0.0)
    tl.store(place, result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    norm_weight: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    arrivals: tl.tensor,
    eps: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    depth: tl.tensor,
    segment_depth: tl.tensor,
    S: tl.constexpr,
) -> None:
    M: tl.constexpr = 16
    N: tl.constexpr = S.block_n
    K: tl.constexpr = S.block_k
    NUM_SEGMENTS: tl.constexpr = S.num_segments
    program = tl.program_id(0)
    tile = program // NUM_SEGMENTS
    segment = program % NUM_SEGMENTS
    rows = tl.arange(0, M)
    columns = tile * N + tl.arange(0, N)
    steps = tl.arange(0, K)[None, :]
    width = depth * 2 if S.before == "silu" else depth
    x_rows = x + rows[:, None] * width
    weight_rows = weight + tl.minimum(columns, num_columns - 1).to(tl.int64)[:, None] * depth
    if S.dependent_launch:
        gdc_launch_dependents()
        gdc_wait()
    begin = segment * segment_depth
    total = tl.zeros((N, M), tl.float32)
    squares = tl.zeros((M, K), tl.float32)
    for k in range(begin, tl.minimum(begin + segment_depth, depth), K):
        inner = k + steps
        inside = inner < depth
        weights = tl.load(weight_rows + inner, mask=inside, other=0.0)
        mask = (rows < num_rows)[:, None] & inside
        values, stream = _read_values(x_rows + inner, norm_weight, inner, inside, mask, depth, S)
        total = dot(weights, tl.trans(values.to(weights.dtype)), total)
        if S.before == "rms_norm":
            squares += stream * stream
    square_sums = tl.sum(squares, axis=1)
    target = (rows, columns, num_rows, num_columns, depth)
    if NUM_SEGMENTS == 1:
        _finish_rows(total, square_sums, out, eps, target, S)
    else:
        # Behind the partial products; rows of a segment, segments of a tile.
        num_programs = tl.num_programs(0)
        places = partial + num_programs * (N * M) + tile * (NUM_SEGMENTS * M) + rows
        tl.store(places + segment * M, square_sums)
        if leave_segment(total, partial, arrivals, tile, segment, NUM_SEGMENTS):
            merged = sum_segments(partial, arrivals, tile, NUM_SEGMENTS, N, M)
            merged_squares = tl.zeros((M,), tl.float32)
            for other in tl.static_range(NUM_SEGMENTS):
                merged_squares += tl.load(places + other * M, cache_modifier=".cg")
            _finish_rows(merged, merged_squares, out, eps, target, S)


def _linear_small_op(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *shared: torch.Tensor, **how: Any
) -> None:
    linear_small(x, weight, out, SplitWorkspace(*shared), **how)


def _linear_small_reference_op(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *shared: torch.Tensor, **how: Any
) -> None:
    linear_small_reference(x, weight, out, **how)


define_op(
    "linear_small(Tensor x, Tensor weight, Tensor(a!) out, Tensor(b!) partial, Tensor(c!) arrivals,"
    " *, Tensor? norm_weight=None, float eps=0.0, bool gated=False, bool accumulates=False) -> ()",
    cuda=_linear_small_op,
    cpu=_linear_small_reference_op,
)


def compile_cases() -> list[CompileCase]:
    """The four products of a layer at a batch of one and of some."""
    products: list[tuple[Before, bool]] = [
        ("nothing", False),
        ("nothing", True),
        ("rms_norm", False),
        ("silu", True),
    ]
    cases = []
    for before, accumulates in products:
        for dependent_launch in (False, True):
            cases += [
                _compile_case(ONE_ROW, 1, before, accumulates, dependent_launch),
                _compile_case(FEW_ROWS, 4, before, accumulates, dependent_launch),
            ]
    return cases


def _compile_case(
    config: SmallConfig,
    num_segments: int,
    before: Before,
    accumulates: bool,
    dependent_launch: bool,
) -> CompileCase:
    is_one = config is ONE_ROW
    plan = SmallPlan(
        config.block_n, config.block_k, num_segments, before, accumulates, dependent_launch
    )
    signature = {
        "x": "*fp32" if before == "rms_norm" else "*bf16",
        "weight": "*bf16",
        "out": "*fp32" if accumulates else "*bf16",
        "eps": "fp32",
        "num_columns": "i32:16",
        "depth": "i32:16",
    }
    constants: dict[str, object] = {"S": plan}
    if before == "rms_norm":
        signature["norm_weight"] = "*fp32"
    else:
        constants["norm_weight"] = None
    if not is_one:
        signature |= {
            "partial": "*fp32",
            "arrivals": "*i32",
            "num_rows": "i32",
            "segment_depth": "i32:16",
        }
    return CompileCase(
        f"linear_small {'one row' if is_one else 'few rows'} {before}"
        f"{' accumulates' if accumulates else ''}{' dependent' if dependent_launch else ''}",
        _one_row_kernel if is_one else _few_rows_kernel,
        signature,
        constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        reads_weights_early=True,
    )
