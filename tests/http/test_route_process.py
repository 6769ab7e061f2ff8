"""`tokenmill route` as a command, and a load on it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from helpers.cli import run_cli
from helpers.exposition import families, value
from helpers.fake_engine import FakeEngine, Script
from helpers.live_router import LiveRouter
from helpers.live_server import Client, LiveServer, chunks_of
from helpers.serve_process import ServeProcess
from tokenmill.entrypoints.bench.load import measure_load
from tokenmill.entrypoints.bench.load_options import LoadOptions

READY = re.compile(r"router is ready after .*?\n.*address +(\S+)", re.DOTALL)


@contextmanager
def route_process(*arguments, **environment):
    """(process, client, what it has said so far)"""
    code = "from tokenmill.entrypoints.cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "route", "--port", "0", *arguments],
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
        text=True,
    )
    said = ""
    try:
        while (match := READY.search(said)) is None:
            line = process.stderr.readline()
            assert line, said
            said += line
        yield process, Client(int(match[1].rpartition(":")[2])), said
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_the_command_routes_drains_and_ends():
    engine = FakeEngine(lambda prompt, params: Script([5] * 40, step_seconds=0.02))
    with LiveServer() as quick, LiveServer(engine) as slow:
        arguments = ["--backend", quick.url, "--policy", "round_robin"]
        with route_process(*arguments, TOKENMILL_ROUTE_RETRIES="1") as (_, client, said):
            assert "round_robin" in said
            assert f"{quick.url} (fake/model)" in said
            assert client.complete(max_tokens=2).status == 200
        with (
            route_process("--backend", slow.url) as (process, client, _),
            ThreadPoolExecutor(1) as pool,
        ):
            stream = pool.submit(client.complete, max_tokens=40, stream=True)
            while not engine.running:
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            assert len(chunks_of(stream.result())) >= 40
            assert process.wait(30) == 0


def test_settings_are_printed_without_keys():
    result = run_cli(
        "route", "--backend", "http://a", "--api-key", "hidden", "--backend-api-key", "secret",
        "--print-config",
    )  # fmt: skip
    assert result.exit_code == 0
    assert 'backend: ["http://a"]  # command line' in result.stdout
    assert "hidden" not in result.stdout
    assert "secret" not in result.stdout
    result = run_cli("route")
    assert result.exit_code == 2
    assert "backend is missing" in result.stderr


def test_bench_serve_measures_what_is_behind_a_router():
    def eight(prompt, params):
        return Script([5] * 8)

    with (
        LiveServer(FakeEngine(eight)) as first,
        LiveServer(FakeEngine(eight)) as second,
        LiveRouter(first.url, second.url) as router,
    ):
        options = LoadOptions(
            base_url=router.url, num_prompts=8, input_len=16, output_len=8, concurrency=4
        )
        report = asyncio.run(measure_load(options, None))
        assert report.model == "fake/model"
        assert (report.num_completed, report.num_failed) == (8, 0)
        assert report.num_output_tokens == 8 * 8
        assert first.engine.calls
        assert second.engine.calls


@pytest.mark.slow
def test_prompts_here_and_tokens_there_are_the_tokens_of_one_server():
    producer = json.dumps({"kv_connector": "TCPConnector", "kv_role": "kv_producer"})
    consumer = json.dumps({"kv_connector": "TCPConnector", "kv_role": "kv_consumer"})
    with (
        ServeProcess("--kv-transfer-config", producer, "--data-parallel-size", "2") as first,
        ServeProcess("--kv-transfer-config", consumer) as second,
    ):
        prefill, decode = first.wait_until_ready(), second.wait_until_ready()
        prompts = [f"{number} foxes and a dog. " * 10 for number in range(4)]
        fields = {"max_tokens": 20, "temperature": 0}
        alone = [first.client().complete(prompt=p, **fields).json["choices"] for p in prompts]
        with LiveRouter(prefill=[prefill], decode=[decode]) as router:
            paired = [router.complete(prompt=p, **fields).json["choices"] for p in prompts]
            chat = router.chat(stream=True, **fields)
            assert chunks_of(chat)[-1]["choices"][0]["finish_reason"] == "length"
        assert paired == alone
        found = families(second.client())
        assert value(found, "vllm:external_prefix_cache_hits_total") >= 4 * 32
