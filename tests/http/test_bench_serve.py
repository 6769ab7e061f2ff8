"""`tokenmill bench serve`: figures that can be computed by hand, and servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import math

import pytest

from helpers.cli import run_cli
from helpers.fake_engine import FakeEngine, Script
from helpers.live_server import LiveServer
from tokenmill.contracts.request import FinishReason
from tokenmill.entrypoints.bench.http_stream import Answer, HttpFailureError, events
from tokenmill.entrypoints.bench.load import Outcome, measure_load, report_of
from tokenmill.entrypoints.bench.load_options import LoadOptions
from tokenmill.entrypoints.bench.load_prompts import load_prompts
from tokenmill.errors import ConfigError, GenerationError
from tokenmill.observe.spread import spread

STEP = 0.02


@pytest.fixture(scope="module")
def server():
    engine = FakeEngine(lambda p, s: Script([5] * 500, step_seconds=STEP, first_step_seconds=0.1))
    with LiveServer(engine) as server:
        yield server


def options(server, **more):
    defaults = {"base_url": server.url, "num_prompts": 6, "input_len": 20, "output_len": 8}
    return LoadOptions(**(defaults | more))


def test_figures_of_a_known_server(server):
    report = asyncio.run(measure_load(options(server, concurrency=3), None))
    assert report.model == "fake/model"
    assert (report.num_completed, report.num_failed) == (6, 0)
    assert report.num_output_tokens == 6 * 8
    assert report.max_concurrency == 3
    # The first token after 100 ms, then one each 20 ms; other work may make it longer.
    assert report.ttft.percentiles["p50"] >= 100
    assert report.itl.percentiles["p50"] >= 1e3 * STEP
    assert report.tpot.percentiles["p50"] >= 1e3 * STEP
    assert report.e2el.mean >= 100 + 7 * 1e3 * STEP
    assert report.ttft.mean + 7 * report.itl.mean <= 1.001 * report.e2el.mean
    assert report.ttft.mean + 7 * report.tpot.mean == pytest.approx(report.e2el.mean)
    assert report.e2el.mean <= 1e3 * report.seconds
    assert report.seconds >= 2 * (0.1 + 7 * STEP)
    assert report.output_tokens_per_second == pytest.approx(48 / report.seconds)
    assert report.goodput is None


def test_requests_as_clients_send_them(server):
    calls = len(server.engine.calls)
    chosen = options(server, num_warmup=2, extra_body={"seed": 5}, temperature=0.5)
    asyncio.run(measure_load(chosen, None))
    new = server.engine.calls[calls:]
    assert len(new) == 8
    for prompt, params, *_ in new:
        assert (params.max_tokens, params.ignore_eos, params.seed) == (8, True, 5)
        assert params.temperature == 0.5
        assert len(prompt.text.split()) == 20
    chat = options(server, endpoint="chat", num_prompts=2, num_warmup=0, stop_early=True)
    report = asyncio.run(measure_load(chat, None))
    assert report.num_output_tokens == 16
    assert server.engine.calls[-1][1].ignore_eos is False


def test_a_rate_spreads_requests_over_time(server):
    report = asyncio.run(measure_load(options(server, request_rate=20.0, output_len=1), None))
    assert report.seconds > 0.1
    assert report.num_completed == 6


def test_goodput_counts_requests_that_keep_every_limit():
    fast = Outcome(sent=0.0, first=0.1, ended=1.0, num_output_tokens=10)
    slow = Outcome(sent=0.0, first=0.9, ended=1.0, num_output_tokens=10)
    broken = Outcome(sent=0.0, ended=0.1, error="x")
    wanted = LoadOptions(goodput="ttft:500,tpot:110,e2el:1500")
    report = report_of("m", [fast, slow, broken], 2.0, wanted, 3)
    assert report.goodput == 0.5
    assert report.share_good == pytest.approx(1 / 3)
    assert (report.num_completed, report.num_failed, report.errors) == (2, 1, ["x"])
    assert fast.tpot == pytest.approx(0.1)
    assert not fast.keeps({"tpot": 99})
    with pytest.raises(GenerationError, match="no request was answered; the first: x"):
        report_of("m", [broken], 1.0, wanted, 1)


def test_percentiles_are_linear_between_neighbours():
    result = spread([0.004, 0.001, 0.002, 0.003], [0, 50, 90, 100])
    assert result.mean == pytest.approx(2.5)
    assert result.percentiles == pytest.approx({"p0": 1.0, "p50": 2.5, "p90": 3.7, "p100": 4.0})
    assert spread([], [50]).percentiles == {"p50": 0.0}


def test_sharegpt(server, tmp_path):
    path = tmp_path / "sharegpt.json"
    turns = [
        [{"from": "human", "value": "Why is the sky blue?"}, {"from": "gpt", "value": "x" * 40}],
        [{"from": "gpt", "value": "I begin"}, {"from": "human", "value": "no"}],
        [{"from": "human", "value": "alone"}],
        [{"from": "human", "value": "y" * 9999}, {"from": "gpt", "value": "too long"}],
        [{"from": "user", "value": "Name a colour."}, {"from": "gpt", "value": "z" * 80}],
    ]
    path.write_text(json.dumps([{"id": "1", "conversations": each} for each in turns] + [5]))
    chosen = LoadOptions(sharegpt=str(path), num_prompts=4)
    prompts = load_prompts(chosen, 4.0)
    assert {(p.text, p.output_len) for p in prompts} == {
        ("Why is the sky blue?", 10),
        ("Name a colour.", 20),
    }
    assert prompts == load_prompts(chosen, 4.0)
    report = asyncio.run(measure_load(options(server, sharegpt=str(path)), None))
    assert report.num_completed == 6
    for content in ("{", "[]", "5"):
        path.write_text(content)
        with pytest.raises(ConfigError, match="sharegpt"):
            load_prompts(chosen, 4.0)
    with pytest.raises(ConfigError, match="No such file"):
        load_prompts(LoadOptions(sharegpt=str(tmp_path / "none")), 4.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_prompts": 0},
        {"concurrency": 0},
        {"endpoint": "chats"},
        {"request_rate": 0.0},
        {"request_rate": math.nan},
        {"base_url": "localhost:8000"},
        {"goodput": "tftt:5"},
        {"goodput": "ttft:x"},
        {"goodput": "ttft:-1"},
        {"percentiles": "101"},
        {"percentiles": ""},
        {"timeout": 0},
    ],
)
def test_options_that_cannot_work(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        LoadOptions(**wrong)


def test_no_server():
    with pytest.raises(HttpFailureError, match=r"no server at 127\.0\.0\.1:9"):
        asyncio.run(measure_load(LoadOptions(base_url="http://127.0.0.1:9"), None))


def test_requests_that_fail_are_counted_and_shown():
    def author(prompt, params):
        return Script([5, 6], FinishReason.ERROR, "it broke.")

    with (
        LiveServer(FakeEngine(author)) as server,
        pytest.raises(GenerationError, match="it broke"),
    ):
        asyncio.run(measure_load(options(server), None))
    with LiveServer(api_key=["k"]) as server:
        with pytest.raises(HttpFailureError, match="OPENAI_API_KEY"):
            asyncio.run(measure_load(options(server), None))
        assert asyncio.run(measure_load(options(server), "k")).num_completed == 6
        with pytest.raises(GenerationError, match="status 400"):
            asyncio.run(measure_load(options(server, temperature=9.0), "k"))


def test_a_request_that_takes_too_long_ends():
    slow = FakeEngine(lambda p, s: Script([5], first_step_seconds=30.0))
    with LiveServer(slow) as server:
        with pytest.raises(GenerationError, match=r"not done within 0\.2 s"):
            asyncio.run(measure_load(options(server, timeout=0.2, num_warmup=0), None))
        server.wait_until(lambda: not slow.running)


def test_the_command(server):
    arguments = ("bench", "serve", "--base-url", server.url, "--num-prompts", "3")
    arguments += ("--input-len", "9")
    result = run_cli(*arguments, "--output-len", "4", "--goodput", "ttft:5000", "--json")
    assert result.exit_code == 0, result.stderr
    figures = json.loads(result.stdout)
    assert (figures["command"], figures["num_completed"]) == ("serve", 3)
    assert figures["share_good"] == 1
    assert figures["options"]["request_rate"] == "inf"
    assert set(figures["ttft"]["percentiles"]) == {"p50", "p90", "p99"}
    table = run_cli(*arguments, "--output-len", "4", "--goodput", "ttft:5000").stdout
    for part in ("3 requests", "TTFT", "ITL", "goodput", "output tokens/s"):
        assert part in table
    assert run_cli("bench", "serve", "--base-url", "http://127.0.0.1:9").exit_code == 1
    assert run_cli("bench", "serve", "--percentiles", "x").exit_code == 2


def test_events_however_they_are_cut():
    stream = b': hi\r\n\r\ndata: {"a": 1}\r\n\r\ndata: x\n\ndata: [DONE]\n\n'

    async def collect(size):
        async def pieces():
            for start in range(0, len(stream), size):
                yield float(start), stream[start : start + size]

        return [data async for _, data in events(Answer(200, pieces()))]

    for size in range(1, len(stream) + 1):
        assert asyncio.run(collect(size)) == [b'{"a": 1}', b"x", b"[DONE]"]
