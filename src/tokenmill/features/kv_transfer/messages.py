"""What engines say to each other about blocks: msgpack over ZMQ, and blocks as frames of their own.

    taker: Fetch(request_id, root, keys)     giver: Found(keys) | block | block | ...   or Refused
    taker: Release(request_id)               nothing comes back

With a secret the connection is CURVE's: encrypted, and only whoever knows the secret can open one.
Both sides' keys are made of it, so that the giver's public key, which is never sent, is as secret.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import NamedTuple

import msgspec
import zmq
from zmq.utils import z85

from tokenmill.errors import ConfigError

MAX_REQUEST_BYTES = 1 << 20
"""Of a question."""
MAX_KEYS = 1024
"""Blocks in one question."""


class Fetch(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Asks for blocks that are held."""

    request_id: str
    root: bytes
    """`root_mark` of the taker's root: other roots have other blocks."""
    keys: list[bytes]


class Release(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """The taker has what it needs."""

    request_id: str


class Found(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """These of the blocks follow, one frame each."""

    keys: list[bytes]


class Refused(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Nothing follows."""

    reason: str


Question = Fetch | Release
Answer = Found | Refused

_encoder = msgspec.msgpack.Encoder()
_questions: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(message: Question | Answer) -> bytes:
    """A message as a frame."""
    return _encoder.encode(message)


def decode_question(frame: bytes) -> Question:
    """Raises `msgspec.MsgspecError` for anything else."""
    return _questions.decode(frame)


def decode_answer(frame: bytes) -> Answer:
    """Raises `msgspec.MsgspecError` for anything else."""
    return _answers.decode(frame)


def root_mark(root: bytes) -> bytes:
    """What says that two engines' roots are equal, and not what they are."""
    return hashlib.sha256(b"root" + root).digest()


class CurveKeys(NamedTuple):
    """A side's key pair, as ZMQ writes them."""

    public: bytes
    secret: bytes


def curve_keys(secret: bytes, side: bytes) -> CurveKeys:
    """Those of the `giver` or the `taker`. Raises `ConfigError` if this ZMQ has no CURVE."""
    if not zmq.has("curve"):
        raise ConfigError(
            "kv_transfer_config: secret_file needs a libzmq with CURVE, and this one was built"
            " without; install pyzmq from its wheels."
        )
    private = z85.encode(hmac.digest(secret, b"tokenmill KV " + side, "sha256"))
    return CurveKeys(zmq.curve_public(private), private)


def tcp_address(host: str, port: int) -> str:
    """As ZMQ writes it."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
