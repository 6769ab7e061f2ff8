"""Events on the prefix cache over ZMQ, as vLLM publishes them.

PUB     topic | sequence number, 8 bytes, big-endian | batch
ROUTER  who missed some sends: empty | first number          gets: empty | number | batch, ...
        and at the end: empty | -1 | empty
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
from collections import deque

import msgspec
import zmq

from tokenmill.config.kv_events import KVEventsConfig
from tokenmill.contracts.kv_events import EventBatch
from tokenmill.errors import ConfigError

logger = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)
_POLL_SECONDS = 0.05
_LINGER_MS = 500


class EventPublisher:
    """Sends batches from a thread of its own; `publish` never waits."""

    def __init__(self, config: KVEventsConfig) -> None:
        """Raises `ConfigError` if an address cannot be listened at."""
        self._topic = config.topic.encode()
        self._queue: queue.Queue[tuple[int, EventBatch]] = queue.Queue(config.max_queue_size)
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._numbers = itertools.count()
        self._is_closing = False
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context(io_threads=1)
        self._socket = self._bound(zmq.PUB, config.endpoint, config.hwm)
        self._replay: zmq.Socket[bytes] | None = None
        if config.replay_endpoint is not None:
            self._replay = self._bound(zmq.ROUTER, config.replay_endpoint, config.hwm)
        self._thread = threading.Thread(target=self._run, name="tokenmill-kv-events", daemon=True)
        self._thread.start()

    @property
    def endpoints(self) -> tuple[str, str]:
        """Where it publishes, and where it replays; the latter empty if it does not."""
        sockets = (self._socket, self._replay)
        publish, replay = (
            "" if each is None else each.getsockopt_string(zmq.LAST_ENDPOINT) for each in sockets
        )
        return publish, replay

    def publish(self, batch: EventBatch) -> None:
        """Hand a batch over; it is dropped if too many wait, and its number with it, so that
        listeners see the gap where it is.
        """
        try:
            self._queue.put_nowait((next(self._numbers), batch))
        except queue.Full:
            logger.warning("KV events are dropped: %d batches wait", self._queue.maxsize)

    def shutdown(self) -> None:
        """Send what waits, and end; may be called twice."""
        self._is_closing = True
        self._thread.join()

    def _bound(self, kind: int, endpoint: str, hwm: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.set_hwm(hwm)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"kv_events_config: {endpoint!r} cannot be listened at: {error.strerror}. Give a"
                " free port of this machine, such as 'tcp://127.0.0.1:5557'."
            ) from error
        return socket

    def _run(self) -> None:
        while not (self._is_closing and self._queue.empty()):
            if self._replay is not None and self._replay.poll(0):
                self._answer(self._replay)
            with contextlib.suppress(queue.Empty):
                self._send(*self._queue.get(timeout=_POLL_SECONDS))
        self._context.destroy(linger=_LINGER_MS)

    def _send(self, number: int, batch: EventBatch) -> None:
        payload = self._encoder.encode(batch)
        self._sent.append((number, payload))
        self._socket.send_multipart([self._topic, number.to_bytes(8, "big"), payload])

    def _answer(self, socket: zmq.Socket[bytes]) -> None:
        """Send again from a number on."""
        client, *frames = socket.recv_multipart()
        first = int.from_bytes(frames[-1][:8], "big") if frames else 0
        for number, payload in self._sent:
            if number >= first:
                socket.send_multipart([client, b"", number.to_bytes(8, "big"), payload])
        socket.send_multipart([client, b"", END, b""])
