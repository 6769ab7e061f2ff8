"""A model on two machines, which are one here: ranks that another command has started."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.served import process_exists, serve_args, until
from helpers.tiny import tiny_llama
from tokenmill import LLM, SamplingParams
from tokenmill.engine.async_llm import AsyncLLM
from tokenmill.engine.headless import run_headless
from tokenmill.errors import ConfigError

PROMPTS = [[5, 9, 2, 77], list(range(3, 60)), [8]]
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def headless(**settings: Any) -> Iterator[subprocess.Popen[bytes]]:
    """The second machine."""
    flags = [
        part
        for name, value in (settings | {"node_rank": 1}).items()
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
    command = [sys.executable, "-m", "tokenmill", "serve", str(tiny_llama()), "--headless", *flags]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in found.split()]


def generate(**settings: Any) -> list[Any]:
    sizes = {"num_kv_blocks": 40, "block_size": 16, "max_num_batched_tokens": 32}
    with LLM(str(tiny_llama()), dtype="float32", device="cpu", **sizes, **settings) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        return [
            (
                output.outputs[0].token_ids,
                [{i: e.logprob for i, e in step.items()} for step in output.outputs[0].logprobs],
            )
            for output in llm.generate(prompts, PARAMS, use_tqdm=False)
        ]


@pytest.mark.slow
@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_a_model_on_two_machines(size: str) -> None:
    """Stages have the bits of one process. Sums over the network are those in shared memory."""
    settings = {size: 2, "nnodes": 2, "master_port": free_port()}
    with headless(**settings) as other:
        found = generate(**settings)
        ranks = children(other.pid)
        again = generate(**settings)  # the second machine is there for engine after engine
    assert not any(map(process_exists, ranks))
    expected = generate() if size.startswith("pipeline") else generate(tensor_parallel_size=2)
    assert found == again == expected


@pytest.mark.slow
def test_a_rank_of_the_other_machine_dies() -> None:
    settings = {"pipeline_parallel_size": 2, "nnodes": 2, "master_port": free_port()}

    async def main(other: subprocess.Popen[bytes]) -> None:
        llm = await AsyncLLM.start(serve_args(dtype="float32", **settings))
        try:
            token_ids: list[int] = []
            prompt = {"prompt_token_ids": PROMPTS[0]}
            async for output in llm.generate(prompt, PARAMS, request_id="0", delta=True):
                token_ids += output.outputs[0].token_ids
                if len(token_ids) == 5:
                    os.kill(children(other.pid)[0], signal.SIGKILL)
            assert (await llm.stats()).num_restarts == 1
            assert token_ids == expected
        finally:
            await llm.shutdown()
        await until(lambda: not children(other.pid))

    expected = generate()[0][0]
    with headless(**settings) as other:
        asyncio.run(main(other))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"node_rank": 0, "nnodes": 2},
            "node_rank from 1 to nnodes - 1, but nnodes=2 and node_rank=0",
        ),
        ({}, "nnodes of at least 2"),
        ({"node_rank": 2, "nnodes": 2}, "node_rank=2 must be less than nnodes=2"),
        ({"tensor_parallel_size": 3, "nnodes": 2, "node_rank": 1}, "equal parts of the 3 ranks"),
    ],
)
def test_settings_of_a_machine_without_a_server(settings: dict[str, Any], message: str) -> None:
    sizes = {"tensor_parallel_size": 2} | settings
    with pytest.raises(ConfigError, match=message):
        run_headless(serve_args(**sizes))
