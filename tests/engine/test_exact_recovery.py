"""The promise that results are exact, kept by a real model whose core is killed in mid-stream."""

from __future__ import annotations

import asyncio
import os
import signal

from helpers.served import Collected, add_delta, serve_args
from tokenmill.engine.async_llm import AsyncLLM
from tokenmill.sampling_params import SamplingParams

NUM_STREAMS = 16
PROMPTS = [f"The quick brown fox jumps over {number} lazy dogs. " for number in range(NUM_STREAMS)]


def params(number: int) -> SamplingParams:
    """Greedy and sampled, with and without log-probabilities, stop strings, a minimum, and what
    looks at the tokens so far.
    """
    return SamplingParams(
        temperature=0.0 if number % 4 == 0 else 1.0,
        seed=number if number % 4 == 1 else None,
        max_tokens=90 + number,
        logprobs=2 if number % 3 == 0 and number % 8 != 7 else None,
        prompt_logprobs=1 if number % 5 == 0 else None,
        ignore_eos=number % 2 == 0,
        min_tokens=60 if number % 2 else 0,
        stop=[" the", "é"] if number % 6 == 5 else None,
        repetition_penalty=1.3 if number % 3 == 1 else 1.0,
        frequency_penalty=0.4 if number % 4 == 2 else 0.0,
        presence_penalty=0.5 if number % 4 == 3 else 0.0,
        logit_bias={5: 3.0, 9: 2.0} if number % 5 == 2 else None,
        bad_words=["fox", "a"] if number % 5 == 3 else None,
        logprob_token_ids=[5, 9] if number % 8 == 7 else None,
        repetition_detection={"max_pattern_size": 4, "min_count": 5} if number % 7 == 1 else None,
    )


async def stream_all(llm: AsyncLLM, *, kill_after: int) -> list[Collected]:
    """All streams at once; the core is killed when `kill_after` outputs have come."""
    num_outputs = 0

    async def one(number: int) -> Collected:
        nonlocal num_outputs
        collected = Collected()
        async for output in llm.generate(
            PROMPTS[number], params(number), request_id=str(number), delta=True
        ):
            add_delta(collected, output)
            num_outputs += 1
            if num_outputs == kill_after:
                assert llm.core_pid is not None
                os.kill(llm.core_pid, signal.SIGKILL)
        return collected

    return await asyncio.gather(*(one(number) for number in range(NUM_STREAMS)))


async def one_life(*, kill_after: int) -> list[Collected]:
    """The streams of a fresh engine, so that seeds which it draws are the same each time."""
    args = serve_args(num_kv_blocks=200, dtype="float32", max_num_seqs=12)
    llm = await AsyncLLM.start(args)
    try:
        results = await stream_all(llm, kill_after=kill_after)
        assert (await llm.stats()).num_restarts == (1 if kill_after else 0)
        return results
    finally:
        await llm.shutdown()


def test_sixteen_streams_end_as_if_nothing_had_happened():
    async def main():
        undisturbed = await one_life(kill_after=0)
        killed = await one_life(kill_after=NUM_STREAMS * 40)
        for number, (expected, got) in enumerate(zip(undisturbed, killed, strict=True)):
            expected.num_items = got.num_items
            assert got == expected, f"stream {number}"

    asyncio.run(main())
