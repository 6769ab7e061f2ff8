"""Long runs against a real server: streams that come and go, and what a token costs."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time

import pytest

from helpers.serve_process import ServeProcess

pytestmark = pytest.mark.slow

SECONDS = 120.0
NUM_STREAMS = 200


def resident_bytes(pid):
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def stream(port, body, *, max_bytes=None):
    """Read a stream to its end, or cut it after so many bytes; what was read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps({"stream": True, **body}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(data) + data
    )
    found = b""
    while max_bytes is None or len(found) < max_bytes:
        piece = await reader.read(1 << 16)
        if not piece:
            break
        found += piece
    writer.transport.abort()
    return found


def metric(client, name):
    text = client.get("/metrics").body.decode()
    return sum(float(x.split()[-1]) for x in text.splitlines() if x.startswith(name + "{"))


def test_b083_b087_streams_cut_at_random_leave_nothing_behind():
    async def come_and_go(port, end, draw):
        while time.monotonic() < end:
            body = {"prompt": "One two " * draw.randrange(1, 60), "max_tokens": 200}
            body |= {"ignore_eos": True, "n": draw.choice([1, 1, 3]), "seed": draw.randrange(9)}
            await stream(port, body, max_bytes=draw.randrange(0, 8000))

    async def crowd(port, seconds):
        draws = [random.Random(number) for number in range(NUM_STREAMS)]
        end = time.monotonic() + seconds
        await asyncio.gather(*(come_and_go(port, end, draw) for draw in draws))

    with ServeProcess("--log-stats-interval", "0") as process:
        client = process.client()
        asyncio.run(crowd(client.port, SECONDS / 4))
        before = [resident_bytes(pid) for pid in (process.process.pid, process.core())]
        asyncio.run(crowd(client.port, SECONDS * 3 / 4))
        end = time.monotonic() + 10
        while metric(client, "vllm:num_requests_running") + metric(
            client, "vllm:num_requests_waiting"
        ):
            assert time.monotonic() < end
            time.sleep(0.05)
        assert client.complete(max_tokens=2).status == 200
        assert client.get("/load").json["server_load"] == 0
        # An idle cache counts no block as used: cached prefixes are free to be taken.
        assert metric(client, "vllm:kv_cache_usage_perc") == 0
        assert metric(client, "tokenmill:core_restarts_total") == 0
        after = [resident_bytes(pid) for pid in (process.process.pid, process.core())]
        for old, new in zip(before, after, strict=True):
            assert new < old + (32 << 20)


def test_a_streamed_token_costs_the_http_process_less_than_100_microseconds():
    num_streams, num_tokens = 64, 200

    async def crowd(port):
        bodies = [
            {"prompt": f"One two {i}", "max_tokens": num_tokens, "ignore_eos": True, "seed": i}
            for i in range(num_streams)
        ]
        return await asyncio.gather(*(stream(port, body) for body in bodies))

    with ServeProcess(max_num_seqs=64, num_kv_blocks=1024) as process:
        client = process.client()
        asyncio.run(crowd(client.port))  # once to warm up
        before = cpu_seconds(process.process.pid)
        answers = asyncio.run(crowd(client.port))
        spent = cpu_seconds(process.process.pid) - before
        assert all(answer.count(b"data: [DONE]") == 1 for answer in answers)
        assert 1e6 * spent / (num_streams * num_tokens) < 100
