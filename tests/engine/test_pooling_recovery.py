"""A core that is killed loses no pooling request: each gets the bits that it would have had."""

from __future__ import annotations

import asyncio
import os
import signal

from helpers.served import serve_args
from tokenmill.engine.async_llm import AsyncLLM
from tokenmill.pooling_params import PoolingParams

PROMPTS = [f"The quick brown fox jumps over {number} lazy dogs. " * 3 for number in range(24)]


async def embed_all(llm: AsyncLLM, *, kill_after: int) -> list[list[float]]:
    """All at once; the core is killed when `kill_after` vectors have come."""
    num_done = 0

    async def one(number: int) -> list[float]:
        nonlocal num_done
        async for output in llm.generate(
            PROMPTS[number], PoolingParams(task="embed"), request_id=str(number)
        ):
            assert output.finished
            num_done += 1
            if num_done == kill_after:
                assert llm.core_pid is not None
                os.kill(llm.core_pid, signal.SIGKILL)
            found: list[float] = output.pooled.tolist()
        return found

    vectors = await asyncio.gather(*(one(number) for number in range(len(PROMPTS))))
    assert (await llm.stats()).num_restarts == (1 if kill_after else 0)
    return vectors


def test_vectors_are_the_same_after_a_crash() -> None:
    async def main() -> None:
        args = serve_args(
            dtype="float32", runner="pooling", max_num_seqs=2, num_kv_blocks=40,
            enable_prefix_caching=False,
        )  # fmt: skip
        llm = await AsyncLLM.start(args)
        try:
            undisturbed = await embed_all(llm, kill_after=0)
            assert await embed_all(llm, kill_after=4) == undisturbed
        finally:
            await llm.shutdown()
        assert len({tuple(vector) for vector in undisturbed}) == len(PROMPTS)

    asyncio.run(main())
