"""A router on a socket, in a thread of the test's own process; and backends that do as told."""

from __future__ import annotations

import asyncio
import json

from helpers.live_server import InThread, LiveApp, end
from tokenmill.config.route_args import RouteArgs
from tokenmill.entrypoints.http.lifetime import make_uvicorn, until_listening
from tokenmill.entrypoints.http.listener import bind
from tokenmill.entrypoints.router.app import create_app
from tokenmill.entrypoints.router.server import first_look, watch_all
from tokenmill.entrypoints.router.state import make_router

QUICK = {"health_interval": 0.05, "health_timeout": 5.0, "connect_timeout": 5.0}


class LiveRouter(LiveApp):
    """Routes to `urls`."""

    def __init__(self, *urls, **args):
        backends = {} if "prefill" in args else {"backend": list(urls)}
        self.args = RouteArgs(port=0, **{**QUICK, **backends, **args})
        super().__init__()

    def wait_until_ready(self):
        self.wait_until(lambda: self.get("/ready").status == 200)

    async def _serve(self):
        self.loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        with bind(self.args) as listener:
            self.state = make_router(self.args)
            await first_look(self.state)
            self.port = listener.socket.getsockname()[1]
            server = make_uvicorn(create_app(self.state), self.state.args, date_header=False)
            serving = asyncio.create_task(server.serve(sockets=[listener.socket]))
            await until_listening(server, serving, listener.address)
            watching = watch_all(self.state)
            self._ready.set()
            await asyncio.wait(
                [serving, asyncio.create_task(self._end.wait())],
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            await end(server, serving)
            self.state.close()


class RawBackend(InThread):
    """A server that answers with the bytes it is given; keeps what it was sent.

    `behave(head, body, writer)` writes an answer, and may leave the connection in any state; the
    questions on health and models are answered well unless `is_well` says otherwise.
    """

    def __init__(self, behave=None, *, models=("m",), keep_alive=True):
        self.behave = behave or (lambda head, body, writer: writer.write(answer(b"{}")))
        self.models = models
        self.is_well = True
        self.requests = []
        """(head, body) of all but the questions."""
        self.num_connections = 0
        self.num_lost = 0
        """Connections that ended while an answer was under way."""
        self._keep_alive = keep_alive
        super().__init__()

    async def _serve(self):
        self.loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        self._tasks = set()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._end.wait()
        server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader, writer):
        task = asyncio.current_task()
        self._tasks.add(task)
        self.num_connections += 1
        try:
            while not writer.is_closing():
                await self._exchange(reader, writer)
                if not self._keep_alive:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _exchange(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        names = dict(
            line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line
        )
        body = await reader.readexactly(int(names.get(b"content-length", 0)))
        if head.startswith(b"GET /health "):
            writer.write(answer(b"") if self.is_well else answer(b"", status=503))
        elif head.startswith(b"GET /v1/models "):
            data = [{"id": name, "object": "model", "at": self.port} for name in self.models]
            writer.write(answer(json.dumps({"object": "list", "data": data}).encode()))
        else:
            self.requests.append((head, body))
            waiting = self.behave(head, body, writer)
            if waiting is not None:
                watching = asyncio.ensure_future(reader.read(1))
                working = asyncio.ensure_future(waiting)
                await asyncio.wait({watching, working}, return_when=asyncio.FIRST_COMPLETED)
                if not working.done():
                    self.num_lost += 1
                working.cancel()
                watching.cancel()
                writer.close()
        await writer.drain()


def answer(body, status=200, **headers):
    """A whole answer."""
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def named(name):
    def behave(head, body, writer):
        writer.write(answer(json.dumps({"by": name}).encode()))

    return behave


def who(reply):
    assert reply.status == 200, reply.body
    return reply.json["by"]


def header(head, name):
    found = [
        line.split(b": ", 1)[1] for line in head.split(b"\r\n") if line.startswith(name + b": ")
    ]
    assert len(found) <= 1
    return found[0] if found else None
