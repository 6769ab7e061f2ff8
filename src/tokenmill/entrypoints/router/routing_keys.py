"""What of a request decides who gets it: its model, its session, and how its prompt begins.

Prompts are compared as they were sent, as JSON: the turns of a conversation, texts with the same
beginning and lists of ids with the same beginning have the same first bytes. Nothing is tokenized.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec

from tokenmill.engine.prefix_index import prefix_keys
from tokenmill.entrypoints.http.auth import Headers
from tokenmill.entrypoints.router.responses import id_in_path, id_in_references

BLOCK_BYTES = 128
"""Of a prompt's JSON, about 32 tokens of text."""
BLOCKS_PER_LOAD = 8
"""Blocks found at a backend that outweigh one request more there."""
_MOST_BLOCKS = 4096
"""Of one prompt that are looked at."""
_BEFORE = ("model", "cache_salt", "tools", "system", "instructions")
"""Fields that a prompt begins with, or that its KV depends on."""
_PROMPTS = ("messages", "prompt", "input", "inputs", "query", "text_1")
_SESSIONS = ("prompt_cache_key", "user")
_LONGEST_NAME = 1024


@dataclass(frozen=True, slots=True)
class RoutingKeys:
    """Of one request."""

    model: str | None = None
    session: str | None = None
    response: str | None = None
    """An earlier response that it is about."""
    blocks: tuple[bytes, ...] = ()
    """Keys of the prompt's pieces (`engine.prefix_index`)."""


def read_keys(body: bytes, headers: Headers, session_header: str, path: str = "") -> RoutingKeys:
    """Of a body that need not be JSON: then nothing is known; the backend says what is wrong."""
    session = next(
        (v.decode("latin-1") for n, v in headers if n == session_header.encode("ascii")), None
    )
    response = id_in_path(path)
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return RoutingKeys(session=session, response=response)
    for name in _SESSIONS:
        session = session or _text(fields.get(name))
    root = hashlib.blake2b(b"\0".join(bytes(fields.get(name, b"")) for name in _BEFORE)).digest()
    prompt = next((fields[name] for name in _PROMPTS if name in fields), b"")
    begin = bytes(memoryview(prompt)[: BLOCK_BYTES * _MOST_BLOCKS])
    blocks = prefix_keys(begin, BLOCK_BYTES, root=root)
    response = response or _text(fields.get("previous_response_id")) or id_in_references(begin)
    return RoutingKeys(_text(fields.get("model")), session, response, tuple(blocks))


def _text(raw: msgspec.Raw | None) -> str | None:
    """A field's value, if it is a text and not empty."""
    if raw is None or len(memoryview(raw)) > _LONGEST_NAME:
        return None
    try:
        return msgspec.json.decode(raw, type=str) or None
    except msgspec.MsgspecError:
        return None
