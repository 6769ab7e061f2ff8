"""Front ends that end in whatever way, and take their cores with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from helpers.served import FACTORIES, process_exists, serve_args

PARENT = f"""
import asyncio, sys
from tokenmill.config.engine_args import EngineArgs
from tokenmill.engine.async_llm import AsyncLLM
from tokenmill.sampling_params import SamplingParams

async def main():
    args = EngineArgs(model=sys.argv[1], num_kv_blocks=65, block_size=16, device="cpu")
    llm = await AsyncLLM.start(args, core_factory="{FACTORIES}:fake_core")
    print(llm.core_pid, flush=True)
    async for _ in llm.generate([3, 4], SamplingParams(max_tokens=500), request_id="0"):
        pass
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_core_outlives_its_front_end(ending):
    """B120."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", PARENT, serve_args().model]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, start_new_session=True
    ) as parent:
        core_pid = int(parent.stdout.readline())
        assert process_exists(core_pid)
        if ending is signal.SIGKILL:
            parent.kill()
        else:  # as a terminal does it: to the whole group
            os.killpg(parent.pid, ending)
        parent.wait(timeout=60)
        end = time.monotonic() + 30
        while process_exists(core_pid):
            assert time.monotonic() < end, "the core is an orphan"
            time.sleep(0.01)
