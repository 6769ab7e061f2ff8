"""`tokenmill serve` from its start to its end, with a real engine behind it."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import openai
import pytest

from helpers.certificate import CERTIFICATE
from helpers.live_server import chunks_of
from helpers.serve_process import ServeProcess
from tokenmill.entrypoints.http.server import EXIT_ENGINE_DEAD

LONG = {"max_tokens": 300, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def served():
    with ServeProcess("--log-format", "json", "--log-requests", "--enable-admin") as process:
        yield process


@pytest.fixture(scope="module")
def client(served):
    return served.client()


def text_of(chunks):
    return "".join(chunk["choices"][0].get("text") or "" for chunk in chunks if chunk["choices"])


def test_streams_equal_answers_in_one_piece(client):
    for fields in (
        {"temperature": 0},
        {"seed": 5, "temperature": 1, "logprobs": 2},
        {"seed": 6, "stop": [" ", "e"], "max_tokens": 100},
        {"temperature": 0, "echo": True, "max_tokens": 30},
    ):
        whole = client.complete(**fields).json
        chunks = chunks_of(
            client.complete(**fields, stream=True, stream_options={"include_usage": True})
        )
        assert text_of(chunks) == whole["choices"][0]["text"]
        assert chunks[-1]["usage"] == whole["usage"]


def test_b011_seeds_decide(client):
    fields = {"n": 4, "seed": 1, "temperature": 1, "max_tokens": 12}
    first, second = client.complete(**fields).json, client.complete(**fields).json
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in second["choices"]]
    assert len(set(texts)) > 1


def test_b010_neighbours_change_nothing(client):
    fields = {"seed": 3, "temperature": 1, "max_tokens": 30}
    alone = client.complete(**fields).json["choices"][0]["text"]
    with ThreadPoolExecutor(9) as pool:
        others = [pool.submit(client.complete, prompt=f"x{i} ", max_tokens=40) for i in range(8)]
        among = pool.submit(client.complete, **fields)
        assert among.result().json["choices"][0]["text"] == alone
        assert all(other.result().status == 200 for other in others)


def test_b023_prompt_and_output_fit_the_context(client):
    limit = client.get("/v1/models").json["data"][0]["max_model_len"]
    for length in (limit - 2, limit - 1):
        for max_tokens in (1, 2, 5000):
            usage = client.complete(prompt=[5] * length, max_tokens=max_tokens, ignore_eos=True)
            assert usage.json["usage"]["total_tokens"] == min(length + max_tokens, limit)
            assert usage.json["choices"][0]["finish_reason"] == "length"
    for length in (limit, limit + 1):
        reply = client.complete(prompt=[5] * length)
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
        assert str(length) in reply.error["message"]
        assert str(limit) in reply.error["message"]


def test_b137_salts_keep_caches_apart(client):
    prompt = {"prompt": "One two three four five six " * 8, "max_tokens": 4, "temperature": 0}
    hits = []
    for salt in (None, None, "a", "b", "a"):
        before = metric(client, "vllm:prefix_cache_hits_total")
        reply = client.complete(**prompt, cache_salt=salt)
        assert reply.status == 200
        wait_for(lambda: metric(client, "vllm:num_requests_running") == 0)
        hits.append(metric(client, "vllm:prefix_cache_hits_total") - before > 0)
    assert hits == [False, True, False, False, True]
    assert client.post("/reset_prefix_cache", b"").status == 200
    before = metric(client, "vllm:prefix_cache_hits_total")
    client.complete(**prompt)
    assert metric(client, "vllm:prefix_cache_hits_total") == before


def test_b087_b124_streams_that_are_cut_leave_nothing(client):
    for _ in range(8):
        connection = client.open("/v1/completions", {"prompt": "One", "stream": True, **LONG})
        connection.getresponse().readline()
        connection.close()
    wait_for(lambda: metric(client, "vllm:num_requests_running") == 0)
    assert metric(client, "vllm:num_requests_waiting") == 0
    assert metric(client, "vllm:kv_cache_usage_perc") == 0


def test_the_official_client(client):
    url = f"http://127.0.0.1:{client.port}/v1"
    with openai.OpenAI(base_url=url, api_key="-", max_retries=0) as official:
        messages = [{"role": "user", "content": "Hi"}]
        fields = {"model": "", "messages": messages, "temperature": 0, "max_tokens": 20}
        whole = official.chat.completions.create(**fields)
        stream = official.chat.completions.create(**fields, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == whole.choices[0].message.content


def test_b035_a_core_that_is_killed_loses_no_stream(served, client):
    def ask(number):
        fields = {"prompt": f"One two {number}", "max_tokens": 120, "ignore_eos": True}
        fields["temperature"] = 0 if number % 2 else 1
        return text_of(chunks_of(client.complete(**fields, seed=number, stream=True)))

    with ThreadPoolExecutor(6) as pool:
        undisturbed = list(pool.map(ask, range(6)))
        asks = [pool.submit(ask, number) for number in range(6)]
        wait_for(lambda: metric(client, "vllm:num_requests_running") == 6)
        os.kill(served.core(), signal.SIGKILL)
        assert [each.result() for each in asks] == undisturbed
    assert metric(client, "tokenmill:core_restarts_total") == 1
    assert client.get("/health").status == 200


def test_b133_only_the_http_port_listens(served, client):
    with open("/proc/net/tcp") as file:
        lines = [line.split() for line in file.readlines()[1:]]
    inodes = {line[9]: line[1] for line in lines if line[3] == "0A"}
    listening = set()
    for pid in (served.process.pid, *served.children()):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                listening.add(inodes.get(target[8:-1]))
    assert listening - {None} == {f"0100007F:{client.port:04X}"}


def test_the_log_is_json_and_holds_no_prompt(served, client):
    client.complete(prompt="xyzzy plugh", max_tokens=3, ignore_eos=True)
    wait_for(lambda: served.json_lines()[-1].get("path") == "/v1/completions")
    line = served.json_lines()[-1]
    assert (line["status"], line["method"], line["output_tokens"]) == (200, "POST", 3)
    assert line["first_token_seconds"] <= line["seconds"]
    assert "xyzzy" not in served.stderr


def test_b120_sigterm_lets_a_stream_finish(tmp_path):
    path, keys = tmp_path / "socket", tmp_path / "keys"
    keys.write_text("sk-1\n")
    with ServeProcess("--uds", str(path), TOKENMILL_SERVE_API_KEY_FILE=str(keys)) as process:
        assert process.wait_until_ready() == f"unix:{path}"
        assert path.stat().st_mode & 0o777 == 0o600
        assert unix_request(path, "GET", "/v1/models", key=None)[0] == 401
        replies = []
        body = {"prompt": "One", "stream": True, **LONG}
        thread = threading.Thread(
            target=lambda: replies.append(unix_request(path, "POST", "/v1/completions", body))
        )
        thread.start()
        wait_for(lambda: b'"server_load":1' in unix_request(path, "GET", "/load")[1])
        children = process.children()
        process.signal(signal.SIGTERM)
        wait_for(lambda: unix_request(path, "GET", "/ready")[0] == 503)
        assert unix_request(path, "GET", "/health")[0] == 200
        assert unix_request(path, "POST", "/v1/completions", {"prompt": "One"})[0] == 503
        thread.join()
        assert process.wait() == 0
        status, stream = replies[0]
        assert status == 200
        assert stream.endswith(b"data: [DONE]\n\n")
        assert b'"finish_reason":"length"' in stream
        assert not path.exists()
        assert not any(os.path.exists(f"/proc/{pid}") for pid in children)


def test_b120_a_second_signal_ends_what_runs(tmp_path):
    pem = tmp_path / "server.pem"
    pem.write_text(CERTIFICATE)
    with ServeProcess("--ssl-certfile", str(pem), "--ssl-keyfile", str(pem)) as process:
        address = process.wait_until_ready()
        assert address.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(pem))
        body = json.dumps({"prompt": "One", "stream": True, "n": 8, **LONG, "temperature": 1})
        request = urllib.request.Request(
            f"{address}/v1/completions", body.encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, context=context, timeout=60) as response:
            response.readline()
            process.signal(signal.SIGINT)
            time.sleep(0.1)
            process.signal(signal.SIGINT)
            events = response.read().decode().strip().split("\n\n")
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "unavailable"
        assert events[-1] == "data: [DONE]"
        assert process.wait() == 0


def test_b035_an_engine_that_dies_for_good_ends_the_server(tmp_path):
    notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notices.bind(str(tmp_path / "notify"))
    notices.settimeout(60)
    environment = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
    with notices, ServeProcess("--max-restarts", "0", **environment) as process:
        client = process.client()
        assert notices.recv(100) == b"READY=1"
        connection = client.open("/v1/completions", {"prompt": "One", "stream": True, **LONG})
        response = connection.getresponse()
        response.readline()
        os.kill(process.core(), signal.SIGKILL)
        events = response.read().decode().strip().split("\n\n")
        assert json.loads(events[-2].removeprefix("data: "))["error"]["type"] == "server_error"
        assert events[-1] == "data: [DONE]"
        connection.close()
        assert process.wait() == EXIT_ENGINE_DEAD
        assert notices.recv(100) == b"STOPPING=1"


def test_b120_a_signal_while_the_model_is_loaded():
    with ServeProcess() as process:
        wait_for(lambda: process.children() or process.process.poll() is not None)
        children = process.children()
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in children), seconds=5)


def unix_request(path, method, target, body=None, key="sk-1"):
    connection = HTTPConnection("localhost", timeout=60)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(path))
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    connection.request(method, target, body and json.dumps(body).encode(), headers)
    response = connection.getresponse()
    try:
        return response.status, response.read()
    finally:
        connection.close()


def metric(client, name):
    text = client.get("/metrics").body.decode()
    return sum(float(x.split()[-1]) for x in text.splitlines() if x.startswith(name + "{"))


def wait_for(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.02)
