"""Tokens drawn from logits, without a sort of the vocabulary.

    best logit of the row                  greedy rows: the token, of equal ones the smallest id
    scaled = (logit - best) / temperature
    min_p, top-k, top-p                    as in `sampling/transforms.py`
    best of scaled + Gumbel noise          as in `sampling/random.py`

Several programs share a row. They exchange maxima, numbers of tokens and integer masses only, so
the token does not depend on how many there are, nor on the order in which they run, nor on other
rows. How the filters find their last token is told in `sampling_state.py`.

Masses are integers, in units of 2^-43 of the best token's mass, and so is what top_p asks of their
sum, to the nearest unit: a set that misses it by half a unit has reached it. Only where sums meet
top_p that closely, as those of equal tokens can, is the last token another than float64's, whose
rounding decides there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tokenmill.kernels.gpu.launch import CompileCase, cdiv, define_op, next_power_of_2
from tokenmill.kernels.gpu.sampling_choice import choose_kernel
from tokenmill.kernels.gpu.sampling_passes import find_largest_kernel, split_kernel, weigh_kernel
from tokenmill.kernels.gpu.sampling_reference import sample_reference
from tokenmill.kernels.gpu.sampling_state import MAX_VOCAB_SIZE, STATE_SIZE

_CHUNK = 4096
_SMALL_CHUNK = 1024
"""Tokens of one program; the small one where the others would leave processors idle."""
_NUM_PROGRAMS = 128
"""About as many as a GPU has processors."""
_TILE = 1024
"""Tokens whose noise is in registers at once."""
_BLOCK = 1024
"""Open tokens that the last kernel looks at at once."""
_MAX_LISTED = 16384
"""Tokens of a row that may be open when the last kernel begins; with more it still works, but reads
all logits again and again. Two passes of eight pivots usually leave some hundred; thousands where
logits are rounded to bfloat16, so that many are equal."""


class SamplingWorkspace(NamedTuple):
    """Memory that `sample` uses; its contents mean nothing between calls."""

    chunk_values: torch.Tensor
    """float32 [max_num_rows, 3, max_chunks]"""
    chunk_ids: torch.Tensor
    """int32 [max_num_rows, 2, max_chunks]"""
    state: torch.Tensor
    """int64 [max_num_rows, STATE_SIZE]"""
    listed: torch.Tensor
    """int32 [max_num_rows, 2, max_listed]"""

    @classmethod
    def allocate(
        cls, max_num_rows: int, vocab_size: int, device: torch.device | str
    ) -> SamplingWorkspace:
        """Memory for up to `max_num_rows` rows of `vocab_size` logits."""
        assert vocab_size <= MAX_VOCAB_SIZE
        max_chunks = next_power_of_2(cdiv(vocab_size, _SMALL_CHUNK))
        max_listed = min(next_power_of_2(vocab_size), _MAX_LISTED)
        return cls(
            chunk_values=torch.empty((max_num_rows, 3, max_chunks), device=device),
            chunk_ids=torch.empty((max_num_rows, 2, max_chunks), dtype=torch.int32, device=device),
            state=torch.empty((max_num_rows, int(STATE_SIZE)), dtype=torch.int64, device=device),
            listed=torch.empty((max_num_rows, 2, max_listed), dtype=torch.int32, device=device),
        )


def sample(
    logits: torch.Tensor,
    *,
    is_greedy: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    token_ids: torch.Tensor,
    is_valid: torch.Tensor,
    workspace: Sequence[torch.Tensor],
    any_random: bool = True,
    any_filter: bool = True,
) -> None:
    """Draw a token from each row of float32 logits [N, vocab_size] into token_ids and is_valid.

    Rows of logits may lie apart. The other arguments are contiguous, [N], and mean what they mean
    in `sampling/metadata.py`: is_greedy bool, temperature and min_p float32, top_k int32 or int64,
    top_p float64 or float32, seed int64 (the bits of a uint64), position int32 or int64, token_ids
    int32 or int64, is_valid bool. A row without a finite best logit is not valid, and its id is
    some id of the vocabulary.

    any_random and any_filter may be false if the caller knows that every row is greedy, or that no
    random row has a filter; columns of what is off are not read then.
    """
    columns = (is_greedy, temperature, min_p, top_k, top_p, seed, position, token_ids, is_valid)
    _check(logits, columns, workspace)
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    chunk_values, chunk_ids, state, listed = workspace
    filters = any_random and any_filter and vocab_size > 1  # an only token stays
    chunk = chunk_of(num_rows, vocab_size)
    grid = (cdiv(vocab_size, chunk), num_rows)
    chunks = (chunk_values, chunk_ids, state)
    stride = logits.stride(0)
    sizes = {"VOCAB_SIZE": vocab_size, "MAX_CHUNKS": chunk_values.shape[2]}
    find_largest_kernel[grid](
        logits, *chunks, stride, **sizes, CHUNK=chunk, FILTERS=filters, **_options(chunk)
    )
    sizes["NUM_CHUNKS"] = grid[0]
    if filters:
        for number in (0, 1):
            weigh_kernel[grid](
                logits, is_greedy, temperature, min_p, top_k, top_p,
                *chunks, stride, **sizes, CHUNK=chunk, PASS=number, **_options(chunk),
            )  # fmt: skip
    sizes["MAX_LISTED"] = listed.shape[2]
    if any_random:
        split_kernel[grid](
            logits, is_greedy, temperature, min_p, top_k, top_p, seed, position, *chunks, listed,
            stride, **sizes, CHUNK=chunk, TILE=_TILE, FILTERS=filters, num_warps=4, num_stages=1,
        )  # fmt: skip
    choose_kernel[(num_rows,)](
        logits, is_greedy, temperature, top_k, top_p, seed, position,
        *chunks, listed, token_ids, is_valid, stride, **sizes, BLOCK=_BLOCK, RANDOM=any_random,
        FILTERS=filters, num_warps=8, num_stages=1,
    )  # fmt: skip


def _check(
    logits: torch.Tensor, columns: Sequence[torch.Tensor], workspace: Sequence[torch.Tensor]
) -> None:
    num_rows, vocab_size = logits.shape
    chunk_values, _, state, _ = workspace
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert all(column.shape == (num_rows,) and column.is_contiguous() for column in columns)
    assert len(state) >= num_rows
    assert cdiv(vocab_size, _SMALL_CHUNK) <= chunk_values.shape[2]


def chunk_of(num_rows: int, vocab_size: int) -> int:
    """Tokens of one program."""
    is_enough = num_rows * cdiv(vocab_size, _CHUNK) >= _NUM_PROGRAMS
    return _CHUNK if is_enough else _SMALL_CHUNK


def num_rows_of_variants(max_num_rows: int, vocab_size: int) -> list[int]:
    """Numbers of rows, up to the largest, that together need all that `sample` compiles."""
    several = cdiv(_NUM_PROGRAMS, cdiv(vocab_size, _CHUNK))
    return sorted({num for num in (1, several) if num <= max_num_rows})


def _options(chunk: int) -> dict[str, int]:
    return {"num_warps": 8 if chunk == _CHUNK else 4, "num_stages": 1}


define_op(
    "sample(Tensor logits, *, Tensor is_greedy, Tensor temperature, Tensor min_p, Tensor top_k,"
    " Tensor top_p, Tensor seed, Tensor position, Tensor(a!) token_ids, Tensor(b!) is_valid,"
    " Tensor(c!)[] workspace, bool any_random=True, bool any_filter=True) -> ()",
    cuda=sample,
    cpu=sample_reference,
)


def compile_cases() -> list[CompileCase]:
    """For the vocabulary of Llama 3."""
    cases = []
    for chunk in (_SMALL_CHUNK, _CHUNK):
        warps = _options(chunk)["num_warps"]
        for filters in (False, True):
            name = f" {chunk}" + " filters" * filters
            cases += [
                _case("find_largest" + name, find_largest_kernel, warps, chunk, filters),
                _case("split" + name, split_kernel, 4, chunk, filters),
            ]
        cases += [
            _case(f"weigh {number} {chunk}", weigh_kernel, warps, chunk, True, number)
            for number in (0, 1)
        ]
    for random, filters in ((False, False), (True, False), (True, True)):
        name = "choose" + " random" * random + " filters" * filters
        cases.append(_case(name, choose_kernel, 8, _CHUNK, filters, random=random))
    return cases


def _case(
    name: str,
    kernel: Any,
    num_warps: int,
    chunk: int,
    filters: bool,
    number: int = 0,
    *,
    random: bool = True,
) -> CompileCase:
    signature = {
        "logits": "*fp32",
        "is_greedy": "*i1",
        "temperature": "*fp32",
        "min_p": "*fp32",
        "top_k": "*i64",
        "top_p": "*fp64",
        "seed": "*i64",
        "position": "*i64",
        "chunk_values": "*fp32",
        "chunk_ids": "*i32",
        "state": "*i64",
        "listed": "*i32",
        "token_ids": "*i64",
        "is_valid": "*i1",
        "logits_stride": "i32:16",
    }
    constants = {
        "VOCAB_SIZE": 128256,
        "NUM_CHUNKS": cdiv(128256, chunk),
        "MAX_CHUNKS": 128,
        "MAX_LISTED": _MAX_LISTED,
        "CHUNK": chunk,
        "TILE": _TILE,
        "BLOCK": _BLOCK,
        "PASS": number,
        "RANDOM": random,
        "FILTERS": filters,
    }
    names = kernel.arg_names
    return CompileCase(
        f"sample: {name}",
        kernel,
        {name: kind for name, kind in signature.items() if name in names},
        {name: value for name, value in constants.items() if name in names},
        num_warps,
        num_stages=1,
    )
