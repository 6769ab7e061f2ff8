"""Cores that are killed or break: nobody but the guilty notices."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
import uvloop

from helpers.served import collect, prompt_of, serving, until, until_idle
from helpers.served_core import MARKER, Fault, expected_ids
from tokenmill.errors import EngineDeadError
from tokenmill.sampling_params import SamplingParams


def params(max_tokens: int = 8, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **more)


async def finished(llm, number, count=8):
    """Whether an ordinary request gets what it should."""
    got = await collect(llm, prompt_of(number), params(count))
    return got.token_ids == expected_ids(prompt_of(number), count)


@pytest.mark.parametrize(
    ("async_scheduling", "loop_factory"),
    [(False, asyncio.new_event_loop), (True, uvloop.new_event_loop)],
)
def test_streams_outlive_cores_that_are_killed(async_scheduling, loop_factory):
    async def main():
        async with serving(max_num_seqs=8, async_scheduling=async_scheduling) as llm:
            tasks = [
                asyncio.create_task(
                    collect(
                        llm,
                        prompt_of(i, 20),
                        params(80 + i, logprobs=0, prompt_logprobs=0 if i % 2 else None),
                    )
                )
                for i in range(16)
            ]
            for _ in range(2):
                await asyncio.sleep(0.15)
                assert llm.core_pid is not None
                os.kill(llm.core_pid, signal.SIGKILL)
                await until(lambda: not llm.is_healthy)
                assert not llm.is_ready
                await until(lambda: llm.is_ready)
            for i, got in enumerate(await asyncio.gather(*tasks)):
                assert got.token_ids == expected_ids(prompt_of(i, 20), 80 + i)
                assert len(got.logprobs) == 80 + i
                assert (got.prompt_logprobs is None) == (i % 2 == 0)
                assert got.finish_reason == "length"
            stats = await llm.stats()
            assert stats.num_restarts == 2
            assert stats.num_errors == 0
            await until_idle(llm)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


def test_counters_go_on_where_the_dead_core_stopped():
    async def main():
        async with serving() as llm:
            assert await finished(llm, 1)
            before = await llm.stats()
            assert before.prefix_cache_queries == 8
            os.kill(llm.core_pid, signal.SIGKILL)
            await until(lambda: not llm.is_healthy)
            assert (await llm.stats()).prefix_cache_queries == 8
            assert await finished(llm, 1)  # taken while there is no core
            assert (await llm.stats()).prefix_cache_queries == 16

    asyncio.run(main())


@pytest.mark.parametrize("fault", [Fault.KILL, Fault.KILL_LATER, Fault.RAISE])
def test_a_request_that_breaks_the_core_ends_alone(fault):
    """Streams and queue of everyone else do not notice."""

    async def main():
        async with serving(max_num_seqs=6, options={"max_restart_delay": 0.05}) as llm:
            others = [asyncio.create_task(collect(llm, prompt_of(i), params(60))) for i in range(8)]
            await asyncio.sleep(0.05)
            bad = await collect(llm, [fault, *prompt_of(50)], params(20))
            assert bad.finish_reason == "error"
            assert "died twice" in bad.error
            assert bad.token_ids == expected_ids([fault, *prompt_of(50)], len(bad.token_ids))
            for i, got in enumerate(await asyncio.gather(*others)):
                assert got.token_ids == expected_ids(prompt_of(i), 60)
            assert (await llm.stats()).num_restarts <= 4
            await until_idle(llm)

    asyncio.run(main())


def test_a_fault_that_needs_company_is_outlived():
    """Alone such requests pass every trial; each later trial lasts longer."""

    async def main():
        async with serving(options={"max_restart_delay": 0.05}) as llm:
            prompts = [[Fault.KILL_IN_COMPANY, *prompt_of(i)] for i in range(2)]
            bad = [collect(llm, prompt, params(40)) for prompt in prompts]
            good = [collect(llm, prompt_of(10 + i), params(40)) for i in range(3)]
            results = await asyncio.gather(*bad, *good)
            expected = [*prompts, *(prompt_of(10 + i) for i in range(3))]
            for got, prompt in zip(results, expected, strict=True):
                assert got.token_ids == expected_ids(prompt, 40)
            assert 1 < (await llm.stats()).num_restarts <= 5

    asyncio.run(main())


def test_after_too_many_restarts_the_engine_is_dead():
    async def main():
        deaths = []
        async with serving(options={"max_restarts": 1}) as llm:
            llm.on_death(lambda: deaths.append(1))
            task = asyncio.create_task(collect(llm, prompt_of(1), params(480)))
            for _ in range(2):
                await until(lambda: llm.is_ready)
                os.kill(llm.core_pid, signal.SIGKILL)
                await until(lambda: not llm.is_ready)
            with pytest.raises(EngineDeadError, match=r"SIGKILL.*1 times.*max_restarts"):
                await task
            assert deaths == [1]
            assert not llm.is_healthy
            with pytest.raises(EngineDeadError, match="max_restarts"):
                await collect(llm, prompt_of(1), params())
            with pytest.raises(EngineDeadError, match="max_restarts"):
                await llm.reset_prefix_cache()
            llm.on_death(lambda: deaths.append(2))
            await until(lambda: deaths == [1, 2])
            assert (await llm.stats()).num_unfinished == 0

    asyncio.run(main())


def test_restarts_that_fail_count_and_the_pauses_grow(tmp_path, monkeypatch):
    monkeypatch.setenv(MARKER, str(tmp_path / "marker"))

    async def main():
        options = {"max_restarts": 3, "max_restart_delay": 0.7}
        async with serving(factory="starts_once", options=options) as llm:
            dead = asyncio.Event()
            llm.on_death(dead.set)
            task = asyncio.create_task(collect(llm, prompt_of(1), params(400)))
            await asyncio.sleep(0.1)
            began = time.monotonic()
            os.kill(llm.core_pid, signal.SIGKILL)
            await dead.wait()
            assert time.monotonic() - began > 0.5 + 0.7
            with pytest.raises(EngineDeadError, match="could not be started again"):
                await task

    asyncio.run(main())


def test_deadlines_and_leaving_work_while_there_is_no_core(tmp_path, monkeypatch):
    monkeypatch.setenv(MARKER, str(tmp_path / "marker"))

    async def main():
        options = {"max_restarts": 100, "max_restart_delay": 0.3}
        async with serving(factory="starts_once", options=options) as llm:
            os.kill(llm.core_pid, signal.SIGKILL)
            await until(lambda: not llm.is_healthy)
            late = await collect(llm, prompt_of(1), params(), deadline=0.3)
            assert (late.finish_reason, late.token_ids) == ("abort", [])
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(collect(llm, prompt_of(1), params()), 0.2)
            assert (await llm.stats()).num_unfinished == 0
            waits = asyncio.create_task(collect(llm, prompt_of(2), params()))
            await asyncio.sleep(0.1)
            os.remove(tmp_path / "marker")
            assert (await waits).token_ids == expected_ids(prompt_of(2), 8)

    asyncio.run(main())
