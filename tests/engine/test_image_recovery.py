"""Images of a served engine: they reach the core's process, and streams go on in another core."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from helpers.served import Collected, add_delta
from helpers.vision_models import family_of, picture, saved
from tokenmill import LLM
from tokenmill.config.engine_args import EngineArgs
from tokenmill.engine.async_llm import AsyncLLM
from tokenmill.errors import InvalidRequestError
from tokenmill.sampling_params import SamplingParams

NAME = "qwen2-vl"
IMAGES = [picture(64, 48), picture(90, 40, seed=7)]
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=120, ignore_eos=True, logprobs=1)
SETTINGS: dict[str, Any] = {
    "model": str(saved(NAME)),
    "device": "cpu",
    "max_model_len": 256,
    "num_kv_blocks": 100,
    "block_size": 16,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
}


def prompts() -> list[Any]:
    mark = family_of(NAME).special_tokens[0]
    return [
        {"prompt": f"Look at{mark} and", "multi_modal_data": {"image": IMAGES[0]}},
        {"prompt": f"{mark}or{mark}", "multi_modal_data": {"image": IMAGES}},
        "no image",
    ]


async def stream(llm: AsyncLLM, number: int) -> Collected:
    collected = Collected()
    async for output in llm.generate(prompts()[number], PARAMS, request_id=str(number), delta=True):
        add_delta(collected, output)
    return collected


@pytest.mark.slow
def test_streams_go_on_when_the_core_dies() -> None:
    with LLM(**SETTINGS) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(prompts(), PARAMS)]

    async def run() -> None:
        llm = await AsyncLLM.start(EngineArgs(**SETTINGS, encoder_cache_size=24))
        try:
            streams = asyncio.gather(*(stream(llm, number) for number in range(3)))
            while (await llm.stats()).num_output_tokens < 60:
                await asyncio.sleep(0.001)
            assert llm.core_pid is not None
            os.kill(llm.core_pid, signal.SIGKILL)
            found = await streams
            stats = await llm.stats()
            assert stats.num_restarts == 1
            assert (stats.encoder_cache_queries, stats.encoder_cache_hits) >= (3, 1)
            assert [each.token_ids for each in found] == wanted
            too_large = {**prompts()[0], "multi_modal_data": {"image": picture(300, 300)}}
            with pytest.raises(InvalidRequestError, match=r"25 embeddings.*encoder_cache_size=24"):
                await anext(llm.generate(too_large, PARAMS, request_id="x"))
        finally:
            await llm.shutdown()

    asyncio.run(run())
