"""Clients that leave: their requests end at once, wherever they are."""

from __future__ import annotations

import logging
import socket
import struct

import pytest

from helpers.fake_engine import FakeEngine, Script
from helpers.live_server import LiveServer

FOREVER = 10_000


def endless(prompt, params):
    return Script([5] * FOREVER, step_seconds=0.01)


def queued(prompt, params):
    return Script([5], first_step_seconds=600.0)


def leave(connection, *, reset=False):
    if reset:
        linger = struct.pack("ii", 1, 0)
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    connection.close()


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("author", [endless, queued])
@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "One", "stream": True},
        {"prompt": "One"},
        {"prompt": ["One", "two", "three"], "stream": True},
        {"prompt": ["One", "two", "three"]},
        {"prompt": "One", "n": 3, "temperature": 1, "stream": True},
        {"messages": [{"role": "user", "content": "Hi"}], "stream": True},
        {"messages": [{"role": "user", "content": "Hi"}]},
    ],
)
def test_b087_the_request_ends_when_its_client_leaves(fields, author, reset, caplog):
    caplog.set_level(logging.INFO, "tokenmill.access")
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    num_prompts = len(fields["prompt"]) if isinstance(fields.get("prompt"), list) else 1
    # With every optional middleware on.
    with LiveServer(
        FakeEngine(author, max_model_len=16384),
        log_requests=True,
        allowed_origins=["*"],
    ) as server:
        connection = server.open(path, {"max_tokens": FOREVER, **fields})
        server.wait_until(lambda: len(server.engine.running) == num_prompts)
        if fields.get("stream") and author is endless:
            connection.getresponse().readline()
        before = server.engine.num_output_tokens
        leave(connection, reset=reset)
        server.wait_until(lambda: not server.engine.running)
        server.wait_until(lambda: not server.state.active)
        assert server.engine.num_aborted == num_prompts
        # In steps of 10 ms: within two seconds, however slow the machine is.
        num_sequences = num_prompts * fields.get("n", 1)
        assert server.engine.num_output_tokens - before <= 200 * num_sequences
        assert server.state.admission.num_sequences == 0
        metrics = server.get("/metrics").body.decode()
        assert 'status="499"' in metrics
        aborted = 'vllm:request_success_total{engine="0",finished_reason="abort"'
        (line,) = [line for line in metrics.splitlines() if line.startswith(aborted)]
        assert float(line.split()[-1]) == num_prompts * fields.get("n", 1)
    assert "status=499" in caplog.text


def test_b087_a_client_that_leaves_before_its_body_is_complete():
    with LiveServer() as server, socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 1000\r\n\r\n{"
        )
        sock.close()
        counted = 'http_requests_total{handler="/v1/completions",method="POST",status="499"} 1.0'
        server.wait_until(lambda: counted in server.get("/metrics").body.decode())


def test_a_client_that_does_not_read_holds_nobody_up():
    """Its stream waits; the others go on, and the engine merges what it has not fetched."""
    author = lambda prompt, params: Script([5] * 3000)  # noqa: E731
    with LiveServer(FakeEngine(author, max_model_len=16384)) as server:
        lazy = server.open(
            "/v1/completions", {"prompt": "One", "stream": True, "max_tokens": 3000, "logprobs": 5}
        )
        server.wait_until(lambda: server.engine.running)
        assert server.complete(max_tokens=50).status == 200
        leave(lazy)
        server.wait_until(lambda: not server.engine.running)


def test_many_prompts_whose_client_does_not_read():
    """More prompts than outputs are kept for a slow client, and then it leaves."""
    author = lambda prompt, params: Script([5] * 3000)  # noqa: E731
    engine = FakeEngine(author, max_model_len=16384, max_num_seqs=64)
    with LiveServer(engine) as server:
        body = {"prompt": ["One"] * 40, "stream": True, "max_tokens": 3000, "logprobs": 5}
        lazy = server.open("/v1/completions", body)
        server.wait_until(lambda: len(server.engine.running) == 40)
        assert server.complete(max_tokens=50).status == 200
        leave(lazy)
        server.wait_until(lambda: not server.engine.running)
        server.wait_until(lambda: not server.state.active)
        assert server.complete(max_tokens=50).status == 200


def test_streams_cut_at_random_leave_nothing():
    import random

    random.seed(0)
    author = lambda prompt, params: Script([5] * 40, step_seconds=0.001)  # noqa: E731
    with LiveServer(FakeEngine(author, max_num_seqs=64)) as server:
        for _ in range(40):
            connections = [
                server.open("/v1/completions", {"prompt": "One", "stream": True, "max_tokens": 40})
                for _ in range(4)
            ]
            for connection in connections:
                if random.random() < 0.7:
                    response = connection.getresponse()
                    response.read(random.randrange(1, 2000))
                leave(connection, reset=random.random() < 0.5)
        server.wait_until(lambda: not server.engine.running)
        server.wait_until(lambda: not server.state.active)
        assert server.state.admission.num_sequences == 0
        assert server.complete(max_tokens=40).json["usage"]["completion_tokens"] == 40
