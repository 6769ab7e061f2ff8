"""Steps that only decode, made in native calls: the tokens of the runner's own steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny import write_wide_llama
from tokenmill import LLM, SamplingParams
from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.kernels import native
from tokenmill.worker.decode_steps import NoDecodeSteps
from tokenmill.worker.graphs.decode import CheckedDecodeSteps, NativeDecodeSteps
from tokenmill.worker.model_runner import ModelRunner
from tokenmill.worker.results import BAD_LOGITS

needs_kernels = pytest.mark.skipif(not native.is_available(), reason="needs the native kernels")


@pytest.fixture(scope="module")
def wide_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wide_llama(tmp_path_factory.mktemp("wide"))


def prompts(count: int) -> list[list[int]]:
    return [[(i * 37 + 11 * j) % 390 + 3 for j in range(3 + 7 * i % 50)] for i in range(count)]


def params(place: int, **asked: Any) -> SamplingParams:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.8, "seed": place},
        {"temperature": 1.3, "top_k": 7, "min_p": 0.05, "seed": place},
        {"temperature": 0.4, "seed": place},
    ]
    return SamplingParams(max_tokens=9 + place % 5, ignore_eos=True, **kinds[place % 4], **asked)


@contextmanager
def engine(path: Path, **settings: Any) -> Iterator[tuple[LLM, ModelRunner]]:
    defaults: dict[str, Any] = {"num_kv_blocks": 400, "max_num_seqs": 8}
    with LLM(str(path), **(defaults | settings)) as llm:
        core: Any = llm.llm_engine._client
        yield llm, core.core._executor._worker.runner


class Counted:
    """Counts the steps that were taken."""

    def __init__(self, steps: Any) -> None:
        self._steps = steps
        self.num_taken = 0

    def run(self, plan: SchedulerOutput) -> bool:
        taken: bool = self._steps.run(plan)
        self.num_taken += taken
        return taken

    def commit(self) -> Any:
        return self._steps.commit()


def texts_of(llm: LLM, asked: list[SamplingParams]) -> list[tuple[int, ...]]:
    outputs = llm.generate(prompts(len(asked)), asked, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@needs_kernels
@pytest.mark.parametrize("num_threads", [1, 2])
def test_native_steps_bring_the_tokens_of_the_runner(wide_llama: Path, num_threads: int) -> None:
    asked = [params(place) for place in range(8)]
    with engine(wide_llama, enforce_eager=True) as (llm, runner):
        assert isinstance(runner._decode_steps, NoDecodeSteps)
        expected = texts_of(llm, asked)
    with engine(wide_llama, num_threads=num_threads) as (llm, runner):
        assert isinstance(runner._decode_steps, NativeDecodeSteps)
        runner._decode_steps = counted = Counted(runner._decode_steps)
        assert texts_of(llm, asked) == expected
        assert counted.num_taken >= 8
        assert runner.graph_stats.num_direct == 0


@needs_kernels
def test_more_requests_than_logits_are_computed_at_once(wide_llama: Path) -> None:
    asked = [params(place) for place in range(70)]
    with engine(wide_llama, max_num_seqs=70) as (llm, runner):
        runner._decode_steps = counted = Counted(runner._decode_steps)
        together = texts_of(llm, asked)
        assert counted.num_taken >= 8
    with engine(wide_llama, max_num_seqs=70, enforce_eager=True) as (llm, _):
        assert texts_of(llm, asked) == together


@needs_kernels
@pytest.mark.parametrize(
    "wish",
    [{"logprobs": 1}, {"presence_penalty": 0.5}, {"logit_bias": {5: 2.0}}, {"min_tokens": 4}],
)
def test_who_asks_for_more_than_tokens_gets_it(wide_llama: Path, wish: dict[str, Any]) -> None:
    """A request without wishes takes the row of one with a wish, and the other way round."""
    with engine(wide_llama, max_num_seqs=1) as (llm, runner):
        runner._decode_steps = counted = Counted(runner._decode_steps)
        taken = []
        for asked in (params(0), params(0, stop_token_ids=[7], **wish), params(0)):
            texts_of(llm, [asked])
            taken.append(counted.num_taken)
    assert taken[0] == taken[1] == 8
    assert taken[2] == 16


@needs_kernels
def test_the_check_mode_compares_every_step(wide_llama: Path) -> None:
    asked = [params(place) for place in range(4)]
    with engine(wide_llama) as (llm, _):
        expected = texts_of(llm, asked)
    with engine(wide_llama, check_graphs=True) as (llm, runner):
        assert isinstance(runner._decode_steps, CheckedDecodeSteps)
        assert texts_of(llm, asked) == expected


def test_a_difference_is_told() -> None:
    class Draws:
        def run(self, plan: SchedulerOutput) -> bool:
            return True

        def drawn(self) -> tuple[list[list[int]], list[int]]:
            return [[1], [2], [3]], [2]

    steps = CheckedDecodeSteps(Draws(), lambda plan: [[1], [5], [9]])  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=r"places \[1\]"):
        steps.run(SchedulerOutput(0))


def rows_of(llm: LLM) -> list[int]:
    """Of the running requests, in the order of their admission."""
    client: Any = llm.llm_engine._client
    return [request.row for request in client.core.scheduler.running.values()]


def poison_cache(runner: ModelRunner, row: int) -> None:
    """Make the keys and values of a row's first block NaN."""
    block_id = runner._rows.block_tables[0].block_ids[row, 0]
    for layer in runner._model.attention_layers().values():
        assert layer._kv_cache is not None
        layer._kv_cache[block_id] = float("nan")


@needs_kernels
def test_logits_that_are_not_finite_end_their_request_alone(wide_llama: Path) -> None:
    with engine(wide_llama) as (llm, runner):
        expected = texts_of(llm, [params(place) for place in range(3)])
        for place, prompt in enumerate(prompts(3)):
            llm.llm_engine.add_request(str(place), prompt, params(place))
        llm.llm_engine.step()
        runner._decode_steps = counted = Counted(runner._decode_steps)
        poison_cache(runner, rows_of(llm)[1])
        outputs = []
        while llm.llm_engine.has_unfinished_requests():
            outputs += llm.llm_engine.step()
    assert counted.num_taken > 3
    assert runner.num_bad_logits == 1
    last = {output.request_id: output.outputs[0] for output in outputs}
    assert last["1"].finish_reason == "error"
    assert last["1"].error == BAD_LOGITS
    for place in (0, 2):
        assert tuple(last[str(place)].token_ids) == expected[place]


@needs_kernels
def test_a_plan_past_known_tokens_is_refused(wide_llama: Path) -> None:
    with engine(wide_llama, max_num_seqs=1) as (llm, runner):
        assert isinstance(runner._decode_steps, NativeDecodeSteps)
        texts_of(llm, [params(0)])
        runner._rows.clear(0)
        plan = SchedulerOutput(0, ["a"], [0], [1], [1], [True])
        with pytest.raises(ValueError, match="past known tokens"):
            runner._decode_steps.run(plan)
        for other in ([2], [0]):
            plan = SchedulerOutput(0, ["a"], [0], other, other, [bool(other[0])])
            assert not runner._decode_steps.run(plan)
