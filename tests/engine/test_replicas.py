"""Several cores behind one front end: where requests go, and what becomes of them."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from helpers.served import Collected, add_delta, collect, prompt_of, serving, until, until_idle
from helpers.served_core import MARKER, STEP_SECONDS, Fault, expected_ids
from tokenmill.engine.async_llm import AsyncLLM
from tokenmill.errors import EngineDeadError, InvalidRequestError
from tokenmill.sampling_params import SamplingParams


def params(max_tokens: int = 8, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **more)


async def ranks(llm: AsyncLLM, prompt: list[int], max_tokens: int = 2, **more: object) -> list[int]:
    """Who has computed a request, output by output; the outputs are right."""
    found, got = [], Collected()
    async for output in llm.generate(
        prompt, params(max_tokens), request_id="r", delta=True, **more
    ):
        add_delta(got, output)
        found.append(output.data_parallel_rank)
    assert got.token_ids == expected_ids(prompt, max_tokens)
    return found


async def rank(llm: AsyncLLM, prompt: list[int], **more: object) -> int:
    (found,) = set(await ranks(llm, prompt, **more))
    return found


def test_requests_go_where_their_prefix_is():
    async def main():
        async with serving(data_parallel_size=2) as llm:
            assert len(set(llm.core_pids)) == 2
            first, second = prompt_of(1, 64), prompt_of(2, 64)
            home = {1: await rank(llm, first), 2: await rank(llm, second)}
            assert sorted(home.values()) == [0, 1]
            for turn in range(4):
                assert await rank(llm, first + prompt_of(turn, 40)) == home[1]
                assert await rank(llm, second + prompt_of(turn, 40)) == home[2]
            # Another salt, another chain: nothing is known of it, and whoever idles longest has it.
            assert await rank(llm, second, cache_salt="x") == home[1]
            hits = [each.prefix_cache_hits for each in (await llm.stats()).replicas]
            assert min(hits) >= 4 * 64

    asyncio.run(main())


def test_replicas_divide_the_processors():
    async def main():
        async with serving(data_parallel_size=2) as llm:
            ours = os.sched_getaffinity(0)
            shares = [os.sched_getaffinity(pid) for pid in llm.core_pids]
            assert set.union(*shares) == ours
            assert len(ours) < 2 or not set.intersection(*shares)
            assert llm.config.num_threads <= max(len(ours) // 2, 1)

    asyncio.run(main())


def test_a_burst_is_divided_and_a_rank_may_be_asked_for(monkeypatch):
    monkeypatch.setenv(STEP_SECONDS, "0.01")

    async def main():
        async with serving(data_parallel_size=2) as llm:
            bursts = [ranks(llm, prompt_of(i), 10) for i in range(12)]
            counted = [set(each) for each in await asyncio.gather(*bursts)]
            assert counted.count({0}) == counted.count({1}) == 6
            for wanted in (1, 1, 0, 1):
                assert await rank(llm, prompt_of(3), data_parallel_rank=wanted) == wanted
            for wrong in (2, -1):
                with pytest.raises(InvalidRequestError, match="data_parallel_rank=") as caught:
                    await rank(llm, prompt_of(3), data_parallel_rank=wrong)
                assert caught.value.parameter == "data_parallel_rank"
            await until_idle(llm)
            stats = await llm.stats()
            assert stats.num_output_tokens == 12 * 10 + 4 * 2
            assert sum(each.num_output_tokens for each in stats.replicas) == 128
            assert stats.num_blocks == sum(each.num_blocks for each in stats.replicas)

    asyncio.run(main())


def test_a_popular_prefix_does_not_stay_with_one_core(monkeypatch):
    """Where the queue has become longer than the prefix would save, the other core gets it."""
    monkeypatch.setenv(STEP_SECONDS, "0.02")

    async def main():
        async with serving(data_parallel_size=2) as llm:
            popular = prompt_of(5, 64)
            home = await rank(llm, popular)
            streams = [ranks(llm, popular + prompt_of(i, 8), 20) for i in range(10)]
            counted = [each[0] for each in await asyncio.gather(*streams)]
            assert counted[0] == home
            assert 3 <= counted.count(1 - home) <= 5

    asyncio.run(main())


def test_a_core_that_is_killed_takes_nobody_with_it(monkeypatch):
    monkeypatch.setenv(STEP_SECONDS, "0.005")

    async def main():
        async with serving(data_parallel_size=2) as llm:
            killed, other = llm.core_pids

            async def stream(number: int) -> None:
                nonlocal killed
                got = Collected()
                async for output in llm.generate(
                    prompt_of(number), params(60), request_id="r", delta=True
                ):
                    add_delta(got, output)
                    if number == 3 and len(got.token_ids) >= 20 and killed is not None:
                        os.kill(killed, signal.SIGKILL)
                        killed = None
                assert got.token_ids == expected_ids(prompt_of(number), 60)
                assert got.finish_reason == "length"

            await asyncio.gather(*(stream(number) for number in range(8)))

            async def restarts() -> list[int]:
                return [each.num_restarts for each in (await llm.stats()).replicas]

            async def is_back() -> bool:
                return await restarts() == [1, 0]

            await until(is_back)
            assert llm.core_pids[1] == other
            await until_idle(llm)
            assert await restarts() == [1, 0]

    asyncio.run(main())


def test_who_was_not_in_the_failed_step_goes_on_elsewhere_at_once(monkeypatch):
    monkeypatch.setenv(STEP_SECONDS, "0.05")

    async def main():
        async with serving(data_parallel_size=2, max_num_seqs=1) as llm:
            first, *waiting = [
                asyncio.create_task(
                    ranks(llm, prompt_of(i), 4 + 16 * (i == 0), data_parallel_rank=0)
                )
                for i in range(3)
            ]

            async def runs() -> bool:
                return (await llm.stats()).num_output_tokens > 0

            await until(runs)
            os.kill(llm.core_pids[0], signal.SIGKILL)
            assert [set(found) for found in await asyncio.gather(*waiting)] == [{1}, {1}]
            await first

    asyncio.run(main())


def test_without_one_core_the_other_takes_all(monkeypatch, tmp_path):
    """The second core is never built again: its requests, and all later ones, go to the first."""
    monkeypatch.setenv(MARKER, str(tmp_path / "marker"))
    monkeypatch.setenv(STEP_SECONDS, "0.005")

    async def main():
        limits = {"max_restarts": 1}
        async with serving(factory="starts_twice", options=limits, data_parallel_size=2) as llm:
            died = []
            llm.on_death(lambda: died.append(True))
            streams = [
                asyncio.create_task(
                    collect(llm, prompt_of(i), params(100), data_parallel_rank=i % 2)
                )
                for i in range(6)
            ]
            while (await llm.stats()).num_output_tokens < 30:
                await asyncio.sleep(0.001)
            os.kill(llm.core_pids[1], signal.SIGKILL)
            for i, stream in enumerate(streams):
                assert (await stream).token_ids == expected_ids(prompt_of(i), 100)
            with pytest.raises(EngineDeadError, match="data_parallel_rank=1 is dead"):
                await rank(llm, prompt_of(0), data_parallel_rank=1)
            assert await rank(llm, prompt_of(9)) == await rank(llm, prompt_of(8)) == 0
            assert llm.is_ready
            assert llm.is_healthy
            os.kill(llm.core_pids[0], signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await collect(llm, prompt_of(1), params(100))
            assert died == [True]
            assert not llm.is_healthy

    asyncio.run(main())


def test_one_deadly_request_kills_the_core_that_has_it_only():
    async def main():
        async with serving(data_parallel_size=2) as llm:
            deadly = [*prompt_of(1), Fault.KILL]
            bad = asyncio.create_task(collect(llm, deadly, params(), data_parallel_rank=0))
            good = [
                collect(llm, prompt_of(i), params(50), data_parallel_rank=i % 2) for i in range(8)
            ]
            for i, got in enumerate(await asyncio.gather(*good)):
                assert got.token_ids == expected_ids(prompt_of(i), 50)
            assert (await bad).finish_reason == "error"
            restarts = [each.num_restarts for each in (await llm.stats()).replicas]
            assert restarts[0] >= 2
            assert restarts[1] == 0

    asyncio.run(main())


def test_all_caches_are_emptied_or_none(monkeypatch):
    monkeypatch.setenv(STEP_SECONDS, "0.01")

    async def main():
        async with serving(data_parallel_size=2) as llm:
            prompt = prompt_of(4, 64)
            for rank_ in (0, 1):
                await rank(llm, prompt, data_parallel_rank=rank_)
            running = asyncio.create_task(
                collect(llm, prompt_of(0), params(50), data_parallel_rank=1)
            )

            async def runs() -> bool:
                return (await llm.stats()).num_running > 0

            await until(runs)
            assert not await llm.reset_prefix_cache()
            before = (await llm.stats()).prefix_cache_hits
            await rank(llm, prompt, data_parallel_rank=0)
            assert (await llm.stats()).prefix_cache_hits > before
            await running
            assert await llm.reset_prefix_cache()
            before = (await llm.stats()).prefix_cache_hits
            for rank_ in (0, 1):
                await rank(llm, prompt, data_parallel_rank=rank_)
            assert (await llm.stats()).prefix_cache_hits == before

    asyncio.run(main())
