"""Paged attention against a dense one in float64, and against itself for the same bits."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace

import pytest
import torch

from tokenmill.kernels.gpu.attention import paged_attention
from tokenmill.kernels.gpu.attention_config import AttentionConfig, TileConfig, choose_config
from tokenmill.kernels.gpu.attention_launch import plan_attention, workspace_size
from tokenmill.kernels.gpu.attention_reference import paged_attention_reference

NAN = float("nan")
FLOAT8 = torch.float8_e4m3fn
SMALL = AttentionConfig(
    split=TileConfig(16, 16, num_warps=4, num_stages=2),
    prefill=TileConfig(32, 32, num_warps=4, num_stages=2),
    exact=False,
    partition=32,
    programs_per_sm=1,
)
"""Tiles that a short sequence fills; the interpreter is slow."""
EXACT = AttentionConfig(
    split=TileConfig(64, 16, num_warps=4, num_stages=2),
    prefill=TileConfig(64, 16, num_warps=4, num_stages=2),
    exact=True,
    partition=32,
)
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}


@dataclass
class Case:
    """A layer."""

    num_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    window: int | None = None
    cap: float | None = None
    has_sinks: bool = False
    scale: float = 0.3
    k_scale: float = 1.0
    v_scale: float = 1.0
    causal: bool = True
    config: AttentionConfig = field(default_factory=lambda: SMALL)


CASES = {
    "grouped": Case(),
    "one head each": Case(num_heads=2, head_size=24),
    "large group": Case(num_heads=20, num_kv_heads=1, config=replace(SMALL, split=EXACT.split)),
    "head size 80": Case(num_heads=4, head_size=80, block_size=32),
    "a block holds tiles": Case(block_size=64, head_size=64, dtype=torch.float16),
    "odd blocks": Case(block_size=24, dtype=torch.bfloat16),
    "window": Case(window=21),
    "window of one": Case(window=1, block_size=8),
    "soft cap": Case(cap=1.5),
    "sinks": Case(has_sinks=True, window=20, dtype=torch.bfloat16, block_size=32),
    "large scores": Case(scale=30.0, has_sinks=True),
    "not causal": Case(causal=False),
    "float8": Case(kv_dtype=FLOAT8, dtype=torch.bfloat16, k_scale=0.3, v_scale=0.7),
    "float8, float16": Case(kv_dtype=FLOAT8, dtype=torch.float16, v_scale=3.0, block_size=32),
    "exact": Case(config=EXACT, dtype=torch.bfloat16),
    "exact window": Case(config=EXACT, window=30, has_sinks=True, cap=5.0),
}
BATCH = [(5, 5), (12, 37), (1, 75), (0, 40), (23, 50), (2, 64), (1, 1)]
"""(tokens of this step, length with them) of each request. 5 and 2 tokens and fewer are split."""
SHORT_BATCH = [(7, 20), (1, 70), (0, 9), (2, 33)]


class Step:
    """A batch on a device whose cache holds random keys and values, and NaN elsewhere."""

    def __init__(self, case: Case, batch: list[tuple[int, int]], device: str, seed: int = 0):
        self.case, self.batch, self.device = case, batch, device
        generator = torch.Generator().manual_seed(seed)
        shuffler = random.Random(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        size, heads, dim = case.block_size, case.num_kv_heads, case.head_size
        used = [-(-length // size) for _, length in batch]
        free = list(range(1, sum(used) + 3))
        shuffler.shuffle(free)
        table = torch.full((len(batch), max(used) + 1), free.pop(), dtype=torch.int32)
        cache = torch.full((sum(used) + 3, 2, size, heads, dim), NAN)
        for req, (_, length) in enumerate(batch):
            blocks = torch.tensor([free.pop() for _ in range(used[req])], dtype=torch.int64)
            table[req, : used[req]] = blocks
            at = torch.arange(length)
            cache[blocks[at // size], :, at % size] = draw(length, 2, heads, dim)
        self.table = table.to(device)
        self.cache = cache.to(case.kv_dtype or case.dtype).to(device)
        num_tokens = sum(n for n, _ in batch)
        self.query = draw(num_tokens, case.num_heads * dim).to(case.dtype).to(device)
        self.starts = torch.tensor([0] + [n for n, _ in batch]).cumsum(0).int().to(device)
        self.seq_lens = torch.tensor([n for _, n in batch], dtype=torch.int32, device=device)
        self.sinks = draw(case.num_heads).to(device) if case.has_sinks else None

    @property
    def options(self) -> dict[str, object]:
        case = self.case
        return {
            "scale": case.scale,
            "sliding_window": case.window,
            "logits_soft_cap": case.cap,
            "sinks": self.sinks,
            "k_scale": case.k_scale,
            "v_scale": case.v_scale,
            "causal": case.causal,
        }

    def workspace(self, max_seq_len: int | None = None, **options: int) -> torch.Tensor:
        case = self.case
        size = workspace_size(
            len(self.batch),
            case.num_heads,
            case.num_kv_heads,
            case.head_size,
            max_seq_len or max(n for _, n in self.batch),
            max_split_query_len=5,
            partition=case.config.partition,
            **options,
        )
        return torch.full((size,), NAN, device=self.device)

    def attend(
        self,
        *,
        workspace: torch.Tensor | None = None,
        max_seq_len: int | None = None,
        planned: bool = False,
        query: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.full_like(self.query, NAN)
        paged_attention(
            self.query if query is None else query,
            self.cache,
            self.table,
            self.seq_lens,
            self.starts,
            out,
            workspace=self.workspace() if workspace is None else workspace,
            max_query_len=max(n for n, _ in self.batch),
            max_seq_len=max_seq_len or max(n for _, n in self.batch),
            config=self.case.config,
            planned=planned,
            **self.options,
        )
        return out

    def expected(self) -> torch.Tensor:
        out = torch.full(self.query.shape, NAN, dtype=torch.float64, device=self.device)
        tables = (self.table, self.seq_lens, self.starts)
        paged_attention_reference(self.query, self.cache, *tables, out, **self.options)
        return out

    def part(self, req: int, start: int, end: int) -> Step:
        """The step that computes positions start to end of one request alone."""
        query_len, length = self.batch[req]
        first = int(self.starts[req]) + start - (length - query_len)
        assert start >= length - query_len
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
    tolerance = TOLERANCE[step.case.dtype] * max(1.0, step.case.scale, step.case.v_scale)
    torch.testing.assert_close(
        step.attend().double(), step.expected(), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("name", CASES)
def test_equals_dense_attention(name, device):
    check(Step(CASES[name], BATCH, device))


@pytest.mark.parametrize("seed", range(4))
def test_random_steps(seed, device):
    chooser = random.Random(seed)
    group, num_kv_heads = chooser.choice([1, 3, 4, 7]), chooser.choice([1, 2, 3])
    case = Case(
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_size=chooser.choice([16, 40, 64]),
        block_size=chooser.choice([4, 16, 32, 128]),
        window=chooser.choice([None, None, 7, 50]),
        dtype=chooser.choice(list(TOLERANCE)),
        has_sinks=chooser.random() < 0.3,
        cap=chooser.choice([None, None, 3.0]),
    )
    lengths = [chooser.randint(1, 90) for _ in range(chooser.randint(1, 5))]
    batch = [(chooser.choice([1, 1, chooser.randint(0, min(n, 30))]), n) for n in lengths]
    check(Step(case, batch, device, seed))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_tiles_of_real_models(dtype, exact, device):
    config = choose_config(4, 128, dtype, exact=exact)
    case = Case(8, 2, 128, 64, dtype, scale=128**-0.5, config=config)
    check(Step(case, [(1, 270), (20, 90)], device))


def test_without_room_for_partial_results_the_bits_are_the_same(device):
    step = Step(CASES["grouped"], SHORT_BATCH, device)
    full = step.attend()
    for max_values in (0, 700):
        assert torch.equal(step.attend(workspace=step.workspace(max_values=max_values)), full)


def test_bounds_of_a_graph_do_not_change_the_bits(device):
    step = Step(CASES["grouped"], SHORT_BATCH, device)
    found = step.attend(max_seq_len=1000, workspace=step.workspace(max_seq_len=1000))
    assert torch.equal(found, step.attend())


@pytest.mark.parametrize("name", ["grouped", "sinks", "exact"])
def test_a_request_has_the_same_bits_alone(name, device):
    step = Step(CASES[name], SHORT_BATCH, device)
    together = step.attend().split([n for n, _ in SHORT_BATCH])
    for req, (query_len, length) in enumerate(SHORT_BATCH):
        if query_len:
            alone = step.part(req, length - query_len, length).attend()
            assert torch.equal(alone, together[req])


@pytest.mark.parametrize("name", ["exact", "exact window"])
def test_exact_whole_in_pieces_and_decoded(name, device):
    step = Step(CASES[name], [(80, 80)], device)
    whole = step.attend()
    for cuts in ([0, 1, 33, 79, 80], [0, 31, 32, 33, 64, 65, 80]):
        pieces = [step.part(0, a, b).attend() for a, b in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("name", ["grouped", "window", "sinks", "exact", "exact window"])
def test_partitions_in_one_loop_give_the_same_bits(name, device):
    batch = [(1, 150), (2, 64), (1, 33), (1, 1), (1, 97)]
    apart = Step(CASES[name], batch, device)
    config = replace(CASES[name].config, one_loop=True)
    in_one_loop = Step(replace(CASES[name], config=config), batch, device)
    expected = apart.attend()
    assert torch.equal(in_one_loop.attend(), expected)
    no_room = in_one_loop.workspace(max_values=0)
    assert torch.equal(in_one_loop.attend(workspace=no_room), expected)


def test_padding_writes_nothing(device):
    step = Step(CASES["grouped"], [(1, 40), (1, 3), (0, 0), (0, 0)], device)
    padded = replace_query(step, torch.cat([step.query, torch.full_like(step.query, NAN)]))
    found = padded.attend()
    assert torch.equal(found[:2], step.attend())
    assert found[2:].isnan().all()


def test_nothing_to_do(device):
    assert Step(CASES["grouped"], [(0, 0), (0, 7)], device).attend().shape == (0, 192)
    nothing = replace_query(Step(CASES["grouped"], [(0, 0)], device), torch.zeros(3, 192))
    assert nothing.attend().isnan().all()


def replace_query(step: Step, query: torch.Tensor) -> Step:
    changed = object.__new__(Step)
    changed.__dict__ = step.__dict__ | {"query": query.to(step.device)}
    return changed


def test_rows_and_blocks_may_lie_apart(device):
    step = Step(CASES["grouped"], SHORT_BATCH, device)
    expected = step.attend()
    wide = torch.full((len(step.query), 400), NAN, device=device)
    wide[:, 10:202] = step.query
    step.cache = torch.stack([step.cache, torch.full_like(step.cache, NAN)], 1)[:, 0]
    assert not step.cache.is_contiguous()
    assert torch.equal(step.attend(query=wide[:, 10:202]), expected)


def test_a_plan_serves_many_layers(device):
    step = Step(CASES["window"], SHORT_BATCH, device)
    workspace = step.workspace()
    plan_attention(
        step.starts,
        step.seq_lens,
        workspace,
        num_heads=6,
        num_kv_heads=2,
        head_size=32,
        sliding_window=21,
        config=SMALL,
    )
    expected = step.attend()
    for _ in range(2):
        assert torch.equal(step.attend(workspace=workspace, planned=True), expected)


def test_torch_op(device):
    step = Step(Case(config=choose_config(3, 32, torch.float32, exact=False)), BATCH[:3], device)
    out = torch.full_like(step.query, NAN)
    torch.ops.tokenmill.paged_attention(
        step.query,
        step.cache,
        step.table,
        step.seq_lens,
        step.starts,
        out,
        workspace=step.workspace(),
        max_query_len=12,
        max_seq_len=75,
        **step.options,
    )
    torch.testing.assert_close(out.double(), step.expected(), atol=5e-6, rtol=5e-6)
