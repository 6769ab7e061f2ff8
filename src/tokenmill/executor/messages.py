"""What the executor and the processes of ranks say to each other.

msgspec structs as msgpack arrays over a stream, each behind its length. Nothing is ever unpickled:
the bytes decode to these types or not at all.

    executor -> rank    RankSetup, once; then Execute, Sample, LoadAdapter, Stop
    rank -> executor    Hello first, if it is on another machine; LogRecord at any time;
                        StoreAddress and LoadProgress while it is built, then Built; then
                        StepResult of the output rank, AdapterLoaded; Failed is the last message
"""

from __future__ import annotations

import socket
import struct

import msgspec

from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.engine_config import EngineConfig
from tokenmill.contracts.encoding import ErrorInfo, LogRecord, plain
from tokenmill.contracts.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec
from tokenmill.contracts.plan import GrammarOutput, SchedulerOutput
from tokenmill.contracts.request import AdapterInfo
from tokenmill.contracts.result import ModelRunnerOutput, SampledTokens
from tokenmill.errors import EngineDeadError

_LENGTH = struct.Struct("<Q")
_MAX_BYTES = 1 << 34
"""Of a message; more is none of ours."""
HELLO_BYTES = 64
"""Of a `Hello`: whoever has not said it yet makes nobody take memory for more."""


class RankSetup(msgspec.Struct, array_like=True, tag=0):
    """All that a rank is built from."""

    args: EngineArgs
    config: EngineConfig
    rank: int
    store_address: str | None
    """Where the ranks of a process group meet; empty for the one that opens the place, None if
    there is no such group."""
    log_level: int


class Execute(msgspec.Struct, array_like=True, tag=1):
    """Apply a plan and run its forward pass."""

    plan: SchedulerOutput
    sampled: list[SampledTokens] = []
    """Of earlier steps: to be learnt first."""


class Sample(msgspec.Struct, array_like=True, tag=2):
    """Finish the step that was begun last."""

    grammar_output: GrammarOutput | None


class LoadAdapter(msgspec.Struct, array_like=True, tag=3):
    """Read an adapter beside the steps; answered by `AdapterLoaded`."""

    number: int
    directory: str


class Stop(msgspec.Struct, array_like=True, tag=4):
    """End the process."""


class Hello(msgspec.Struct, array_like=True, tag=1):
    """A rank on another machine is there."""

    rank: int


class StoreAddress(msgspec.Struct, array_like=True, tag=2):
    """Where the other ranks of the process group may come to."""

    address: str


class LoadProgress(msgspec.Struct, array_like=True, tag=3):
    """How far a rank has loaded its part."""

    done: int
    total: int


class Built(msgspec.Struct, array_like=True, tag=4):
    """The rank takes plans; its KV cache is like this."""

    num_blocks: int
    block_size: int
    groups: list[tuple[tuple[str, ...], KVCacheSpec]]
    arithmetic: str
    """What decides about bits: the version, and the instruction set."""

    @classmethod
    def of(cls, cache: KVCacheConfig, arithmetic: str) -> Built:
        """With a cache of KV only."""
        assert not cache.num_state_blocks
        groups = [(each.layer_names, each.spec) for each in cache.groups]
        return cls(cache.num_blocks, cache.block_size, groups, arithmetic)  # type: ignore[arg-type]

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        groups = tuple(KVCacheGroup(names, spec) for names, spec in self.groups)
        return KVCacheConfig(self.num_blocks, self.block_size, groups)


class StepResult(msgspec.Struct, array_like=True, tag=5):
    """A step has finished."""

    output: ModelRunnerOutput


class AdapterLoaded(msgspec.Struct, array_like=True, tag=6):
    """Answer to `LoadAdapter`: one of the two."""

    number: int
    info: AdapterInfo | None
    error: ErrorInfo | None


class Failed(msgspec.Struct, array_like=True, tag=7):
    """The rank cannot go on; its process ends."""

    error: ErrorInfo
    is_consequence: bool = False
    """Whether it has noticed that another one failed."""


ToRank = RankSetup | Execute | Sample | LoadAdapter | Stop
FromRank = (
    Hello | LogRecord | StoreAddress | LoadProgress | Built | StepResult | AdapterLoaded | Failed
)

_encoder = msgspec.msgpack.Encoder(enc_hook=plain)
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


def frame(message: ToRank | FromRank) -> bytes:
    """A message as it goes over a stream."""
    data = _encoder.encode(message)
    return _LENGTH.pack(len(data)) + data


def receive_to_rank(stream: socket.socket) -> ToRank:
    """The next message from the executor. Raises `EOFError` if it has gone."""
    return _to_rank.decode(_receive(stream))


def receive_from_rank(stream: socket.socket, max_bytes: int = _MAX_BYTES) -> FromRank:
    """The next message from a rank. Raises `EOFError` if it has gone, and `EngineDeadError` for
    bytes that are no message, or more of them than `max_bytes`.
    """
    data = _receive(stream, max_bytes)
    try:
        return _from_rank.decode(data)
    except msgspec.DecodeError as error:
        raise EngineDeadError(f"a rank has sent what is no message: {error}") from error


def _receive(stream: socket.socket, max_bytes: int = _MAX_BYTES) -> bytearray:
    (length,) = _LENGTH.unpack(_exactly(stream, _LENGTH.size))
    if length > max_bytes:
        raise EngineDeadError(f"a message of {length} bytes is none of a rank's")
    return _exactly(stream, length)


def _exactly(stream: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        try:
            received = stream.recv_into(view[done:])
        except ConnectionError:
            received = 0
        if not received:
            raise EOFError
        done += received
    return data
