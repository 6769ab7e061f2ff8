"""A served engine on the fake device of `served_core.py`, and its clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from helpers.served_core import NUM_ORDINARY_IDS
from helpers.tiny import tiny_llama
from tokenmill.config.engine_args import EngineArgs
from tokenmill.engine.async_llm import AsyncLLM
from tokenmill.engine.serve_options import ServeOptions
from tokenmill.outputs import RequestOutput
from tokenmill.sampling_params import SamplingParams

FACTORIES = "helpers.served_core"
NUM_BLOCKS = 65


def serve_args(**settings: Any) -> EngineArgs:
    """Settings of a small engine; the fake device is asked for nothing but its sizes."""
    sizes = {"num_kv_blocks": NUM_BLOCKS, "block_size": 16, "max_num_seqs": 16, "device": "cpu"}
    return EngineArgs(model=str(tiny_llama()), **(sizes | settings))


@asynccontextmanager
async def serving(
    *, factory: str = "fake_core", options: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[AsyncLLM]:
    """An `AsyncLLM`, shut down at the end."""
    llm = await AsyncLLM.start(
        serve_args(**settings),
        options=ServeOptions(**(options or {})),
        core_factory=f"{FACTORIES}:{factory}",
    )
    try:
        yield llm
    finally:
        await llm.shutdown()


@dataclass
class Collected:
    """A stream of deltas, joined."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_items: int = 0


async def collect(
    llm: AsyncLLM, prompt: Any, params: SamplingParams, request_id: str = "request", **more: Any
) -> Collected:
    """Read one stream of deltas to its end."""
    collected = Collected()
    async for output in llm.generate(prompt, params, request_id=request_id, delta=True, **more):
        add_delta(collected, output)
    return collected


def add_delta(collected: Collected, output: RequestOutput) -> None:
    (sequence,) = output.outputs
    assert collected.finish_reason is None, "a delta after the end"
    collected.num_items += 1
    collected.token_ids += sequence.token_ids
    collected.text += sequence.text
    collected.logprobs += sequence.logprobs or []
    if output.prompt_logprobs is not None:
        assert collected.prompt_logprobs is None, "prompt log-probabilities come once"
        collected.prompt_logprobs = output.prompt_logprobs
    collected.finish_reason = sequence.finish_reason
    collected.stop_reason = sequence.stop_reason
    collected.error = sequence.error


def prompt_of(number: int, length: int = 8) -> list[int]:
    """An ordinary prompt that no other number has."""
    return [
        3 + (number * 37 + position * 11) % (NUM_ORDINARY_IDS - 3) for position in range(length)
    ]


async def until(condition: Callable[[], Any], timeout: float = 60.0) -> None:
    """Wait for a condition, plain or awaitable."""
    end = time.monotonic() + timeout
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.005)


async def until_idle(llm: AsyncLLM, timeout: float = 60.0) -> None:
    """Wait until neither the front end nor the core holds anything for anybody."""

    async def idle() -> bool:
        stats = await llm.stats()
        return (
            stats.num_unfinished == stats.num_running == stats.num_waiting == 0
            and stats.num_used_blocks == 0
        )

    await until(idle, timeout)


def process_exists(pid: int) -> bool:
    """Whether there is such a process, dead ones that nobody has buried not counted."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
