"""Cores that live and get nowhere: a step that hangs, a process that is stopped."""

from __future__ import annotations

import asyncio
import os
import signal

from helpers.served import collect, process_exists, prompt_of, serving, until
from helpers.served_core import STEP_SECONDS, Fault, expected_ids
from tokenmill.sampling_params import SamplingParams


def params(max_tokens: int = 8, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **more)


def test_a_step_that_hangs_is_found():
    """B035."""

    async def main():
        options = {"step_timeout": 0.6, "max_restart_delay": 0.05}
        async with serving(options=options) as llm:
            await asyncio.sleep(1.2)  # to be idle is no hang
            assert llm.is_healthy
            assert (await llm.stats()).num_restarts == 0
            other = asyncio.create_task(collect(llm, prompt_of(2), params(200)))
            bad = await collect(llm, [Fault.HANG, *prompt_of(3)], params())
            assert bad.finish_reason == "error"
            assert "SIGKILL" in bad.error
            assert (await other).token_ids == expected_ids(prompt_of(2), 200)

    asyncio.run(main())


def test_long_steps_are_progress(monkeypatch):
    """B035, B042."""
    monkeypatch.setenv(STEP_SECONDS, "2.2")

    async def main():
        options = {"step_timeout": 30.0, "heartbeat_timeout": 2.0}
        async with serving(options=options, max_num_batched_tokens=16) as llm:
            task = asyncio.create_task(collect(llm, prompt_of(1, 20), params(1)))
            while not task.done():
                assert llm.is_healthy
                await asyncio.sleep(0.02)
            assert task.result().token_ids == expected_ids(prompt_of(1, 20), 1)
            assert (await llm.stats()).num_restarts == 0

    asyncio.run(main())


def test_a_frozen_core_is_unhealthy_then_replaced():
    async def main():
        options = {"heartbeat_timeout": 0.8, "freeze_timeout": 3.0}
        async with serving(options=options) as llm:
            task = asyncio.create_task(collect(llm, prompt_of(1), params(300)))
            await asyncio.sleep(0.1)
            frozen = llm.core_pid
            os.kill(frozen, signal.SIGSTOP)
            await until(lambda: not llm.is_healthy)
            assert llm.core_pid == frozen
            os.kill(frozen, signal.SIGCONT)
            await until(lambda: llm.is_healthy)  # it came back by itself
            os.kill(frozen, signal.SIGSTOP)
            await until(lambda: llm.core_pid not in (None, frozen))
            assert (await task).token_ids == expected_ids(prompt_of(1), 300)
            assert (await llm.stats()).num_restarts == 1
            assert not process_exists(frozen)

    asyncio.run(main())
