"""Requests through the front end and a core in its own process; the device is a fake one."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import uvloop

from helpers.served import (
    FACTORIES,
    NUM_BLOCKS,
    Collected,
    add_delta,
    collect,
    prompt_of,
    serve_args,
    serving,
    until,
    until_idle,
)
from helpers.served_core import STEP_SECONDS, expected_ids
from tokenmill.engine.async_llm import AsyncLLM
from tokenmill.errors import (
    ConfigError,
    ContextLengthExceededError,
    EngineDeadError,
    EngineDrainingError,
    InvalidRequestError,
    QueueFullError,
)
from tokenmill.sampling_params import SamplingParams

LONG = SamplingParams(max_tokens=400)


def params(max_tokens: int = 8, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **more)


def test_streams_bring_what_each_prompt_brings_alone():
    async def main():
        async with serving() as llm:
            assert llm.is_ready
            assert llm.is_healthy
            await until_idle(llm)
            assert (await llm.stats()).num_blocks == NUM_BLOCKS
            streams = [collect(llm, prompt_of(i), params(5 + i)) for i in range(20)]
            for i, got in enumerate(await asyncio.gather(*streams)):
                assert got.token_ids == expected_ids(prompt_of(i), 5 + i)
                assert got.finish_reason == "length"
            await until_idle(llm)
        assert not llm.is_healthy
        assert llm.core_pid is None

    asyncio.run(main())


def test_tokens_are_counted_before_an_answer_in_one_piece_is_whole(monkeypatch):
    monkeypatch.setenv(STEP_SECONDS, "0.02")

    async def main():
        async with serving() as llm:
            answer = asyncio.create_task(collect(llm, prompt_of(0), params(100), stream=False))

            async def counted() -> int:
                return (await llm.stats()).num_output_tokens

            while await counted() < 5:
                assert not answer.done()
                await asyncio.sleep(0.001)
            await answer
            assert await counted() == 100

    asyncio.run(main())


def test_the_same_under_uvloop():
    async def main():
        async with serving() as llm:
            streams = [collect(llm, prompt_of(i), params(20)) for i in range(20)]
            for i, got in enumerate(await asyncio.gather(*streams)):
                assert got.token_ids == expected_ids(prompt_of(i), 20)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_cumulative_outputs_and_a_single_one():
    async def main():
        async with serving() as llm:
            prompt, text = prompt_of(1), ""
            async for output in llm.generate(prompt, params(), request_id="mine"):
                assert output.request_id == "mine"
                sequence = output.outputs[0]
                assert sequence.text.startswith(text)
                text = sequence.text
            assert sequence.token_ids == expected_ids(prompt, 8)
            outputs = [
                output
                async for output in llm.generate(prompt, params(), request_id="mine", stream=False)
            ]
            assert [each.outputs[0].text for each in outputs] == [text]
            assert outputs[0].metrics.time_to_first_token > 0

    asyncio.run(main())


def test_several_sequences_of_one_prompt():
    async def main():
        async with serving() as llm:
            three = params(6, n=3, temperature=1.0)
            (final,) = [
                o async for o in llm.generate(prompt_of(2), three, request_id="n", stream=False)
            ]
            assert [sequence.index for sequence in final.outputs] == [0, 1, 2]
            joined: dict[int, list[int]] = {}
            async for output in llm.generate(prompt_of(2), three, request_id="n", delta=True):
                for sequence in output.outputs:
                    joined.setdefault(sequence.index, []).extend(sequence.token_ids)
            assert output.finished
            expected = expected_ids(prompt_of(2), 6)  # the fake device knows no seeds
            assert joined == dict.fromkeys(range(3), expected)

    asyncio.run(main())


def test_a_slow_reader_gets_several_steps_at_once_and_loses_nothing():
    async def main():
        async with serving() as llm:
            collected = Collected()

            async def made_all() -> bool:
                return (await llm.stats()).num_output_tokens == 40

            async for output in llm.generate(
                prompt_of(3), params(40, logprobs=0), request_id="slow", delta=True
            ):
                add_delta(collected, output)
                await until(made_all)
            assert collected.token_ids == expected_ids(prompt_of(3), 40)
            assert len(collected.logprobs) == 40
            assert collected.num_items <= 2

    asyncio.run(main())


def test_stop_strings_end_a_request_in_the_core_as_well():
    async def main():
        async with serving() as llm:
            whole = await collect(llm, prompt_of(4), params(60))
            stop = whole.text[20:24]
            cut = await collect(llm, prompt_of(4), params(400, stop=[stop, "\ud800"]))
            assert cut.text == whole.text[: whole.text.index(stop)]
            assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
            await until_idle(llm)

    asyncio.run(main())


@pytest.mark.parametrize("when", ["queued", "prefilling", "decoding"])
def test_leaving_a_stream_frees_the_request_wherever_it_is(when, monkeypatch):
    """B087, B089."""
    monkeypatch.setenv(STEP_SECONDS, "0.02")

    async def leave(llm, how):
        prompt = prompt_of(1, 400 if when == "prefilling" else 8)
        stream = llm.generate(prompt, LONG, request_id="leaver")
        if when != "decoding":
            await cancelled(stream, after=0.1)
        elif how == "break":
            async for _ in stream:
                break
        elif how == "cancel":
            await anext(stream)
            await cancelled(stream)
        else:
            await anext(stream)
            if how == "aclose":
                await stream.aclose()

    async def main():
        # One row and steps of 16 tokens: the second waits, and a long prompt takes many steps.
        async with serving(
            max_num_seqs=1, max_num_batched_tokens=16, enable_prefix_caching=False
        ) as llm:
            ways = ["break", "del", "cancel", "aclose"] if when == "decoding" else ["cancel"]
            for number, how in enumerate(ways, start=1):
                others = []
                if when == "queued":
                    others.append(asyncio.create_task(collect(llm, prompt_of(0), params(30))))
                    await until(lambda: running(llm))
                await leave(llm, how)
                gc.collect()
                await asyncio.gather(*others)
                await until_idle(llm)
                assert (await llm.stats()).num_aborted == number
            again = await collect(llm, prompt_of(5), params())
            assert again.token_ids == expected_ids(prompt_of(5), 8)

    asyncio.run(main())


async def running(llm: AsyncLLM) -> int:
    return (await llm.stats()).num_running


async def cancelled(stream, after=0.0):
    async def read():
        async for _ in stream:
            pass

    task = asyncio.create_task(read())
    await asyncio.sleep(after)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_abort_by_id_ends_every_request_of_that_name_with_its_last_output(monkeypatch):
    monkeypatch.setenv(STEP_SECONDS, "0.02")

    async def main():
        async with serving() as llm:
            same = [collect(llm, prompt_of(i), LONG, request_id="same") for i in range(2)]
            other = collect(llm, prompt_of(9), params(20), request_id="other")
            tasks = [asyncio.create_task(each) for each in [*same, other]]
            await until(lambda: running(llm))
            await llm.abort("same")
            await llm.abort("nobody")
            *aborted, kept = await asyncio.gather(*tasks)
            for i, got in enumerate(aborted):
                assert got.finish_reason == "abort"
                assert got.error == "The request was aborted."
                assert got.token_ids == expected_ids(prompt_of(i), len(got.token_ids))
            assert kept.finish_reason == "length"
            await until_idle(llm)

    asyncio.run(main())


def test_a_long_prompt_is_aborted_while_it_is_tokenized():
    async def main():
        async with serving() as llm:
            text = "The quick brown fox. " * 1000
            truncated = params(400, truncate_prompt_tokens=50)
            task = asyncio.create_task(collect(llm, text, truncated, request_id="long"))
            await asyncio.sleep(0)
            await llm.abort("long")
            got = await task
            assert (got.finish_reason, got.token_ids) == ("abort", [])
            await until_idle(llm)

    asyncio.run(main())


def test_streams_cut_at_random_leave_nothing_behind():
    """B083, as a client sees it."""
    rng = random.Random(0)

    async def client(llm, number):
        got = []
        stream = llm.generate(
            prompt_of(number, rng.randrange(1, 60)),
            params(rng.randrange(1, 60), n=rng.choice([1, 1, 1, 3])),
            request_id="client",
            delta=True,
        )
        limit = rng.choice([0, 1, 5, 1000])
        async for output in stream:
            got.append(output)
            if len(got) > limit:
                break
        await stream.aclose()

    async def main():
        async with serving(max_num_seqs=8, num_kv_blocks=40) as llm:
            for first in range(0, 200, 50):
                await asyncio.gather(*(client(llm, first + i) for i in range(50)))
            await until_idle(llm)
            assert llm.core_pid is not None
            assert (await llm.stats()).num_restarts == 0

    asyncio.run(main())


def test_a_full_queue_refuses_with_an_estimate():
    """B085."""

    async def main():
        options = {"max_queue": 6}
        async with serving(max_num_seqs=2, options=options) as llm:
            tasks = [asyncio.create_task(collect(llm, prompt_of(i), params(10))) for i in range(30)]
            done = await asyncio.gather(*tasks, return_exceptions=True)
            refused = [each for each in done if isinstance(each, QueueFullError)]
            finished = [each for each in done if isinstance(each, Collected)]
            assert (len(finished), len(refused)) == (8, 22)
            assert all(each.finish_reason == "length" for each in finished)
            assert all(1.0 <= error.retry_after <= 60.0 for error in refused)
            assert "max_queue=6" in str(refused[0])
            stats = await llm.stats()
            assert stats.num_refused == 22
            assert (await collect(llm, prompt_of(1), params())).finish_reason == "length"
            with pytest.raises(InvalidRequestError, match=r"n=9 .* 8 .*max_queue"):
                await collect(llm, prompt_of(1), params(n=9, temperature=1.0))

    asyncio.run(main())


def test_the_queue_is_bounded_in_tokens_as_well(monkeypatch):
    monkeypatch.setenv(STEP_SECONDS, "0.02")

    async def main():
        async with serving(options={"max_queue_tokens": 100}) as llm:
            big = asyncio.create_task(collect(llm, prompt_of(1, 300), params(40)))
            await until(lambda: running(llm))
            with pytest.raises(QueueFullError, match="max_queue_tokens"):
                await collect(llm, prompt_of(2, 50), params())
            assert (await big).finish_reason == "length"
            assert (await collect(llm, prompt_of(2, 50), params())).finish_reason == "length"

    asyncio.run(main())


def test_a_deadline_ends_a_request_that_runs_and_one_that_waits(monkeypatch):
    monkeypatch.setenv(STEP_SECONDS, "0.01")

    async def main():
        async with serving(max_num_seqs=1) as llm:
            runs = collect(llm, prompt_of(1), LONG, deadline=0.3)
            waits = collect(llm, prompt_of(2), LONG, deadline=0.2)
            ran, waited = await asyncio.gather(runs, waits)
            for got in (ran, waited):
                assert got.finish_reason == "abort"
                assert got.error == "The request's deadline has passed."
            assert ran.token_ids == expected_ids(prompt_of(1), len(ran.token_ids))
            assert ran.token_ids
            assert waited.token_ids == []
            in_time = await collect(llm, prompt_of(3), params(), deadline=60.0)
            assert in_time.finish_reason == "length"
            await until_idle(llm)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("prompt", "error", "parameter"),
    [
        ("", InvalidRequestError, "prompt"),
        ([], InvalidRequestError, "prompt"),
        ([3, 100_000], InvalidRequestError, "prompt_token_ids"),
        (prompt_of(1, 600), ContextLengthExceededError, "prompt"),
        ("x" * 100_000, ContextLengthExceededError, "prompt"),
        # Within the context, but more than the whole pool, which only the core knows.
        (prompt_of(1, 300), InvalidRequestError, "prompt"),
        ("half a pair: \ud800", InvalidRequestError, "prompt"),
    ],
)
def test_what_a_user_gets_wrong_is_raised_before_the_first_item(prompt, error, parameter):
    async def main():
        async with serving(factory="small_core") as llm:
            with pytest.raises(error) as caught:
                await collect(llm, prompt, params())
            assert caught.value.parameter == parameter
            await until_idle(llm)
            got = await collect(llm, prompt_of(1), params())
            assert got.token_ids == expected_ids(prompt_of(1), 8)

    asyncio.run(main())


def test_a_salt_and_a_dict_go_together():
    async def main():
        async with serving() as llm:
            prompt = prompt_of(1, 64)
            for salt, hits in [("a", 0), ("b", 0), ("a", 48)]:
                for form in (prompt, {"prompt_token_ids": prompt}):
                    before = (await llm.stats()).prefix_cache_hits
                    got = await collect(llm, form, params(), cache_salt=salt)
                    assert got.token_ids == expected_ids(prompt, 8)
                    assert (await llm.stats()).prefix_cache_hits - before == hits
                    hits = 48

    asyncio.run(main())


def test_encode_short_and_long():
    async def main():
        async with serving() as llm:
            for text in ("The quick brown fox", "The quick brown fox. " * 1000):
                assert await llm.encode(text) == llm.tokenizer.encode(text)
            with pytest.raises(InvalidRequestError):
                await llm.encode("\ud800")

    asyncio.run(main())


def test_the_prefix_cache_is_reset_when_nothing_runs():
    async def main():
        async with serving() as llm:
            stream = llm.generate(prompt_of(1), LONG, request_id="runs")
            await anext(stream)
            assert not await llm.reset_prefix_cache()
            await stream.aclose()
            await until_idle(llm)
            assert await llm.reset_prefix_cache()

    asyncio.run(main())


def test_draining_finishes_what_runs_and_takes_nothing_new(monkeypatch):
    monkeypatch.setenv(STEP_SECONDS, "0.02")

    async def main():
        async with serving() as llm:
            runs = asyncio.create_task(collect(llm, prompt_of(1), params(60)))
            await until(lambda: running(llm))
            draining = asyncio.create_task(llm.drain())
            await asyncio.sleep(0)
            assert not llm.is_ready
            assert llm.is_healthy
            with pytest.raises(EngineDrainingError):
                await collect(llm, prompt_of(2), params())
            assert await draining
            assert (await runs).token_ids == expected_ids(prompt_of(1), 60)

    asyncio.run(main())


def test_a_drain_that_takes_too_long_is_cut_by_shutdown(monkeypatch):
    monkeypatch.setenv(STEP_SECONDS, "0.02")

    async def main():
        async with serving() as llm:
            runs = asyncio.create_task(collect(llm, prompt_of(1), LONG))
            await until(lambda: running(llm))
            assert not await llm.drain(timeout=0.05)
            pid = llm.core_pid
            await llm.shutdown()
            got = await runs
            assert (got.finish_reason, got.error) == ("abort", "The server was shut down.")
            with pytest.raises(EngineDeadError):
                await collect(llm, prompt_of(1), params())
            assert pid is not None

    asyncio.run(main())


def test_a_core_that_cannot_be_built_says_why():
    async def main():
        with pytest.raises(ConfigError, match="no such thing"):
            await AsyncLLM.start(serve_args(), core_factory="helpers.served_core:bad_config")
        with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
            await AsyncLLM.start(serve_args(), core_factory="helpers.served_core:bug")
        with pytest.raises(EngineDeadError, match="SIGKILL while it started"):
            await AsyncLLM.start(serve_args(), core_factory="helpers.served_core:killed")

    asyncio.run(main())


@pytest.mark.parametrize("after", [0.0, 0.05, 0.4])
def test_a_start_that_is_cancelled_leaves_no_process(after):
    async def main():
        args = serve_args()
        starting = asyncio.create_task(
            AsyncLLM.start(args, core_factory=f"{FACTORIES}:never_ready")
        )
        await asyncio.sleep(after)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(main())
    assert children() == []


def children() -> list[str]:
    """Command lines of this process's children that are cores."""
    tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = [pid for path in tasks for pid in path.read_text().split()]
    lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]
    return [line for line in lines if "core_process" in line]


def test_the_front_end_loads_no_torch():
    code = (
        "import asyncio, sys\n"
        "from tokenmill.config.engine_args import EngineArgs\n"
        "from tokenmill.engine.async_llm import AsyncLLM\n"
        "from tokenmill.sampling_params import SamplingParams\n"
        "async def main():\n"
        f"    llm = await AsyncLLM.start(EngineArgs(model={serve_args().model!r}, "
        f"num_kv_blocks=64, device='cpu'), core_factory='{FACTORIES}:fake_core')\n"
        "    async for output in llm.generate('One', SamplingParams(), request_id='0'): pass\n"
        "    await llm.shutdown()\n"
        "asyncio.run(main())\n"
        "print(sorted(m for m in ('torch', 'transformers') if m in sys.modules))\n"
    )
    env = {"PYTHONPATH": ":".join(path for path in sys.path if path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr
