"""Adapters of a served engine: streams go on with them in another core, after their name is gone,
and while others are loaded.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from helpers.adapters import write_adapter
from helpers.served import Collected, add_delta, serve_args
from helpers.tiny import tiny_llama
from tokenmill.contracts.request import AdapterRef
from tokenmill.engine.async_llm import AsyncLLM
from tokenmill.errors import AdapterError, EngineDeadError, ModelNotFoundError
from tokenmill.lora_request import LoRARequest
from tokenmill.sampling_params import SamplingParams

NAMES = ["a", None, "b", "a", "c", None, "b", "c"]
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True, logprobs=1)


@functools.cache
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny_llama())


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: write_adapter(root / name, model(), rank=4, seed=seed, strength=2.0)
        for seed, name in enumerate("abc")
    }


@asynccontextmanager
async def serving(adapters: dict[str, Path]) -> AsyncIterator[AsyncLLM]:
    llm = await AsyncLLM.start(serve_args(enable_lora=True, max_loras=2, max_cpu_loras=2))
    try:
        for name, path in adapters.items():
            known = await llm.load_adapter(LoRARequest(name, str(path)))
            assert (known.info.rank, known.info.num_modules) == (4, 14)
        yield llm
    finally:
        await llm.shutdown()


async def stream(llm: AsyncLLM, number: int, adapter: AdapterRef | None) -> Collected:
    collected = Collected()
    async for output in llm.generate(
        f"Once upon {number} times", PARAMS, request_id=str(number), delta=True, adapter=adapter
    ):
        add_delta(collected, output)
    return collected


async def stream_all(llm: AsyncLLM) -> list[Collected]:
    refs = [None if name is None else llm.adapters.get(name).ref for name in NAMES]
    return await asyncio.gather(*(stream(llm, i, ref) for i, ref in enumerate(refs)))


async def until_tokens(llm: AsyncLLM, count: int) -> None:
    while (await llm.stats()).num_output_tokens < count:
        await asyncio.sleep(0.001)


async def load_until_it_fails(llm: AsyncLLM, path: Path) -> None:
    """The answer may come before the core has died."""
    while True:
        await llm.load_adapter(LoRARequest("d", str(path)))
        llm.adapters.remove("d")


def same(found: list[Collected], wanted: list[Collected]) -> None:
    assert [each.finish_reason for each in found] == ["length"] * len(wanted)
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
    assert [each.logprobs for each in found] == [each.logprobs for each in wanted]


def test_streams_go_on_whatever_happens(adapters: dict[str, Path], tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(adapters) as llm:
            wanted = await stream_all(llm)
            assert len({str(each.token_ids) for each in wanted}) == len(NAMES)

            # The core is killed in the middle; the next one reads the adapters again.
            streams = asyncio.create_task(stream_all(llm))
            start = (await llm.stats()).num_output_tokens
            await until_tokens(llm, start + 50)
            assert llm.core_pid is not None
            os.kill(llm.core_pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await load_until_it_fails(llm, adapters["c"])
            same(await streams, wanted)
            assert (await llm.stats()).num_restarts == 1

            # Names go away, or mean something else, and bad ones are refused.
            streams = asyncio.create_task(stream_all(llm))
            start = (await llm.stats()).num_output_tokens
            await until_tokens(llm, start + 20)
            stats = await llm.stats()
            assert set(stats.running_adapters) | set(stats.waiting_adapters) == set("abc")
            assert not set(stats.running_adapters) & set(stats.waiting_adapters)
            llm.adapters.remove("a")
            other = write_adapter(tmp_path / "other", model(), rank=2, seed=50, strength=2.0)
            before = llm.adapters.get("b").ref
            await llm.load_adapter(LoRARequest("b", str(other)))
            assert llm.adapters.get("b").ref.load_id != before.load_id
            with pytest.raises(ModelNotFoundError, match="'a'"):
                llm.adapters.get("a")
            wide = write_adapter(tmp_path / "wide", model(), rank=17)
            with pytest.raises(AdapterError, match="rank 17"):
                await llm.load_adapter(LoRARequest("wide", str(wide)))
            with pytest.raises(AdapterError, match="nowhere"):
                await llm.load_adapter(LoRARequest("nowhere", "/nowhere"))
            assert "wide" not in llm.adapters
            assert "nowhere" not in llm.adapters
            same(await streams, wanted)
            changed = await stream(llm, 2, llm.adapters.get("b").ref)
            assert changed.token_ids != wanted[2].token_ids

    asyncio.run(run())
