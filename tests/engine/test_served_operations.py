"""Sleeping, waking up and other weights of cores in processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
from safetensors.torch import load_file

from helpers.served import collect, prompt_of, serving, until, until_idle
from helpers.served_core import (
    DEADLY_WEIGHTS,
    MARKER,
    REFUSED_ONCE,
    STEP_SECONDS,
    expected_ids,
)
from helpers.tiny import write_wide_llama
from tokenmill import LLM
from tokenmill.contracts.operations import KV_CACHE, TAGS, Sleep, UpdateWeights, WakeUp
from tokenmill.engine.core_client import ProcessClient
from tokenmill.errors import CheckpointError, EngineDeadError, InvalidRequestError
from tokenmill.sampling_params import SamplingParams


@pytest.fixture
def log(tmp_path, monkeypatch):
    path = tmp_path / "log"
    monkeypatch.setenv(MARKER, str(path))
    monkeypatch.setenv(STEP_SECONDS, "0.005")
    return lambda: path.read_text().splitlines() if path.exists() else []


def sleeper(**settings):
    return serving(factory="sleeping_core", enable_sleep_mode=True, **settings)


def start(llm, number, count=60):
    return asyncio.create_task(collect(llm, prompt_of(number), SamplingParams(max_tokens=count)))


async def until_running(llm, count):
    async def running():
        return (await llm.stats()).num_running == count

    await until(running)


async def check(tasks, count=60):
    for number, got in enumerate(await asyncio.gather(*tasks)):
        assert got.token_ids == expected_ids(prompt_of(number), count)


@pytest.mark.parametrize(("level", "replicas"), [(0, 1), (1, 2)])
def test_streams_stop_and_go_on(log, level, replicas):
    async def main():
        async with sleeper(data_parallel_size=replicas) as llm:
            tasks = [start(llm, number) for number in range(4)]
            await until_running(llm, 4)
            state = await llm.operations.operate(Sleep(level, "keep"))
            assert state.asleep == (TAGS if level else TAGS[:1])
            assert log() == ["sleep 1"] * (replicas if level else 0)
            assert llm.is_healthy
            assert not llm.is_ready
            before = (await llm.stats()).num_output_tokens
            tasks.append(start(llm, 4))
            await asyncio.sleep(0.1)
            assert (await llm.stats()).num_output_tokens == before
            await llm.operations.operate(WakeUp())
            assert llm.is_ready
            await check(tasks)

    asyncio.run(main())


def test_streams_end_first(log):
    async def main():
        async with sleeper() as llm:
            for mode, reason in (("abort", "abort"), ("wait", "length")):
                tasks = [start(llm, number) for number in range(3)]
                await until_running(llm, 3)
                await llm.operations.operate(Sleep(1, mode))
                assert [each.finish_reason for each in await asyncio.gather(*tasks)] == [reason] * 3
                await until_idle(llm)
                late = start(llm, 0)
                await llm.operations.operate(WakeUp())
                await check([late])

    asyncio.run(main())


def test_a_new_core_is_brought_to_where_the_one_before_was(log, tmp_path):
    async def main():
        async with sleeper() as llm:
            (tmp_path / "weights").touch()
            tasks = [start(llm, number) for number in range(3)]
            await until_running(llm, 3)
            await llm.operations.operate(UpdateWeights(str(tmp_path / "weights"), "w1", "keep"))
            await llm.operations.operate(Sleep(2, "keep"))
            await llm.operations.operate(WakeUp(("weights",)))
            assert log() == ["update", "sleep 2", "wake up"]
            os.kill(llm.core_pid, signal.SIGKILL)
            await until(lambda: len(log()) == 6)
            assert log()[3:] == log()[:3]
            await until(lambda: llm.is_healthy)
            assert not any(task.done() for task in tasks)
            state = await llm.operations.operate(WakeUp((KV_CACHE,)))
            assert (state.asleep, state.weight_version) == ((), "w1")
            await check(tasks)
            os.kill(llm.core_pid, signal.SIGKILL)
            await until(lambda: log()[6:] == ["update"])  # nothing is asleep any more

    asyncio.run(main())


def test_a_core_that_dies_over_an_operation_leaves_the_engine_as_it_was(log, tmp_path):
    async def main():
        async with sleeper() as llm:
            (tmp_path / "weights").touch()
            kept = start(llm, 0)
            await until_running(llm, 1)
            await llm.operations.operate(Sleep(1, "keep"))
            with pytest.raises(EngineDeadError):
                await llm.operations.operate(UpdateWeights(str(tmp_path / DEADLY_WEIGHTS)))
            assert llm.operations.state.asleep == TAGS
            await until(lambda: llm.is_healthy and log() == ["sleep 1", "update", "sleep 1"])
            assert not kept.done()
            await llm.operations.operate(WakeUp())
            await check([kept])
            names = []
            for _ in range(2):  # a name is that of one set of weights, whatever core has them
                operation = UpdateWeights(str(tmp_path / "weights"))
                names.append((await llm.operations.operate(operation)).weight_version)
                os.kill(llm.core_pid, signal.SIGKILL)
                await until(lambda: not llm.is_healthy)
                await until(lambda: llm.is_healthy)
            assert names == ["1", "2"]  # the one that failed does not count
            assert llm.operations.state.weight_version == names[1]

    asyncio.run(main())


def test_all_replicas_have_the_same_weights_or_are_no_more(log, tmp_path):
    async def main():
        async with sleeper(data_parallel_size=2) as llm:
            tasks = [start(llm, number) for number in range(4)]
            await until_running(llm, 4)
            before = llm.core_pids
            (tmp_path / "weights").touch()
            (tmp_path / REFUSED_ONCE).touch()
            state = await llm.operations.operate(
                UpdateWeights(str(tmp_path / "weights"), "w1", "keep")
            )
            assert state.weight_version == "w1"
            await check(tasks)
            await until(lambda: log() == ["update"] * 3 and None not in llm.core_pids)
            assert sum(pid in before for pid in llm.core_pids) == 1

    asyncio.run(main())


def test_without_the_right_weights_no_core_serves(log, tmp_path, monkeypatch):
    kill = ProcessClient.kill

    def kill_late(client):
        time.sleep(0.2)  # it brings tokens meanwhile
        kill(client)

    monkeypatch.setattr(ProcessClient, "kill", kill_late)

    async def main():
        async with sleeper(options={"max_restarts": 2}) as llm:
            weights = tmp_path / "weights"
            weights.touch()
            await llm.operations.operate(UpdateWeights(str(weights), "w1"))
            task = start(llm, 0, count=400)
            await until_running(llm, 1)
            weights.unlink()
            os.kill(llm.core_pid, signal.SIGKILL)
            await until(lambda: not llm.is_healthy)
            before = (await llm.stats()).num_output_tokens
            with pytest.raises(EngineDeadError):
                await task
            assert (await llm.stats()).num_output_tokens == before
            with pytest.raises(EngineDeadError):
                await start(llm, 0)

    asyncio.run(main())


def test_what_cannot_be_is_told(log, tmp_path):
    async def main():
        async with sleeper() as llm:
            with pytest.raises(CheckpointError, match="is not there"):
                await llm.operations.operate(UpdateWeights(str(tmp_path / "nothing")))
            with pytest.raises(InvalidRequestError, match="level"):
                await llm.operations.operate(Sleep(3))
            assert llm.operations.state.asleep == ()
            await check([start(llm, 0)])
            os.kill(llm.core_pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await llm.operations.operate(Sleep(1))
            await until(lambda: llm.is_healthy)
            await check([start(llm, 0)])

    asyncio.run(main())


@pytest.mark.slow
def test_replicas_of_a_model_take_tensors_and_sleep(tmp_path):
    models = [write_wide_llama(tmp_path / str(seed), seed=seed) for seed in range(2)]
    settings = {"device": "cpu", "num_kv_blocks": 40, "enable_sleep_mode": True}
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts = [[3 + number] * 40 for number in range(6)]

    def texts(llm):
        return [each.outputs[0].token_ids for each in llm.generate(prompts, greedy)]

    expected = []
    for model in models:
        with LLM(str(model), **settings) as llm:
            expected.append(texts(llm))
    with LLM(str(models[0]), data_parallel_size=2, **settings) as llm:
        assert texts(llm) == expected[0]
        llm.update_weights(load_file(models[1] / "model.safetensors").items())
        assert (texts(llm), llm.weight_version) == (expected[1], "1")
        llm.sleep(level=2)
        assert llm.is_sleeping
        llm.update_weights(models[0])
        llm.wake_up()
        assert texts(llm) == expected[0]
