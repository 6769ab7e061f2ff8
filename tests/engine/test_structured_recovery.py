"""Requests with a form whose core is killed in mid-stream: matchers are made anew from the tokens
so far, and the streams go on as if nothing had happened. What is refused is so in every core.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from helpers.served import Collected, add_delta, collect, prompt_of, serve_args, serving
from helpers.served_core import expected_ids
from tokenmill.engine.async_llm import AsyncLLM
from tokenmill.errors import InvalidRequestError
from tokenmill.sampling_params import SamplingParams

NUM_STREAMS = 8
FORMS = [
    {"json": {"type": "array", "items": {"type": "boolean"}, "minItems": 60}},
    {"regex": "(quick brown fox jumps over [ab]{9} ){20}"},
    {"grammar": 'start: (("one two three four" | "five") /[0-9]{3}/)*\n'},
    None,
]


def params(number: int) -> SamplingParams:
    return SamplingParams(
        structured_outputs=FORMS[number % len(FORMS)],
        temperature=0.0 if number == 4 else 1.0,
        seed=number,
        max_tokens=120,
        ignore_eos=True,
        logprobs=1 if number == 5 else None,
    )


async def stream_all(llm: AsyncLLM, *, kill_after: int) -> list[Collected]:
    """All streams at once; the core is killed when `kill_after` outputs have come."""
    num_outputs = 0

    async def one(number: int) -> Collected:
        nonlocal num_outputs
        collected = Collected()
        prompt = f"Stream number {number}: "
        async for output in llm.generate(
            prompt, params(number), request_id=str(number), delta=True
        ):
            add_delta(collected, output)
            num_outputs += 1
            if num_outputs == kill_after:
                assert llm.core_pid is not None
                os.kill(llm.core_pid, signal.SIGKILL)
        return collected

    results = await asyncio.gather(*(one(number) for number in range(NUM_STREAMS)))
    bad = SamplingParams(structured_outputs={"regex": "("})
    with pytest.raises(InvalidRequestError) as caught:
        await anext(llm.generate("x", bad, request_id="bad"))
    assert caught.value.parameter == "structured_outputs.regex"
    assert (await llm.stats()).num_restarts == (1 if kill_after else 0)
    return results


def test_streams_end_as_if_nothing_had_happened():
    async def main() -> None:
        llm = await AsyncLLM.start(serve_args(num_kv_blocks=200, dtype="float32"))
        try:
            undisturbed = await stream_all(llm, kill_after=0)
            killed = await stream_all(llm, kill_after=NUM_STREAMS * 12)
        finally:
            await llm.shutdown()
        for number, (expected, got) in enumerate(zip(undisturbed, killed, strict=True)):
            expected.num_items = got.num_items
            assert got == expected, f"stream {number}"
            assert got.error is None

    asyncio.run(main())


def test_a_grammar_that_takes_the_core_with_it_ends_alone():
    """Whatever a native library does: its request is found out, and the others go on."""

    async def main() -> None:
        async with serving(factory="deadly_grammars") as llm:
            deadly = SamplingParams(structured_outputs={"regex": "deadly"}, max_tokens=8)
            formed = SamplingParams(structured_outputs={"regex": "fine"}, max_tokens=40)
            tasks = [asyncio.create_task(collect(llm, prompt_of(i), formed)) for i in range(4)]
            tasks.append(asyncio.create_task(collect(llm, prompt_of(9), deadly)))
            *others, guilty = await asyncio.gather(*tasks)
            assert guilty.finish_reason == "error"
            assert "died twice" in guilty.error
            for i, got in enumerate(others):
                assert got.token_ids == expected_ids(prompt_of(i), 40)
            stats = await llm.stats()
            assert 1 <= stats.num_restarts <= 3
            assert (await collect(llm, prompt_of(7), formed)).finish_reason == "length"

    asyncio.run(main())
