"""What a streamed token costs the HTTP process: its processor time, all requests and tokens in it.

    python benchmarks/http_process.py [--streams 1 16 64] [--tokens 200] [--model smollm2-135m]

A server is started, and so many completions are streamed at once, each of the same length; then the
processor time that its HTTP process took meanwhile is divided by the tokens. The engine core is
another process, and so is the client, which is this one; all share the processors.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tokenmill.entrypoints.bench.http_stream import HttpFailureError, Target, events, request
from tokenmill.entrypoints.cli import event_loop

TOKENMILL = str(Path(sys.executable).with_name("tokenmill"))
START_SECONDS = 120.0


@contextlib.contextmanager
def running(model: str) -> Iterator[tuple[int, Target]]:
    """The process of a server, and where it listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [TOKENMILL, "serve", model, "--port", str(port), "--max-model-len", "2048"]
    process = subprocess.Popen(
        [*command, "--max-num-seqs", "256"], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    target = Target("127.0.0.1", port, "", None)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not asyncio.run(is_healthy(target)):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the server did not start")
            time.sleep(0.2)
        yield process.pid, target
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


async def is_healthy(target: Target) -> bool:
    """Whether somebody answers."""
    try:
        async with request(target, "GET", "/health") as answer:
            return answer.status == 200
    except HttpFailureError:
        return False


def processor_seconds(pid: int) -> float:
    """Of all threads of a process, in user and kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def stream(target: Target, number: int, num_tokens: int) -> int:
    """Events of one completion."""
    body = {
        "prompt": f"Story number {number}. Once upon a time",
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    async with request(target, "POST", "/v1/completions", json.dumps(body).encode()) as answer:
        if answer.status != 200:
            raise SystemExit(f"the server answered {answer.status}")
        return sum([1 async for _ in events(answer)])


async def crowd(target: Target, num_streams: int, num_tokens: int) -> int:
    """Events of all streams together."""
    each = (stream(target, number, num_tokens) for number in range(num_streams))
    return sum(await asyncio.gather(*each))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    with running(options.model) as (pid, target):
        event_loop.run(crowd(target, 1, 8))
        for num_streams in options.streams:
            before, started = processor_seconds(pid), time.perf_counter()
            num_events = event_loop.run(crowd(target, num_streams, options.tokens))
            seconds, took = time.perf_counter() - started, processor_seconds(pid) - before
            num_tokens = num_streams * options.tokens
            print(
                f"{num_streams:4} streams: {1e6 * took / num_tokens:6.1f} us a token"
                f" ({num_tokens / seconds:.0f} tok/s, {num_events} events)",
                flush=True,
            )


if __name__ == "__main__":
    main()
