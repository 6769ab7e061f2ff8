"""Blocks of another engine, fetched over TCP."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np
import torch
import zmq

from tokenmill.config.kv_transfer import KVTransferConfig
from tokenmill.contracts.kv_transfer import BlockCopy, RemoteOrigin
from tokenmill.features.kv_transfer.messages import (
    MAX_KEYS,
    Fetch,
    Refused,
    Release,
    curve_keys,
    decode_answer,
    encode,
    root_mark,
    tcp_address,
)

_BATCH_BYTES = 4 << 20
"""Of one answer."""
_NUM_AHEAD = 2
"""Questions under way at the same time."""
_LINGER_MS = 1000
"""How long a release may take to leave."""
_SLACK_BYTES = 1 << 16
"""Of the frame before the blocks."""
_GONE = (
    zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
"""Nobody listens there, or does not any more, or does not let us in."""


class FetchError(Exception):
    """Another engine does not give its blocks; the message says why."""


class Taker:
    """Fetches blocks, and says when they are not needed. Called from any thread."""

    def __init__(self, config: KVTransferConfig, root: bytes) -> None:
        self._config = config
        self._mark = root_mark(root)
        self._keys = curve_keys(config.secret, b"taker") if config.secret else None
        self._others_key = curve_keys(config.secret, b"giver").public if config.secret else b""
        self._context = zmq.Context(io_threads=1)

    def fetch(
        self, origin: RemoteOrigin, blocks: Sequence[BlockCopy], num_bytes: int
    ) -> Iterator[tuple[list[BlockCopy], torch.Tensor]]:
        """Blocks of `num_bytes` each as they come, uint8 [number of them, num_bytes].

        Raises `FetchError` if they do not come, or the other engine has not all of them.
        """
        size = min(max(_BATCH_BYTES // num_bytes, 1), MAX_KEYS)
        waiting = deque(blocks[begin : begin + size] for begin in range(0, len(blocks), size))
        asked: deque[Sequence[BlockCopy]] = deque()
        with self._connected(origin, num_bytes) as connection:
            while waiting or asked:
                while waiting and len(asked) < _NUM_AHEAD:
                    batch = waiting.popleft()
                    keys = [each.key for each in batch]
                    connection.send(encode(Fetch(origin.remote_request_id, self._mark, keys)))
                    asked.append(batch)
                batch = asked.popleft()
                found = _read(connection.receive(), batch, num_bytes)
                if found[0]:
                    yield found
                if len(found[0]) < len(batch):
                    raise FetchError("the other engine has not all of the blocks")

    def release(self, origin: RemoteOrigin) -> None:
        """Tell another engine that its blocks are not needed; it need not be there."""
        with self._connected(origin, 0) as connection:
            connection.send(encode(Release(origin.remote_request_id)))

    def shutdown(self) -> None:
        """End all connections; may be called twice."""
        self._context.destroy(linger=_LINGER_MS)

    @contextmanager
    def _connected(self, origin: RemoteOrigin, num_bytes: int) -> Iterator[_Connection]:
        if not self._config.may_name(origin.remote_host):
            raise FetchError(f"{origin.remote_host!r} is none of the allowed hosts")
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, num_bytes + _SLACK_BYTES)
        socket.setsockopt(zmq.IPV6, 1 if ":" in origin.remote_host else 0)
        if self._keys is not None:
            socket.curve_publickey, socket.curve_secretkey = self._keys
            socket.curve_serverkey = self._others_key
        connection = _Connection(socket, self._config.timeout_seconds)
        try:
            socket.connect(tcp_address(origin.remote_host, origin.remote_port))
            yield connection
        except zmq.ZMQError as error:
            raise FetchError(f"{origin.remote_host}: {error.strerror}") from error
        finally:
            connection.close()


class _Connection:
    """A socket, and what tells that nobody is at its other end."""

    def __init__(self, socket: zmq.Socket[bytes], timeout_seconds: float) -> None:
        self._socket = socket
        self._monitor = socket.get_monitor_socket(_GONE)
        self._timeout_seconds = timeout_seconds

    def send(self, frame: bytes) -> None:
        """Raises `FetchError` if the other engine is gone, or takes nothing."""
        self._wait(zmq.POLLOUT)
        self._socket.send(frame)

    def receive(self) -> list[bytes]:
        """The frames of an answer. Raises `FetchError` if the other engine is gone, or silent."""
        self._wait(zmq.POLLIN)
        return self._socket.recv_multipart()

    def close(self) -> None:
        """What was sent still leaves."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    def _wait(self, events: int) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, events)
        poller.register(self._monitor, zmq.POLLIN)
        ready = dict(poller.poll(int(self._timeout_seconds * 1000)))
        if self._socket in ready:
            return
        if ready:
            raise FetchError("the other engine is gone, or has another secret")
        raise FetchError(f"the other engine has been silent for {self._timeout_seconds:g} s")


def _read(
    frames: list[bytes], batch: Sequence[BlockCopy], num_bytes: int
) -> tuple[list[BlockCopy], torch.Tensor]:
    """The blocks of an answer, uint8 [number of them, num_bytes]."""
    head, *rows = frames
    try:
        answer = decode_answer(head)
    except msgspec.MsgspecError as error:
        raise FetchError(f"the answer makes no sense: {error}") from error
    if isinstance(answer, Refused):
        raise FetchError(answer.reason)
    by_key = {each.key: each for each in batch}
    found = [by_key[key] for key in answer.keys if key in by_key]
    if len(found) != len(rows) or any(len(row) != num_bytes for row in rows):
        raise FetchError("the answer does not hold the blocks that it names")
    data = np.empty((len(found), num_bytes), np.uint8)
    for place, row in zip(data, rows, strict=True):
        place[:] = np.frombuffer(row, np.uint8)
    return found, torch.from_numpy(data)
