"""A step's inputs, made on the device from the tables of the running requests.

Sampled ids go from the sampler to the table of tokens, and from there into the next step, without
waiting for the host, which sends a few numbers of each request:

    host    rows, query_start_loc, seq_lens
    device  token_ids [row, position] -> input_ids, positions
            block_ids [row, block]    -> slot_mapping, block_table     for each KV cache group

A token finds its request by bisection of query_start_loc, so that one prompt of thousands of tokens
and hundreds of decoding requests are the same to these kernels. Padding is written anew in each
step: tokens from query_start_loc[-1] on, and those of requests whose row is negative.

The tables are written by `tables.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.gpu import inputs_reference as reference
from tokenmill.kernels.gpu.launch import CompileCase, cdiv, define_op
from tokenmill.kernels.gpu.tables import find_run

_TOKENS = 128
"""Tokens of one program, one for each thread."""
_BLOCKS = 1024
"""Entries of a block table that a program copies at a time."""
_NUM_WARPS = 4


def prepare_step(
    rows: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    token_ids: torch.Tensor,
    block_ids: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
) -> None:
    """`prepare_inputs`, `map_slots` and `gather_block_table`, of one KV group, in one launch."""
    assert positions.shape == slot_mapping.shape
    _prepare(
        rows,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        token_ids=token_ids,
        block_ids=block_ids,
        input_ids=input_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        block_table=block_table,
        block_size=block_size,
    )


def prepare_inputs(
    rows: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    token_ids: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Gather ids and positions of a step's tokens; padded ones become id 0 at position 0.

    rows int32 [num_reqs] is where each request stands in the table token_ids, int32 [max_num_seqs,
    max_model_len]; a padded request's is negative, or its range is empty. Request i computes the
    last of its seq_lens[i] tokens (int32 [num_reqs]), those that lie in the flat batch from
    query_start_loc[i] to query_start_loc[i + 1] (int32 [num_reqs + 1], beginning with 0). input_ids
    is int32 [N], positions int64 [N], with N at least query_start_loc[-1].
    """
    _prepare(
        rows,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        token_ids=token_ids,
        input_ids=input_ids,
        positions=positions,
    )


def map_slots(
    rows: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_ids: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
) -> None:
    """Where in a group's KV cache each token's keys and values go; slot -1 for padded ones.

    block_ids is int32 [max_num_seqs, max_blocks], a row's blocks in order of position; slot_mapping
    is int64 [N]. The others are those of `prepare_inputs`.
    """
    assert positions.shape == slot_mapping.shape
    _prepare(
        rows,
        query_start_loc=query_start_loc,
        positions=positions,
        block_ids=block_ids,
        slot_mapping=slot_mapping,
        block_size=block_size,
    )


def gather_block_table(
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    block_ids: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
) -> None:
    """Copy the used blocks of each request's row to block_table, int32 [num_reqs, max_blocks].

    What lies behind them, and the rows of padded requests, stays as it is. The others are those of
    `map_slots`; block_table may be narrower than block_ids where no request needs all of it.
    """
    _prepare(
        rows,
        seq_lens=seq_lens,
        block_ids=block_ids,
        block_table=block_table,
        block_size=block_size,
    )


def _prepare(rows: torch.Tensor, *, block_size: int = 1, **tensors: torch.Tensor) -> None:
    """Compute those outputs that are given."""
    # `shape[0]`: a tensor's `len` takes longer, and this is called in every step.
    num_reqs = rows.shape[0]
    num_tokens = tensors["positions"].shape[0] if "positions" in tensors else 0
    num_copies = num_reqs if "block_table" in tensors else 0
    lengths = {"query_start_loc": num_reqs + 1, "seq_lens": num_reqs, "block_table": num_reqs}
    lengths |= {"input_ids": num_tokens, "slot_mapping": num_tokens}
    for name, tensor in {"rows": rows, **tensors}.items():
        is_long = name in ("positions", "slot_mapping")
        assert tensor.dtype == (torch.int64 if is_long else torch.int32), name
        assert tensor.stride(-1) == 1, name
        assert tensor.shape[0] == lengths.get(name, tensor.shape[0]), name

    num_tiles = cdiv(num_tokens, _TOKENS)
    if num_tiles + num_copies == 0:
        return
    strides = {f"{name}_stride": x.stride(0) for name, x in tensors.items() if x.ndim == 2}
    widths = [x.shape[1] for name, x in tensors.items() if name.startswith("block_")]
    _prepare_kernel[(num_tiles + num_copies,)](
        rows,
        num_reqs,
        num_tokens,
        num_tiles,
        num_reqs.bit_length(),
        **tensors,
        **strides,
        max_blocks=min(widths, default=0),
        BLOCK_SIZE=block_size,
        TOKENS=_TOKENS,
        BLOCKS=_BLOCKS,
        num_warps=_NUM_WARPS,
        num_stages=1,
    )


# What changes from step to step must not choose a compiled variant: numbers, and where in a buffer
# of staged numbers an array begins.
@triton.jit(
    do_not_specialize=["num_reqs", "num_tokens", "num_tiles", "num_halvings"],
    do_not_specialize_on_alignment=["rows", "query_start_loc", "seq_lens"],
)
def _prepare_kernel(
    rows: tl.tensor,
    num_reqs: tl.tensor,
    num_tokens: tl.tensor,
    num_tiles: tl.tensor,
    num_halvings: tl.tensor,
    query_start_loc: tl.tensor = None,
    seq_lens: tl.tensor = None,
    token_ids: tl.tensor = None,
    block_ids: tl.tensor = None,
    input_ids: tl.tensor = None,
    positions: tl.tensor = None,
    slot_mapping: tl.tensor = None,
    block_table: tl.tensor = None,
    token_ids_stride: tl.tensor = 0,
    block_ids_stride: tl.tensor = 0,
    block_table_stride: tl.tensor = 0,
    max_blocks: tl.tensor = 0,
    BLOCK_SIZE: tl.constexpr = 1,
    TOKENS: tl.constexpr = 1,
    BLOCKS: tl.constexpr = 1,
) -> None:
    """The first num_tiles programs take tokens, the others a request's block table each."""
    program = tl.program_id(0)
    if program < num_tiles:
        if query_start_loc is not None:
            _prepare_tokens(
                program * TOKENS + tl.arange(0, TOKENS),
                rows,
                num_reqs,
                num_tokens,
                num_halvings,
                query_start_loc,
                seq_lens,
                token_ids,
                block_ids,
                input_ids,
                positions,
                slot_mapping,
                token_ids_stride,
                block_ids_stride,
                BLOCK_SIZE,
            )
    else:
        if block_table is not None:
            request = (program - num_tiles).to(tl.int64)
            row = tl.load(rows + request).to(tl.int64)
            num_blocks = tl.minimum(tl.cdiv(tl.load(seq_lens + request), BLOCK_SIZE), max_blocks)
            num_blocks = tl.where(row < 0, 0, num_blocks)
            source = block_ids + row * block_ids_stride
            target = block_table + request * block_table_stride
            for first in range(0, num_blocks, BLOCKS):
                block = first + tl.arange(0, BLOCKS)
                mask = block < num_blocks
                tl.store(target + block, tl.load(source + block, mask=mask), mask=mask)


@triton.jit
def _prepare_tokens(
    token: tl.tensor,
    rows: tl.tensor,
    num_reqs: tl.tensor,
    num_tokens: tl.tensor,
    num_halvings: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    token_ids: tl.tensor,
    block_ids: tl.tensor,
    input_ids: tl.tensor,
    positions: tl.tensor,
    slot_mapping: tl.tensor,
    token_ids_stride: tl.tensor,
    block_ids_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    is_place = token < num_tokens
    is_real = token < tl.load(query_start_loc + num_reqs)
    request = find_run(query_start_loc, num_reqs, num_halvings, token, is_real)
    row = tl.load(rows + request, mask=is_real, other=-1).to(tl.int64)
    is_real = is_place & (row >= 0)
    if input_ids is None:
        position = tl.load(positions + token, mask=is_real, other=0)
    else:
        end = tl.load(query_start_loc + request + 1, mask=is_real, other=0)
        seq_len = tl.load(seq_lens + request, mask=is_real, other=0)
        position = tl.where(is_real, seq_len - end + token, 0).to(tl.int64)
        source = token_ids + row * token_ids_stride + position
        tl.store(input_ids + token, tl.load(source, mask=is_real, other=0), mask=is_place)
        tl.store(positions + token, position, mask=is_place)
    if slot_mapping is not None:
        source = block_ids + row * block_ids_stride + position // BLOCK_SIZE
        block = tl.load(source, mask=is_real, other=0).to(tl.int64)
        slot = tl.where(is_real, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(slot_mapping + token, slot, mask=is_place)


define_op(
    "prepare_step(Tensor rows, Tensor query_start_loc, Tensor seq_lens, Tensor token_ids,"
    " Tensor block_ids, Tensor(a!) input_ids, Tensor(b!) positions, Tensor(c!) slot_mapping,"
    " Tensor(d!) block_table, int block_size) -> ()",
    cuda=prepare_step,
    cpu=reference.prepare_step_reference,
)
define_op(
    "prepare_inputs(Tensor rows, Tensor query_start_loc, Tensor seq_lens, Tensor token_ids,"
    " Tensor(a!) input_ids, Tensor(b!) positions) -> ()",
    cuda=prepare_inputs,
    cpu=reference.prepare_inputs_reference,
)
define_op(
    "map_slots(Tensor rows, Tensor query_start_loc, Tensor positions, Tensor block_ids,"
    " Tensor(a!) slot_mapping, int block_size) -> ()",
    cuda=map_slots,
    cpu=reference.map_slots_reference,
)
define_op(
    "gather_block_table(Tensor rows, Tensor seq_lens, Tensor block_ids,"
    " Tensor(a!) block_table, int block_size) -> ()",
    cuda=gather_block_table,
    cpu=reference.gather_block_table_reference,
)


def compile_cases() -> list[CompileCase]:
    ids = ("query_start_loc", "seq_lens", "token_ids", "input_ids", "positions")
    slots = ("query_start_loc", "positions", "block_ids", "slot_mapping")
    table = ("seq_lens", "block_ids", "block_table")
    return [
        _case("prepare_step", {*ids, *slots, *table}),
        _case("prepare_inputs", set(ids)),
        _case("map_slots", set(slots)),
        _case("gather_block_table", set(table)),
    ]


def _case(name: str, given: set[str]) -> CompileCase:
    """The kernel with those of its optional tensors that are given."""
    counts = ("num_reqs", "num_tokens", "num_tiles", "num_halvings")
    signature = {"rows": "*i32"} | dict.fromkeys(counts, "i32")
    strides = ("token_ids_stride", "block_ids_stride", "block_table_stride", "max_blocks")
    signature |= dict.fromkeys(strides, "i32:16")
    for tensor in given:
        signature[tensor] = "*i64" if tensor in ("positions", "slot_mapping") else "*i32"
    constants = {"BLOCK_SIZE": 16, "TOKENS": _TOKENS, "BLOCKS": _BLOCKS}
    absent = set(_prepare_kernel.arg_names) - signature.keys() - constants.keys()
    return CompileCase(
        name, _prepare_kernel, signature, {**constants, **dict.fromkeys(absent)}, _NUM_WARPS, 1
    )
