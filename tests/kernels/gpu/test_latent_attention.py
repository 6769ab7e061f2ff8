"""Attention to latents against a dense one in float64, and against itself for the same bits."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import pytest
import torch

from tokenmill.kernels.gpu.attention_config import (
    AttentionConfig,
    TileConfig,
    choose_latent_config,
)
from tokenmill.kernels.gpu.latent_attention import (
    latent_attention,
    latent_attention_reference,
    latent_workspace_size,
    plan_latent_attention,
    tile_groups,
)

NAN = float("nan")
FLOAT8 = torch.float8_e4m3fn
TILE = TileConfig(16, 16, num_warps=4, num_stages=2)
SMALL = AttentionConfig(TILE, TILE, exact=True, partition=32, programs_per_sm=1)
"""Tiles that a short sequence fills; the interpreter is slow."""
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}


@dataclass(frozen=True)
class Case:
    """A layer."""

    num_heads: int = 6
    rotated: int = 8
    value_size: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    scale: float = 0.3
    k_scale: float = 1.0
    config: AttentionConfig = field(default=SMALL)


CASES = {
    "several tokens a tile": Case(),
    "one head": Case(num_heads=1, value_size=24, rotated=16),
    "more heads than rows": Case(num_heads=20, block_size=64),
    "bfloat16, odd blocks": Case(num_heads=16, block_size=24, dtype=torch.bfloat16, rotated=20),
    "float8": Case(dtype=torch.bfloat16, cache_dtype=FLOAT8, k_scale=0.7, block_size=32),
    "large scores": Case(scale=30.0, dtype=torch.float16),
}
BATCH = [(5, 5), (1, 75), (0, 40), (9, 50), (2, 64), (1, 1)]
"""(tokens of this step, length with them) of each request."""


class Step:
    """A batch on a device whose cache holds random keys, and NaN elsewhere."""

    def __init__(self, case: Case, batch: list[tuple[int, int]], device: str) -> None:
        self.case, self.batch, self.device = case, batch, device
        size, key_size = case.block_size, case.rotated + case.value_size
        used = [-(-length // size) for _, length in batch]
        free = (1 + torch.randperm(sum(used) + 1)).tolist()
        table = torch.full((len(batch), max(used) + 1), free.pop(), dtype=torch.int32)
        cache = torch.full((sum(used) + 2, 1, size, 1, key_size), NAN)
        for req, (_, length) in enumerate(batch):
            blocks = torch.tensor([free.pop() for _ in range(used[req])], dtype=torch.int64)
            table[req, : used[req]] = blocks
            at = torch.arange(length)
            cache[blocks[at // size], :, at % size] = torch.randn(length, 1, 1, key_size)
        self.table = table.to(device)
        self.cache = cache.to(case.cache_dtype or case.dtype).to(device)
        num_tokens = sum(n for n, _ in batch)
        self.query = torch.randn(num_tokens, case.num_heads * key_size).to(case.dtype).to(device)
        self.starts = torch.tensor([0] + [n for n, _ in batch]).cumsum(0).int().to(device)
        self.seq_lens = torch.tensor([n for _, n in batch], dtype=torch.int32, device=device)

    @property
    def options(self) -> dict[str, object]:
        return {
            "rotated": self.case.rotated,
            "scale": self.case.scale,
            "k_scale": self.case.k_scale,
            "max_query_len": max(n for n, _ in self.batch),
            "max_seq_len": max(n for _, n in self.batch),
        }

    def workspace(self, max_seq_len: int | None = None, **options: int) -> torch.Tensor:
        size = latent_workspace_size(
            len(self.batch),
            self.case.num_heads,
            self.case.value_size,
            max_seq_len or max(n for _, n in self.batch),
            max_split_query_len=5,
            config=self.case.config,
            **options,
        )
        return torch.full((size,), NAN, device=self.device)

    def new_out(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        shape = len(self.query), self.case.num_heads * self.case.value_size
        return torch.full(shape, NAN, dtype=dtype or self.case.dtype, device=self.device)

    def attend(self, workspace: torch.Tensor | None = None, **options: object) -> torch.Tensor:
        out = self.new_out()
        latent_attention(
            self.query,
            self.cache,
            self.table,
            self.seq_lens,
            self.starts,
            out,
            workspace=self.workspace() if workspace is None else workspace,
            config=self.case.config,
            **self.options | options,
        )
        return out

    def expected(self) -> torch.Tensor:
        out = self.new_out(torch.float64)
        tables = (self.table, self.seq_lens, self.starts)
        latent_attention_reference(self.query, self.cache, *tables, out, **self.options)
        return out

    def part(self, req: int, start: int, end: int) -> Step:
        """The step that computes positions start to end of one request alone."""
        query_len, length = self.batch[req]
        first = int(self.starts[req]) + start - (length - query_len)
        step = object.__new__(Step)
        step.__dict__ = self.__dict__ | {
            "batch": [(end - start, end)],
            "table": self.table[req : req + 1],
            "query": self.query[first : first + end - start],
            "starts": torch.tensor([0, end - start], dtype=torch.int32, device=self.device),
            "seq_lens": torch.tensor([end], dtype=torch.int32, device=self.device),
        }
        return step


def check(step: Step) -> None:
    tolerance = TOLERANCE[step.case.dtype] * max(1.0, step.case.scale)
    torch.testing.assert_close(
        step.attend().double(), step.expected(), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("name", CASES)
def test_equals_dense_attention(name: str, device: str) -> None:
    check(Step(CASES[name], BATCH, device))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_tiles_of_real_models(dtype: torch.dtype, device: str) -> None:
    config = choose_latent_config(dtype)
    case = Case(16, 64, 512, 64, dtype, scale=192**-0.5, config=config)
    check(Step(case, [(1, 270), (5, 33)], device))


def test_heads_are_cut_evenly() -> None:
    assert [tile_groups(n, SMALL) for n in (1, 6, 16, 20, 32, 34, 128)] == [1, 1, 1, 2, 2, 17, 8]


@pytest.mark.parametrize("name", ["several tokens a tile", "more heads than rows"])
def test_whole_in_pieces_and_decoded(name: str, device: str) -> None:
    case = replace(CASES[name], config=replace(SMALL, partition=16))
    step = Step(case, [(36, 36)], device)
    whole = step.attend()
    for cuts in ([0, 1, 17, 35, 36], [0, 16, 18, 32, 33, 36]):
        pieces = [step.part(0, a, b).attend() for a, b in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(pieces), whole)


def test_a_request_has_the_same_bits_alone_and_without_room(device: str) -> None:
    batch = [(7, 20), (1, 70), (0, 9), (2, 40)]
    step = Step(CASES["several tokens a tile"], batch, device)
    together = step.attend()
    for req, ((query_len, length), rows) in enumerate(
        zip(batch, together.split([n for n, _ in batch]), strict=True)
    ):
        if query_len:
            assert torch.equal(step.part(req, length - query_len, length).attend(), rows)
    for max_values in (0, 700):
        assert torch.equal(step.attend(step.workspace(max_values=max_values)), together)
    larger = step.attend(step.workspace(max_seq_len=1000), max_seq_len=1000)
    assert torch.equal(larger, together)


def test_padding_writes_nothing_and_a_plan_serves_many_layers(device: str) -> None:
    step = Step(CASES["several tokens a tile"], [(1, 40), (1, 3), (0, 0)], device)
    expected = step.attend()
    step.query = torch.cat([step.query, torch.full_like(step.query, NAN)])
    workspace = step.workspace()
    plan_latent_attention(
        step.starts, step.seq_lens, workspace, num_heads=6, value_size=32, config=SMALL
    )
    for _ in range(2):
        found = step.attend(workspace, planned=True)
        assert torch.equal(found[:2], expected)
        assert found[2:].isnan().all()


def test_nothing_to_do(device: str) -> None:
    assert Step(CASES["one head"], [(0, 0), (0, 7)], device).attend().shape == (0, 24)


def test_torch_op(device: str) -> None:
    case = replace(CASES["several tokens a tile"], config=choose_latent_config(torch.float32))
    step = Step(case, BATCH[:2], device)
    out = step.new_out()
    tables = step.table, step.seq_lens, step.starts
    torch.ops.tokenmill.latent_attention(
        step.query, step.cache, *tables, out, workspace=step.workspace(), **step.options
    )
    torch.testing.assert_close(out.double(), step.expected(), atol=5e-6, rtol=5e-6)
