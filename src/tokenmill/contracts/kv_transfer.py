"""Blocks on their way between the pool and other places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from tokenmill.errors import InvalidRequestError, shown


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One block of a KV cache group: its content by key, and its memory in the pool."""

    key: bytes
    """Block hash and number of the group: equal keys hold equal bytes."""
    group: int
    block_id: int


@dataclass(frozen=True, slots=True)
class Transferred:
    """What has become of a load, a save, or of blocks that were held for another engine."""

    job_id: int
    copied: frozenset[bytes] = frozenset()
    """Keys of the blocks that were copied, whole and right."""
    error: str | None = None
    """Why others were not."""


class RemoteOrigin(msgspec.Struct, frozen=True):
    """Where another engine holds the KV of a request's prompt: its answer's
    `kv_transfer_params`.
    """

    remote_engine_id: str
    remote_request_id: str
    """What it holds the blocks under."""
    remote_host: str
    remote_port: int
    num_blocks: int = 0
    """Of each sequence; from `remote_block_ids`."""


_MAX_PORT = 65_535
_LONGEST_NAME = 256
_PARAMETER = "kv_transfer_params"
_IGNORED = {"do_remote_decode", "do_remote_prefill", "remote_block_ids", "tp_size"}
_NAMES = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


def wants_remote_decode(params: Mapping[str, Any]) -> bool:
    """Whether the KV of the prompt is to be held for another engine."""
    return bool(params.get("do_remote_decode"))


def remote_origin(params: Mapping[str, Any]) -> RemoteOrigin | None:
    """Whose KV a request begins with; None if it names nobody.

    Raises `InvalidRequestError` for parameters that are not what an engine has answered.
    """
    for name in ("do_remote_decode", "do_remote_prefill"):
        if not isinstance(params.get(name, False), bool | None):
            raise _refusal(name, params[name], "must be true or false")
    if params.get("do_remote_decode") and params.get("do_remote_prefill"):
        raise InvalidRequestError(
            f"{_PARAMETER}: do_remote_decode and do_remote_prefill exclude each other: a request"
            " computes the prompt for another engine, or takes it from one.",
            parameter=_PARAMETER,
        )
    for name in params:
        if name not in _IGNORED and name not in _NAMES and params[name] is not None:
            raise _refusal(name, params[name], "is not known here")
    if not params.get("do_remote_prefill"):
        return None
    for name in _NAMES[:3]:
        value = params.get(name)
        if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_NAME:
            raise _refusal(name, value, f"must be a string of 1 to {_LONGEST_NAME} characters")
    port = params.get("remote_port")
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port <= _MAX_PORT:
        raise _refusal("remote_port", port, f"must lie between 1 and {_MAX_PORT}")
    return RemoteOrigin(
        remote_engine_id=params["remote_engine_id"],
        remote_request_id=params["remote_request_id"],
        remote_host=params["remote_host"],
        remote_port=port,
        num_blocks=_num_blocks(params.get("remote_block_ids")),
    )


def _num_blocks(block_ids: object) -> int:
    """Of a sequence in the group that has most; the ids are one list, or one for each group."""
    lists = block_ids if _is_list_of(list, block_ids) and block_ids else [block_ids]
    assert isinstance(lists, list)
    if not all(_is_list_of(int, each) for each in lists):
        raise _refusal("remote_block_ids", block_ids, "must list block ids")
    return max(map(len, lists))


def _is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, kind) and not isinstance(each, bool) for each in value
    )


def _refusal(name: str, value: object, why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{_PARAMETER}.{name}={shown(value)} {why}; hand on what the prefill engine has answered,"
        " as it is.",
        parameter=_PARAMETER,
    )
