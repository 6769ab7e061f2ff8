"""Speculation behind the server's front end: the settings travel, the counts come back, and a core
that dies in the middle of drafts is taken up where it was.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from helpers.served import Collected, add_delta, serve_args
from helpers.tiny import tiny_llama
from tokenmill.engine.async_llm import AsyncLLM
from tokenmill.sampling_params import SamplingParams

NUM_STREAMS = 6
LOOKUP = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "adaptive": False,
}


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[AsyncLLM]:
    llm = await AsyncLLM.start(serve_args(num_kv_blocks=100, dtype="float32", **settings))
    try:
        yield llm
    finally:
        await llm.shutdown()


async def streams(llm: AsyncLLM, *, kill: bool = False) -> tuple[list[Collected], Any]:
    """Some streams at once, and the statistics at their end."""
    num_outputs = 0

    async def one(number: int) -> Collected:
        nonlocal num_outputs
        collected = Collected()
        params = SamplingParams(
            temperature=0.4 * (number % 3), seed=number, max_tokens=60, ignore_eos=True
        )
        prompt = f"one two one two {number} one two"
        async for output in llm.generate(prompt, params, request_id=str(number), delta=True):
            add_delta(collected, output)
            num_outputs += 1
            if kill and num_outputs == 40:
                assert llm.core_pid is not None
                os.kill(llm.core_pid, signal.SIGKILL)
        collected.num_items = 0
        return collected

    results = await asyncio.gather(*(one(number) for number in range(NUM_STREAMS)))
    return results, await llm.stats()


def test_streams_with_drafts_are_those_without_and_survive_their_core():
    async def main() -> None:
        async with serving() as llm:
            plain, _ = await streams(llm)
        async with serving(speculative_config=LOOKUP) as llm:
            drafted, stats = await streams(llm)
            assert drafted == plain
            assert stats.num_draft_tokens > stats.num_accepted_tokens > 0
            killed, stats = await streams(llm, kill=True)
            assert killed == plain
            assert stats.num_restarts == 1
        itself = {"model": str(tiny_llama()), "num_speculative_tokens": 3, "adaptive": False}
        async with serving(speculative_config=itself) as llm:
            drafted, stats = await streams(llm)
        assert drafted == plain
        assert stats.num_draft_tokens == stats.num_accepted_tokens > 100

    asyncio.run(main())
