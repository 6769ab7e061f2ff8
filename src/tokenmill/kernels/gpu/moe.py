"""A layer of experts: each token's top k of them, computed by expert, summed by token.

    align      (token, expert) pairs sorted by expert, and the tiles that cover each expert's rows
    gate_up    grouped product: rows of x with each expert's weight [2 * I, H], plus its bias
    activate   such as silu(gate) * up
    down       grouped product with each expert's weight [H, I], plus its bias
    combine    out[token] = sum over its k pairs, in their order, of weight * row

Nothing is padded and nothing is read on the host: buffers and grids are as large as the pairs could
need at most, and programs without a tile end at once. A pair's row depends on its token and its
expert alone, so a token has the same bits whatever the others choose.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tokenmill.kernels.experts import ExpertGate
from tokenmill.kernels.gpu.activation import gated_activation, gated_activation_reference
from tokenmill.kernels.gpu.dot import dot
from tokenmill.kernels.gpu.float8_experts import Float8Experts
from tokenmill.kernels.gpu.four_bit_experts import FourBitExperts
from tokenmill.kernels.gpu.gemm_tiles import tile_of_program
from tokenmill.kernels.gpu.launch import CompileCase, cdiv, define_op
from tokenmill.kernels.gpu.moe_four_bit import grouped_matmul_four_bit
from tokenmill.kernels.gpu.moe_order import ExpertOrder, align_experts
from tokenmill.kernels.gpu.moe_tiles import MoeTile, rows_of_tile, store_rows

_COMBINE_COLUMNS = 1024
_GPT_OSS_DEPTH = 2880
"""Of the experts with biases that are compiled ahead: no multiple of all steps."""

ExpertWeight = torch.Tensor | Float8Experts | FourBitExperts
"""A matrix of each expert, [num_experts, N, K]."""

MOE_TILES: tuple[tuple[int, MoeTile], ...] = (
    (16, MoeTile(16, 64, 128, 4, 4)),
    (32, MoeTile(32, 64, 128, 4, 4)),
    (64, MoeTile(64, 128, 64, 4, 4)),
)
MOE_LARGE = MoeTile(128, 128, 64, 8, 4)
"""(most pairs of an expert, on average, tile), and for more."""


def choose_moe_tile(num_pairs: int, num_experts: int) -> MoeTile:
    """The tile for so many (token, expert) pairs."""
    average = cdiv(num_pairs, num_experts)
    return next((tile for most, tile in MOE_TILES if average <= most), MOE_LARGE)


def grouped_matmul(
    x: torch.Tensor,
    weight: ExpertWeight,
    order: ExpertOrder,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    pairs_per_token: int | None = None,
    tile: MoeTile | None = None,
) -> None:
    """Multiply each row with its expert's weight: out[row] = x[source] @ weight[expert].T + bias.

    weight is [num_experts, N, K], bias [num_experts, N], out [num_tokens * k, N] in the order's
    rows. With `pairs_per_token`, k, x is [num_tokens, K] and a row's source its token; else x is
    [num_tokens * k, K] in the order's rows itself. x and weight are of one type, or the weight has
    eight or four bits and x is bfloat16; all are contiguous; bias and out are bfloat16, float16 or
    float32. Sums are float32, rounded once, after the bias. Rows behind the last pair's are not
    written.
    """
    if isinstance(weight, FourBitExperts):
        assert tile is None
        grouped_matmul_four_bit(x, weight, order, out, bias=bias, pairs_per_token=pairs_per_token)
        return
    num_rows, (num_experts, num_columns, depth) = len(order.pair_of_row), weight.shape
    tile = tile or choose_moe_tile(num_rows, num_experts)
    assert tile.block_m == order.block_m
    if isinstance(weight, Float8Experts):
        matrices, scales = weight.codes, weight.scales
        assert x.dtype == torch.bfloat16
    else:
        matrices, scales = weight, None
        assert x.dtype == weight.dtype
    assert x.shape == (num_rows // (pairs_per_token or 1), depth)
    assert out.shape == (num_rows, num_columns)
    assert all(t.is_contiguous() for t in (x, matrices, out))
    assert bias is None or (bias.shape == weight.shape[:2] and bias.is_contiguous())
    num_tiles = order.tiles.shape[1]
    if num_tiles == 0 or num_columns == 0:
        return
    _grouped_matmul_kernel[(num_tiles * cdiv(num_columns, tile.block_n),)](
        x,
        matrices,
        scales,
        bias,
        order.pair_of_row,
        order.tiles,
        out,
        num_tiles,
        num_columns,
        depth,
        PAIRS_PER_TOKEN=pairs_per_token or 0,
        EVEN=depth % tile.block_k == 0,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=tile.group_m,
        num_warps=tile.num_warps,
        # Tiles of float32 take twice the shared memory.
        num_stages=2 if x.dtype == torch.float32 else tile.num_stages,
    )


def combine_experts(
    rows: torch.Tensor, weight_of_pair: torch.Tensor, order: ExpertOrder, out: torch.Tensor
) -> None:
    """Sum each token's pairs: out[token] = sum of weight_of_pair[token, i] * rows[its row].

    rows is [num_tokens * k, H], weight_of_pair float32 [num_tokens, k], out [num_tokens, H]; sums
    are float32. A token without experts becomes 0.
    """
    (num_tokens, k), size = weight_of_pair.shape, rows.shape[1]
    assert weight_of_pair.dtype == torch.float32
    assert out.shape == (num_tokens, size)
    assert all(t.is_contiguous() for t in (rows, weight_of_pair, out))
    if num_tokens == 0:
        return
    _combine_kernel[(num_tokens, cdiv(size, _COMBINE_COLUMNS))](
        rows,
        weight_of_pair,
        order.row_of_pair,
        out,
        size,
        K=k,
        BLOCK=_COMBINE_COLUMNS,
        num_warps=4,
    )


@dataclass(frozen=True, slots=True)
class MoeBuffers:
    """What a layer of experts needs beside its inputs, for one number of tokens."""

    order: ExpertOrder
    gate_up: torch.Tensor
    """[num_tokens * k, 2 * intermediate_size]."""
    activated: torch.Tensor
    """[num_tokens * k, intermediate_size]."""
    down: torch.Tensor
    """[num_tokens * k, hidden_size]."""

    @classmethod
    def allocate(
        cls, x: torch.Tensor, gate_up: ExpertWeight, down: ExpertWeight, k: int
    ) -> MoeBuffers:
        """Room for the tokens x [num_tokens, H] and these weights."""
        num_pairs = len(x) * k
        tile = choose_moe_tile(num_pairs, len(gate_up))
        return cls(
            ExpertOrder.allocate(len(x), k, len(gate_up), tile.block_m, x.device),
            x.new_empty(num_pairs, gate_up.shape[1]),
            x.new_empty(num_pairs, down.shape[2]),
            x.new_empty(num_pairs, down.shape[1]),
        )


def experts_mlp(
    x: torch.Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    expert_of_pair: torch.Tensor,
    weight_of_pair: torch.Tensor,
    out: torch.Tensor,
    buffers: MoeBuffers,
    *,
    gate: ExpertGate = "silu",
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> None:
    """A whole layer: out[t] = sum of weight_of_pair[t, i] * mlp(x[t], expert_of_pair[t, i]).

    x and out are [num_tokens, H], gate_up [num_experts, 2 * I, H], down [num_experts, H, I], biases
    [num_experts, 2 * I] and [num_experts, H], expert_of_pair int32 and weight_of_pair float32
    [num_tokens, k].
    """
    k = expert_of_pair.shape[1]
    align_experts(expert_of_pair, buffers.order)
    grouped_matmul(x, gate_up, buffers.order, buffers.gate_up, bias=gate_up_bias, pairs_per_token=k)
    gated_activation(buffers.gate_up, gate, buffers.activated)
    grouped_matmul(buffers.activated, down, buffers.order, buffers.down, bias=down_bias)
    combine_experts(buffers.down, weight_of_pair, buffers.order, out)


def experts_mlp_reference(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    expert_of_pair: torch.Tensor,
    weight_of_pair: torch.Tensor,
    out: torch.Tensor,
    *,
    gate: ExpertGate = "silu",
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> None:
    """`experts_mlp` token by token, products in float64."""

    def product(
        weight: torch.Tensor, bias: torch.Tensor | None, expert: int, values: torch.Tensor
    ) -> torch.Tensor:
        result = weight[expert].double() @ values.double()
        return result if bias is None else result + bias[expert].double()

    for token, (experts, weights) in enumerate(
        zip(expert_of_pair.tolist(), weight_of_pair.tolist(), strict=True)
    ):
        total = torch.zeros(out.shape[1], dtype=torch.float64, device=out.device)
        for expert, weight in zip(experts, weights, strict=True):
            if expert >= 0:
                both = product(gate_up, gate_up_bias, expert, x[token])
                activated = both.new_empty(1, len(both) // 2)
                gated_activation_reference(both[None], gate, activated)
                total += weight * product(down, down_bias, expert, activated[0])
        out[token] = total.to(out.dtype)


@triton.jit(do_not_specialize=["num_tiles"])
def _grouped_matmul_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    pair_of_row: tl.tensor,
    tiles: tl.tensor,
    out: tl.tensor,
    num_tiles: tl.tensor,
    num_columns: tl.tensor,
    depth: tl.tensor,
    PAIRS_PER_TOKEN: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
) -> None:
    tile, tile_n = tile_of_program(tl.program_id(0), num_tiles, num_columns, 1, BLOCK_N, GROUP_M)
    expert = tl.load(tiles + tile)
    if expert >= 0:
        rows, end, source = rows_of_tile(
            tiles, pair_of_row, tile, num_tiles, PAIRS_PER_TOKEN, BLOCK_M
        )
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        column_index = tl.minimum(columns, num_columns - 1).to(tl.int64)
        steps = tl.arange(0, BLOCK_K)[None, :]
        x_rows = x + source[:, None] * depth + steps
        matrix = weight + expert.to(tl.int64) * num_columns * depth
        weight_rows = matrix + column_index[:, None] * depth + steps
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k in range(0, depth, BLOCK_K):
            if EVEN:
                x_tile = tl.load(x_rows + k)
                weight_tile = tl.load(weight_rows + k)
            else:
                inside = steps < depth - k
                x_tile = tl.load(x_rows + k, mask=inside, other=0.0)
                weight_tile = tl.load(weight_rows + k, mask=inside, other=0.0)
            total = dot(weight_tile.to(x_tile.dtype), tl.trans(x_tile), total)
        if scales is not None:
            first_row = expert.to(tl.int64) * num_columns
            total *= tl.load(scales + first_row + column_index)[:, None]
        store_rows(total, bias, out, expert, rows, end, columns, num_columns)


@triton.jit
def _combine_kernel(
    rows: tl.tensor,
    weight_of_pair: tl.tensor,
    row_of_pair: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < size
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(K):
        row = tl.load(row_of_pair + token * K + choice).to(tl.int64)
        factor = tl.load(weight_of_pair + token * K + choice)
        # A pair without an expert has no row, and whatever weight.
        mask = columns < tl.where(row >= 0, size, 0)
        values = tl.load(rows + row * size + columns, mask=mask, other=0.0).to(tl.float32)
        total += tl.where(mask, factor * values, 0.0)
    tl.store(out + token * size + columns, total.to(out.dtype.element_ty), mask=is_column)


def _experts_mlp_op(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    expert_of_pair: torch.Tensor,
    weight_of_pair: torch.Tensor,
    out: torch.Tensor,
) -> None:
    buffers = MoeBuffers.allocate(x, gate_up, down, expert_of_pair.shape[1])
    experts_mlp(x, gate_up, down, expert_of_pair, weight_of_pair, out, buffers)


define_op(
    "experts_mlp(Tensor x, Tensor gate_up, Tensor down, Tensor expert_of_pair,"
    " Tensor weight_of_pair, Tensor(a!) out) -> ()",
    cuda=_experts_mlp_op,
    cpu=experts_mlp_reference,
)


def compile_cases() -> list[CompileCase]:
    """Products and sums where a token takes 8 experts."""
    tiles = [*(tile for _, tile in MOE_TILES), MOE_LARGE]
    return [
        *(_product_case(tile, k) for tile in tiles for k in (0, 8)),
        *(_product_case(tile, 4, has_bias=True) for tile in tiles),
        *(_product_case(tile, 8, weight="fp8e4nv") for tile in tiles),
        CompileCase(
            "moe combine",
            _combine_kernel,
            {
                "rows": "*bf16",
                "weight_of_pair": "*fp32",
                "row_of_pair": "*i32",
                "out": "*bf16",
                "size": "i32:16",
            },
            {"K": 8, "BLOCK": _COMBINE_COLUMNS},
        ),
    ]


def _product_case(
    tile: MoeTile, pairs_per_token: int, *, has_bias: bool = False, weight: str = "bf16"
) -> CompileCase:
    name = f"moe product {tile.block_m}x{tile.block_n}{' of tokens' if pairs_per_token else ''}"
    optional = {"bias": has_bias, "scales": weight != "bf16"}
    return CompileCase(
        name + " with bias" * has_bias + f" {weight}" * (weight != "bf16"),
        _grouped_matmul_kernel,
        {
            "x": "*bf16",
            "weight": f"*{weight}",
            "pair_of_row": "*i32",
            "tiles": "*i32",
            "out": "*bf16",
            "num_tiles": "i32",
            "num_columns": "i32:16",
            "depth": "i32:16",
            **{argument: "*fp32" for argument, is_there in optional.items() if is_there},
        },
        {
            **{argument: None for argument, is_there in optional.items() if not is_there},
            "PAIRS_PER_TOKEN": pairs_per_token,
            "EVEN": not has_bias or _GPT_OSS_DEPTH % tile.block_k == 0,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "GROUP_M": tile.group_m,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
