"""A step's inputs, gathered from the tables of the running requests, and the tables' updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpucheck.cases.case import SAME, Case, Place, Result

LENGTHS = {"decode": (256, 1), "prompts": (8, 1_024), "one prompt": (1, 8_192)}
"""(requests, tokens of each)"""
SMALL_LENGTHS = {"decode": (3, 1), "prompts": (2, 5)}
BLOCK_SIZE = 16


def cases(place: Place) -> Iterator[Case]:
    lengths = SMALL_LENGTHS if place.small else LENGTHS
    for name, (num_requests, each) in lengths.items():
        yield from _steps(place, name, num_requests, each)
    yield _write_segments(place)
    yield _commit_tokens(place)
    yield _gather_rows(place)


def _steps(place: Place, name: str, num_requests: int, each: int) -> Iterator[Case]:
    """The kernels that prepare a step, with two padded requests and three padded tokens."""
    from tokenmill.kernels.gpu import inputs, inputs_reference

    max_seqs, max_len = num_requests + 2, each + (40 if place.small else 1_000)
    max_blocks = -(-max_len // BLOCK_SIZE)
    order = torch.randperm(max_seqs, device=place.device).int()
    rows = torch.cat([order[:num_requests], order.new_full((2,), -1)])
    starts = (torch.arange(num_requests + 3, device=place.device) * each).int()
    starts[num_requests + 1 :] = num_requests * each
    lens = place.integers(max_len - each, num_requests + 2) + each
    lens[num_requests:] = 0
    num_tokens = num_requests * each + 3
    given = {
        "rows": rows,
        "query_start_loc": starts,
        "seq_lens": lens,
        "token_ids": place.integers(128_256, max_seqs, max_len),
        "block_ids": place.integers(10_000, max_seqs, max_blocks),
    }

    def outputs() -> dict[str, torch.Tensor]:
        return {
            "input_ids": place.poisoned(num_tokens, dtype=torch.int32),
            "positions": place.poisoned(num_tokens, dtype=torch.int64),
            "slot_mapping": place.poisoned(num_tokens, dtype=torch.int64),
            "block_table": place.poisoned(num_requests + 2, max_blocks, dtype=torch.int32),
        }

    prepared = outputs()
    positions = prepared["positions"]
    inputs_reference.prepare_inputs_reference(
        *(_on_cpu(given[name]) for name in ("rows", "query_start_loc", "seq_lens", "token_ids")),
        torch.empty(num_tokens, dtype=torch.int32),
        on_cpu := torch.empty(num_tokens, dtype=torch.int64),
    )
    positions.copy_(on_cpu)
    known = given | {"positions": positions}
    arguments = {
        "prepare_inputs": ("rows query_start_loc seq_lens token_ids", "input_ids positions"),
        "map_slots": ("rows query_start_loc positions block_ids", "slot_mapping"),
        "gather_block_table": ("rows seq_lens block_ids", "block_table"),
        "prepare_step": (
            "rows query_start_loc seq_lens token_ids block_ids",
            "input_ids positions slot_mapping block_table",
        ),
    }
    for op, (read, written) in arguments.items():
        taken = {key: known[key] for key in read.split()}
        out = {key: tensor for key, tensor in outputs().items() if key in written.split()}
        sizes = {"block_size": BLOCK_SIZE} if "block_ids" in taken else {}
        yield _equal_case(
            op,
            f"{name}, {num_requests} x {each}",
            getattr(inputs, op),
            getattr(inputs_reference, f"{op}_reference"),
            {**taken, **out, **sizes},
            list(out),
        )


def _equal_case(
    op: str,
    sizes: str,
    kernel: Callable[..., None],
    reference: Callable[..., None],
    arguments: dict[str, Any],
    written: list[str],
) -> Case:
    """A kernel that moves integers, whose reference takes the same arguments on the CPU."""
    before = {name: _on_cpu(value) for name, value in arguments.items()}

    def results() -> Iterator[Result]:
        reference(**before)
        for name in written:
            yield _on_cpu(arguments[name]), before[name], SAME

    return Case(op, sizes, lambda i: kernel(**arguments), results)


def _on_cpu(value: Any) -> Any:
    """A copy of a tensor; anything else as it is."""
    return value.clone().cpu() if isinstance(value, torch.Tensor) else value


def _write_segments(place: Place) -> Case:
    from tokenmill.kernels.gpu.inputs_reference import write_segments_reference
    from tokenmill.kernels.gpu.tables import write_segments

    count, width = (3, 20) if place.small else (256, 4_096)
    lengths = place.integers(width, count)
    bounds = torch.cat([lengths.new_zeros(1), lengths.cumsum(0).int()])
    starts = torch.randperm(count, device=place.device) * width
    arguments = {
        "table": place.poisoned(count * width, dtype=torch.int32),
        "data": place.integers(128_256, int(bounds[-1]) + 5),
        "dst_start": starts,
        "src_start": bounds,
    }
    sizes = f"{count} of up to {width}"
    return _equal_case(
        "write_segments", sizes, write_segments, write_segments_reference, arguments, ["table"]
    )


def _commit_tokens(place: Place) -> Case:
    from tokenmill.kernels.gpu.inputs_reference import commit_tokens_reference
    from tokenmill.kernels.gpu.tables import commit_tokens

    count, width = (3, 20) if place.small else (256, 8_192)
    arguments = {
        "token_ids": place.poisoned(count, width, dtype=torch.int32),
        "rows": torch.randperm(count, device=place.device).int(),
        "positions": place.integers(width + 3, count, dtype=torch.int64),
        "sampled": place.integers(128_256, count, dtype=torch.int64),
        "is_due": place.integers(4, count) > 0,
    }
    return _equal_case(
        "commit_tokens",
        str(count),
        commit_tokens,
        commit_tokens_reference,
        arguments,
        ["token_ids"],
    )


def _gather_rows(place: Place) -> Case:
    from tokenmill.kernels.gpu.inputs_reference import gather_rows_reference
    from tokenmill.kernels.gpu.tables import gather_rows

    count, size = (3, 40) if place.small else (256, 4_096)
    indices = place.integers(2 * count, count, dtype=torch.int64)
    indices[-1] = -1
    out = place.randn(count, size)
    arguments = {"table": place.randn(2 * count, size), "indices": indices, "out": out}
    case = _equal_case(
        "gather_rows", f"{count} x {size}", gather_rows, gather_rows_reference, arguments, ["out"]
    )
    return Case(case.op, case.sizes, case.launch, case.results, num_bytes=2 * out.nbytes)
