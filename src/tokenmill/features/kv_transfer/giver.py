"""Blocks that are held for other engines, and the thread that hands them out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from tokenmill.config.kv_transfer import KVTransferConfig
from tokenmill.contracts.kv_transfer import BlockCopy, Transferred
from tokenmill.errors import ConfigError
from tokenmill.features.kv_transfer.messages import (
    MAX_KEYS,
    MAX_REQUEST_BYTES,
    Answer,
    Fetch,
    Found,
    Question,
    Refused,
    curve_keys,
    decode_question,
    encode,
    root_mark,
    tcp_address,
)
from tokenmill.features.kv_transfer.pool_blocks import PoolBlocks

logger = logging.getLogger(__name__)

_POLL_MS = 50
_LINGER_MS = 500

Frame = bytes | memoryview


@dataclass(slots=True)
class _Held:
    job_id: int
    blocks: dict[bytes, BlockCopy]
    expires: float


class Giver:
    """Holds blocks until they have been fetched, or nobody has asked for them for a while.

    The blocks do not change while they are held, so the thread reads them beside the steps.
    """

    def __init__(
        self,
        config: KVTransferConfig,
        root: bytes,
        pool: PoolBlocks,
        on_end: Callable[[Transferred], None],
    ) -> None:
        """`on_end` is called with each job that has ended, from another thread. Raises
        `ConfigError` if the address cannot be listened at.
        """
        self._config = config
        self._mark = root_mark(root)
        self._pool = pool
        self._on_end = on_end
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._is_closing = False
        self._context = zmq.Context(io_threads=1)
        self._socket = self._listen()
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(endpoint.rpartition(":")[2])
        self._thread = threading.Thread(target=self._run, name="tokenmill-kv-giver", daemon=True)
        self._thread.start()

    def hold(self, job_id: int, request_id: str, blocks: Sequence[BlockCopy]) -> Mapping[str, Any]:
        """Hand out these blocks under this name; what others must be told."""
        expires = time.monotonic() + self._config.lease_seconds
        with self._lock:
            self._held[request_id] = _Held(job_id, {each.key: each for each in blocks}, expires)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._config.engine_id,
            "remote_request_id": request_id,
            "remote_host": self._config.host,
            "remote_port": self.port,
            "tp_size": 1,
        }

    def shutdown(self) -> None:
        """Stop handing out; may be called twice."""
        self._is_closing = True
        self._thread.join()

    def _listen(self) -> zmq.Socket[bytes]:
        config, socket = self._config, self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        socket.setsockopt(zmq.IPV6, 1 if ":" in config.host else 0)
        if config.secret:
            keys = curve_keys(config.secret, b"giver")
            socket.curve_publickey, socket.curve_secretkey = keys
            socket.curve_server = True
        address = tcp_address(config.host, config.port)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"kv_transfer_config: {address} cannot be listened at: {error.strerror}. Set kv_ip"
                " to an address of this machine, and kv_port to a free port, or 0."
            ) from error
        return socket

    def _run(self) -> None:
        while not self._is_closing:
            self._end_leases()
            if self._socket.poll(_POLL_MS):
                sender, *frames = self._socket.recv_multipart()
                if answer := self._answer(frames[-1] if frames else b""):
                    self._socket.send_multipart([sender, *answer])
        self._socket.close()
        self._context.term()

    def _answer(self, frame: bytes) -> list[Frame]:
        """The frames of an answer; none to a release."""
        try:
            return self._answer_question(decode_question(frame))
        except msgspec.MsgspecError as error:
            return [encode(Refused(f"this is no question: {error}"))]
        except Exception:  # the thread goes on: leases must end
            logger.exception("KV transfer: blocks could not be given")
            return [encode(Refused("the blocks could not be read"))]

    def _answer_question(self, question: Question) -> list[Frame]:
        if not isinstance(question, Fetch):
            self._end(question.request_id)
            return []
        answer, blocks = self._look_up(question)
        return [encode(answer), *(self._bytes_of(block) for block in blocks)]

    def _look_up(self, question: Fetch) -> tuple[Answer, list[BlockCopy]]:
        if question.root != self._mark:
            return Refused("the engines differ in model, build or settings, or in the secret"), []
        if len(question.keys) > MAX_KEYS:
            return Refused(f"{len(question.keys)} blocks are asked for at once"), []
        with self._lock:
            held = self._held.get(question.request_id)
            if held is None:
                return Refused("the blocks are not held any more"), []
            held.expires = time.monotonic() + self._config.lease_seconds
            found = [held.blocks[key] for key in question.keys if key in held.blocks]
        return Found([block.key for block in found]), found

    def _bytes_of(self, block: BlockCopy) -> memoryview:
        return self._pool.read(block.group, [block.block_id])[0].numpy().data

    def _end_leases(self) -> None:
        now = time.monotonic()
        with self._lock:
            overdue = [name for name, held in self._held.items() if held.expires <= now]
        for name in overdue:
            logger.warning("KV transfer: nobody has fetched the blocks of request %s", name)
            self._end(name)

    def _end(self, request_id: str) -> None:
        with self._lock:
            held = self._held.pop(request_id, None)
        if held is not None:
            self._on_end(Transferred(held.job_id))
