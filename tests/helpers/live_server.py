"""A server on a socket, in a thread of the test's own process, and the plainest of clients."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading
import time
from dataclasses import dataclass

from helpers.fake_engine import FakeEngine
from tokenmill.config.serve_args import ServeArgs
from tokenmill.engine.serve_options import ServeOptions
from tokenmill.entrypoints.http.app import create_app
from tokenmill.entrypoints.http.lifetime import make_uvicorn, until_listening
from tokenmill.entrypoints.http.listener import bind
from tokenmill.entrypoints.http.state import make_state


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        return self.json["error"]

    @property
    def events(self):
        """Data of the events; strict: every line is an event, a comment or empty."""
        return parse_events(self.body)


def parse_events(body):
    events = []
    for block in body.decode().split("\n\n")[:-1]:
        for line in block.split("\n"):
            if line.startswith(":"):
                continue
            assert line.startswith("data: "), line
            events.append(line.removeprefix("data: "))
    assert body.endswith(b"\n\n")
    return events


def chunks_of(reply):
    """Decoded events of a stream that ends as every stream must."""
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.events.count("[DONE]") == 1
    assert reply.events[-1] == "[DONE]"
    return [json.loads(event) for event in reply.events[:-1]]


class Client:
    """One connection for each request."""

    def __init__(self, port, headers=None):
        self.port = port
        self.headers = headers or {}

    def request(self, method, path, body=None, headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            given = {**self.headers, **(headers or {})}
            if body is not None and not isinstance(body, bytes):
                body = json.dumps(body).encode()
            if body is not None:
                given.setdefault("content-type", "application/json")
            connection.request(method, path, body, given)
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, names, response.read())

    def get(self, path, **headers):
        return self.request("GET", path, headers=headers)

    def post(self, path, body, **headers):
        return self.request("POST", path, body, headers)

    def complete(self, **fields):
        return self.post("/v1/completions", {"prompt": "One two three", **fields})

    def chat(self, **fields):
        return self.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], **fields}
        )

    def open(self, path, body):
        """A connection whose answer has begun."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {**self.headers, "content-type": "application/json"}
        connection.request("POST", path, json.dumps(body).encode(), headers)
        return connection


class InThread:
    """On a socket, in a thread of the test's own process, until the end of the `with` block.

    `_serve` listens: it sets `loop`, `port` and `_end`, then `_ready`, and returns after `_end`.
    """

    def __init__(self):
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *exc_info):
        self.stop()

    def stop(self):
        """End it, with all of its connections; may be called twice."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._end.set)
            self._thread.join(30)
        assert not self._thread.is_alive()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"


async def end(server, serving):
    """End a uvicorn server as it ends itself, but without its two pauses of 0.1 s: hundreds of
    tests have servers of their own.
    """
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    for each in server.servers:
        each.close()
    state = server.server_state
    for connection in list(state.connections):
        connection.shutdown()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.1):
            while state.connections or state.tasks:
                await asyncio.sleep(0.001)


class LiveApp(InThread, Client):
    """What listens, with a client of its own."""

    def __init__(self, headers=None):
        InThread.__init__(self)
        Client.__init__(self, None, headers)

    def wait_until(self, condition, seconds=60.0):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "not in time"
            time.sleep(0.005)


class LiveServer(LiveApp):
    """Serves `engine`."""

    def __init__(self, engine=None, *, options=None, chat_template=None, **args):
        self.engine = engine or FakeEngine()
        self.args = ServeArgs(port=0, **args)
        self.options = options or ServeOptions()
        self.chat_template = chat_template
        key = (self.args.api_key or [None])[0]
        super().__init__({"authorization": f"Bearer {key}"} if key else {})

    def run(self, coroutine):
        """Run a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    async def _serve(self):
        self.loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        with bind(self.args) as listener:
            self.state = make_state(
                self.engine, self.args, self.options, chat_template=self.chat_template
            )
            self.port = listener.socket.getsockname()[1]
            server = make_uvicorn(create_app(self.state), self.state.args)
            serving = asyncio.create_task(server.serve(sockets=[listener.socket]))
            await until_listening(server, serving, listener.address)
            self._ready.set()
            await asyncio.wait(
                [serving, asyncio.create_task(self._end.wait())],
                return_when=asyncio.FIRST_COMPLETED,
            )
            self.state.stop_active()
            await end(server, serving)
            await self.state.responses.close()
