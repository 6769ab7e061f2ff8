"""The body of a request: read within limits, decoded with its types checked."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from tokenmill.entrypoints.http.errors import (
    BodyTooLargeError,
    ClientDisconnectedError,
    SlowBodyError,
    UnsupportedMediaTypeError,
)
from tokenmill.entrypoints.http.state import state_of
from tokenmill.entrypoints.http.unsupported import UNSUPPORTED, refuse_unsupported
from tokenmill.errors import InvalidRequestError, shown

logger = logging.getLogger(__name__)

_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""What looks like a field's name; anything else may be a prompt, and stays out of the log."""
_MAX_LOGGED_NAMES = 256
_LONGEST_PATH = 200
_SURROGATE = re.compile("[\ud800-\udfff]")
_HALF_CHARACTER = (
    " holds a lone surrogate, half of a character that UTF-16 writes in two; cut texts between"
    " characters."
)
_LONGEST_NEUTRAL = 1_024
"""Bytes that the neutral value of an unsupported field may have, blanks included."""
_MOST_VALUES = 1 << 21
"""Values that a body may hold, more than any batch of prompts as ids: a reader that builds millions
of them stops every other thread for as long."""
_MOST_MARKS = 1 << 20
"""Brackets, braces and quotation marks: texts, lists and objects take longer than numbers."""
_LARGE_BODY = 1 << 18
"""Bytes from which on decoding is noticed by the other requests, and gets a thread."""

_Fields = TypeVar("_Fields", bound=msgspec.Struct)


async def read_request(request: Request, kind: type[_Fields]) -> _Fields:
    """Read and decode a body.

    Raises `InvalidRequestError` that names the field, `BodyTooLargeError`, `SlowBodyError`,
    `UnsupportedMediaTypeError`.
    """
    _check_media_type(request)
    state = state_of(request)
    raw = await _read(request, state.args.max_body_bytes, state.args.body_timeout)
    if len(raw) < _LARGE_BODY:
        return decode_body(raw, kind)

    def decode() -> _Fields:
        _check_values(raw)
        with _collector_paused():
            return decode_body(raw, kind)

    return await state.in_text_thread(decode)


def _check_values(raw: bytes) -> None:
    """Refuse a body with too many values; marks within texts count as well, which is cheap and
    harmless, since no model takes texts with so many.
    """
    if raw.count(b",") >= _MOST_VALUES:
        raise BodyTooLargeError(
            f"the body has more than {_MOST_VALUES} values or commas; send less at a time."
        )
    if sum(map(raw.count, (b"[", b"{", b'"'))) > _MOST_MARKS:
        raise BodyTooLargeError(
            f"the body has more than {_MOST_MARKS} brackets, braces and quotation marks; send"
            f" fewer texts, lists and objects at a time."
        )


def decode_body(raw: bytes, kind: type[_Fields]) -> _Fields:
    """Decode JSON into `kind`; unknown fields are ignored and logged once for each name."""
    try:
        fields = msgspec.json.decode(raw, type=kind)
        names = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        given = {name: _value(names[name]) for name in UNSUPPORTED.keys() & names.keys()}
    except msgspec.ValidationError as error:
        _refuse_field(str(error))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        _refuse_json(raw, error)
    except RecursionError:
        _refuse_depth()
    _log_unknown(kind, names)
    refuse_unsupported(given)
    return fields


def _value(raw: msgspec.Raw) -> Any:
    """A field's value, read only if it may be neutral."""
    if len(memoryview(raw)) > _LONGEST_NEUTRAL:
        return msgspec.UNSET  # whatever it is, it is not neutral
    return msgspec.json.decode(raw)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Many new objects are no reason to look through all the old ones."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check_media_type(request: Request) -> None:
    """Refuse all but plain JSON: other types a page elsewhere may send without asking."""
    given = request.headers.get("content-type", "application/json")
    media_type = given.split(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaTypeError(
            f"content-type {shown(media_type)} is not taken; send the body as JSON with"
            f" `content-type: application/json`."
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedMediaTypeError(
            f"content-encoding {shown(encoding)} is not taken; send the body uncompressed."
        )


async def _read(request: Request, limit: int, seconds: float) -> bytes:
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit:
        raise _too_large(limit)
    pieces, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                size += len(piece)
                if size > limit:
                    raise _too_large(limit)
                pieces.append(piece)
    except TimeoutError as error:
        raise SlowBodyError(f"the body did not arrive within {seconds:g} s.") from error
    except ClientDisconnect as error:
        raise ClientDisconnectedError from error
    return b"".join(pieces)


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body has more than {limit} bytes (max_body_bytes); send less at a time."
    )


def _refuse_field(message: str) -> NoReturn:
    """Turn msgspec's words, which hold types and no values, into ours."""
    match = _PATH.match(message)
    assert match is not None  # every string matches
    what, path = match["what"], match["path"] or None
    missing = _MISSING.fullmatch(what)
    if missing is not None:
        path = missing["name"] if path is None else f"{path}.{missing['name']}"
        raise InvalidRequestError(f"{path} is missing; it must be given.", parameter=path)
    name = path or "the body"
    raise InvalidRequestError(f"{name}: {what[:1].lower()}{what[1:]}.", parameter=path)


def _refuse_depth() -> NoReturn:
    raise InvalidRequestError("the body is nested too deep to be read.") from None


def _refuse_json(raw: bytes, error: Exception) -> NoReturn:
    """Name the field that holds what other encoders write, NaN, Infinity or half a character; else
    the position.
    """
    try:
        value = json.loads(raw, parse_constant=_Constant)
    except RecursionError:
        _refuse_depth()
    except ValueError:
        value = None
    for path, rule in _oddities(value):
        path = path[:_LONGEST_PATH].encode("ascii", "replace").decode()
        raise InvalidRequestError(f"{path or 'the body'}{rule}", parameter=path or None) from None
    raise InvalidRequestError(f"the body is no JSON: {error}.") from None


@dataclass(frozen=True, slots=True)
class _Constant:
    name: str


def _oddities(value: Any) -> Iterator[tuple[str, str]]:
    """(path, what is wrong there) of constants and strings that are no JSON, without recursion."""
    stack: list[tuple[str, Any]] = [("", value)]
    while stack:
        path, each = stack.pop()
        if isinstance(each, _Constant):
            yield path, f"={each.name} is no JSON number; it must be finite."
        elif isinstance(each, str) and _SURROGATE.search(each):
            yield path, _HALF_CHARACTER
        elif isinstance(each, dict):
            for key, item in each.items():
                if _SURROGATE.search(key):
                    yield path, _HALF_CHARACTER
                stack.append((f"{path}.{key}".lstrip("."), item))
        elif isinstance(each, list):
            stack += [(f"{path}[{i}]", item) for i, item in enumerate(each)]


@cache
def _known(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))


_logged: set[str] = set()


def _log_unknown(kind: type[msgspec.Struct], names: Iterable[str]) -> None:
    for name in names:
        if name in _known(kind) or name in UNSUPPORTED or name in _logged:
            continue
        if len(_logged) < _MAX_LOGGED_NAMES and _NAME.fullmatch(name):
            _logged.add(name)
            logger.info("requests bring a field that is not known and ignored: %s", name)
