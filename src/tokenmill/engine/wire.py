"""What the front end and the core's process say to each other.

msgspec structs as msgpack arrays over one ZMQ socket, in order. Nothing is ever unpickled: the
bytes decode to these types or not at all.

    front end -> core    Setup, once; then AddRequests, AbortRequests, ResetPrefixCache,
                         LoadAdapter, Operate, Stop
    core -> front end    LogRecord at any time; LoadProgress while it starts; StartupFailure, or the
                         first statistics and Ready; then StepOutputs, Refusal, PrefixCacheReset,
                         AdapterLoaded, Operated
"""

from __future__ import annotations

import msgspec

from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.engine_config import EngineConfig
from tokenmill.contracts.encoding import ErrorInfo, LogRecord, plain
from tokenmill.contracts.operations import EngineState, Operation
from tokenmill.contracts.request import AdapterInfo, EngineCoreOutputs, EngineCoreRequest
from tokenmill.errors import InvalidRequestError


class Setup(msgspec.Struct, array_like=True, tag=0):
    """All that a core is built from."""

    factory: str
    """`module:function` of what makes an `EngineCore` from the two below and `on_progress`."""
    args: EngineArgs
    config: EngineConfig
    log_level: int
    """Of the front end's `tokenmill` logger: what is below is not sent."""
    cpus: list[int] = []
    """Processors that the core keeps to; empty is all of the front end's."""


class AddRequests(msgspec.Struct, array_like=True, tag=1):
    """Queue these."""

    requests: list[EngineCoreRequest]


class AbortRequests(msgspec.Struct, array_like=True, tag=2):
    """End these, whatever they are doing; there is no answer."""

    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, array_like=True, tag=3):
    """Forget all cached prefixes; answered by `PrefixCacheReset`."""


class Stop(msgspec.Struct, array_like=True, tag=4):
    """End the process."""


class LoadAdapter(msgspec.Struct, array_like=True, tag=5):
    """Read an adapter and check it; answered by `AdapterLoaded`."""

    number: int
    """Of the question; the answer repeats it."""
    directory: str


class Operate(msgspec.Struct, array_like=True, tag=6):
    """Do an operation, when that can be; answered by `Operated`."""

    number: int
    operation: Operation


class LoadProgress(msgspec.Struct, array_like=True, tag=1):
    """How far the model is loaded."""

    stage: str
    done: int
    total: int


class StartupFailure(msgspec.Struct, array_like=True, tag=2):
    """The core could not be built; its process ends."""

    error: ErrorInfo


class Ready(msgspec.Struct, array_like=True, tag=3):
    """The core takes requests."""


class StepOutputs(msgspec.Struct, array_like=True, tag=4):
    """What a step brought, or new statistics."""

    outputs: EngineCoreOutputs


class Refusal(msgspec.Struct, array_like=True, tag=5):
    """The core cannot ever serve this request; it is not queued."""

    request_id: str
    error: ErrorInfo


class PrefixCacheReset(msgspec.Struct, array_like=True, tag=6):
    """Answer to `ResetPrefixCache`, in their order."""

    done: bool


class AdapterLoaded(msgspec.Struct, array_like=True, tag=7):
    """Answer to `LoadAdapter`: one of the two."""

    number: int
    info: AdapterInfo | None
    error: ErrorInfo | None


class Operated(msgspec.Struct, array_like=True, tag=8):
    """Answer to `Operate`, with the state behind it."""

    number: int
    state: EngineState
    error: ErrorInfo | None


ToCore = Setup | AddRequests | AbortRequests | ResetPrefixCache | Stop | LoadAdapter | Operate
FromCore = (
    LogRecord
    | LoadProgress
    | StartupFailure
    | Ready
    | StepOutputs
    | Refusal
    | PrefixCacheReset
    | AdapterLoaded
    | Operated
)


_encoder = msgspec.msgpack.Encoder(enc_hook=plain)
_to_core: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
_from_core: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)


def encode(message: ToCore | FromCore) -> bytes:
    """The bytes of a message.

    Raises `InvalidRequestError` for text that has no bytes: only what users wrote can hold that.
    """
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            "the request holds text that is not valid Unicode (one half of a surrogate pair)."
        ) from error


def decode_to_core(data: bytes) -> ToCore:
    """The message that the front end has sent."""
    return _to_core.decode(data)


def decode_from_core(data: bytes) -> FromCore:
    """The message that the core has sent."""
    return _from_core.decode(data)


def core_request(request: EngineCoreRequest) -> EngineCoreRequest:
    """A request as the core needs it: without stop strings, which the front end looks for."""
    params = request.sampling_params
    if not params.stop:
        return request
    return msgspec.structs.replace(request, sampling_params=params.replace(stop=None))
