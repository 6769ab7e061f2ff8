"""Downloads that go on where they stopped, in this process or in a later one.

    <target>.partial        the bytes so far, from the beginning
    <target>.partial.etag   what the server called this content (ETag), if it did
    <target>                complete and checked, or absent

The rest is asked for with a range and with `If-Range`, so that a server whose file is another one
by now sends it whole. Whoever calls holds a lock: there is one writer of a partial file.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import http.client
import logging
import os
import shutil
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from tokenmill.errors import CheckpointError, ModelNotFoundError

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 18
NUM_RETRIES = 5
"""Attempts in a row that bring no byte."""
RETRY_SECONDS = 1.0
TIMEOUT_SECONDS = 30.0
"""Without a byte."""
_TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
"""Answers after which the same request may succeed."""

OnBytes = Callable[[int], None]
"""Called with the bytes of the file that are here, those of earlier attempts included."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file at a server, and what is known of it in advance."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent to this host only, not to where it redirects."""
    num_bytes: int | None = None
    sha256: str | None = None
    """Hexadecimal."""


def download(source: RemoteFile, target: Path, on_bytes: OnBytes = lambda done: None) -> None:
    """Fetch `source` to `target`, from where an earlier attempt has stopped.

    Raises `ModelNotFoundError` if the server does not give the file or cannot be reached; what has
    come is kept then. Raises `CheckpointError` if it cannot be stored, or is not what was expected:
    then nothing is kept.
    """
    partial = target.with_name(f"{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _fetch(source, partial, on_bytes)
        _check(source, partial)
        os.replace(partial, target)
        _etag_file(partial).unlink(missing_ok=True)
    except OSError as error:
        raise _not_stored(source, partial, error) from error


def partial_bytes(target: Path) -> int:
    """Bytes of `target` that an earlier attempt has left."""
    partial = target.with_name(f"{target.name}.partial")
    return partial.stat().st_size if partial.is_file() else 0


class _InterruptionError(Exception):
    """The connection has ended too early, or could not be made."""


def _fetch(source: RemoteFile, partial: Path, on_bytes: OnBytes) -> None:
    failures = 0
    while True:
        before = _size(partial)
        try:
            _attempt(source, partial, on_bytes)
            return
        except _InterruptionError as error:
            failures = 0 if _size(partial) > before else failures + 1
            if failures >= NUM_RETRIES:
                raise ModelNotFoundError(
                    f"Cannot fetch {_shown(source)}: {error}. Check the network, and try again."
                    f"{_kept(partial)}"
                ) from error
            logger.warning("%s: %s; going on at byte %d", _shown(source), error, _size(partial))
            time.sleep(RETRY_SECONDS * failures)


def _attempt(source: RemoteFile, partial: Path, on_bytes: OnBytes) -> None:
    """Ask for what is missing, and append it."""
    done = _size(partial)
    if done and done == source.num_bytes:
        on_bytes(done)
        return
    headers = {**source.headers, "Accept-Encoding": "identity"}
    etag = _etag_file(partial).read_text() if done and _etag_file(partial).is_file() else None
    if done and (etag or source.sha256):
        headers["Range"] = f"bytes={done}-"
        if etag:
            headers["If-Range"] = etag
    else:
        done = 0
    try:
        with open_url(source, headers) as response:
            _receive(source, partial, done, response, on_bytes)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # the file is shorter than what is here: not the same one
            partial.unlink(missing_ok=True)
            raise _InterruptionError("the server has another file by now") from error
        if error.code in _TRANSIENT:
            raise _InterruptionError(f"the server answers {error.code} {error.reason}") from error
        raise ModelNotFoundError(
            f"Cannot fetch {_shown(source)}: the server answers {error.code} {error.reason}."
        ) from error
    except urllib.error.URLError as error:
        raise _InterruptionError(
            str(getattr(error.reason, "strerror", None) or error.reason)
        ) from error
    except (ConnectionError, TimeoutError, ssl.SSLError, http.client.HTTPException) as error:
        raise _InterruptionError(str(error) or type(error).__name__) from error


def _receive(
    source: RemoteFile, partial: Path, done: int, response: Any, on_bytes: OnBytes
) -> None:
    if response.status == 206:
        begin = response.headers.get("Content-Range", "").removeprefix("bytes ").split("-")[0]
        if begin != str(done):
            partial.unlink(missing_ok=True)
            raise _InterruptionError(
                f"the server sends bytes from {begin or '?'} instead of {done}"
            )
    else:
        done = 0  # the whole file: the server knows no ranges, or has another one by now
    length = response.headers.get("Content-Length")
    total = done + int(length) if length is not None else source.num_bytes
    if source.num_bytes is not None and total != source.num_bytes:
        raise CheckpointError(
            f"{_shown(source)} has {total} bytes, not {source.num_bytes}, as was announced."
        )
    _check_room(partial, 0 if total is None else total - done)
    _note_etag(partial, response.headers.get("ETag"))
    with partial.open("ab") as sink:
        sink.truncate(done)
        received = done + _copy(response, sink, done, on_bytes)
        sink.flush()
        os.fsync(sink.fileno())  # the rename must not outlive the data in a power cut
    if total is not None and received < total:
        raise _InterruptionError(f"the connection ended after {received:,} of {total:,} bytes")


def _copy(response: Any, sink: BinaryIO, done: int, on_bytes: OnBytes) -> int:
    """Bytes that have come; whatever ends the stream, they are in the file."""
    received = 0
    on_bytes(done)
    while chunk := response.read(CHUNK_BYTES):
        sink.write(chunk)
        received += len(chunk)
        on_bytes(done + received)
    return received


def open_url(source: RemoteFile, headers: Mapping[str, str]) -> Any:
    """The response, with more `headers`. User and password of the address are sent as it wants
    them. Raises what `urllib.request.urlopen` does.
    """
    parts = urllib.parse.urlsplit(source.url)
    request = urllib.request.Request(
        urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    )
    if parts.username is not None:
        user = (
            f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        )
        token = base64.b64encode(user.encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {token}")
    for name, value in headers.items():
        if name in ("Range", "If-Range", "Accept-Encoding"):
            request.add_header(name, value)
        else:
            request.add_unredirected_header(name, value)
    return urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)


def _check(source: RemoteFile, partial: Path) -> None:
    """Compare size and digest of the whole file; what is wrong is not kept."""
    size, digest = _size(partial), hashlib.sha256()
    if source.sha256 is not None:
        with partial.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    problem = ""
    if source.num_bytes is not None and size != source.num_bytes:
        problem = f"has {size} bytes, not {source.num_bytes}"
    elif source.sha256 is not None and digest.hexdigest() != source.sha256.lower():
        problem = f"has SHA-256 {digest.hexdigest()}, not {source.sha256}"
    if problem:
        partial.unlink(missing_ok=True)
        _etag_file(partial).unlink(missing_ok=True)
        raise CheckpointError(
            f"{_shown(source)} {problem}: it was damaged on its way, or is not what is pinned."
            f" Nothing was kept; try again."
        )


def _check_room(partial: Path, needed: int) -> None:
    free = shutil.disk_usage(partial.parent).free
    if needed > free:
        raise OSError(errno.ENOSPC, f"{needed:,} more bytes are needed, {free:,} are free")


def _not_stored(source: RemoteFile, partial: Path, error: OSError) -> CheckpointError:
    if error.errno == errno.ENOSPC:
        return CheckpointError(
            f"Cannot store {_shown(source)} in {partial.parent}: the disk is full"
            f" ({error.strerror}). Free some space, or set TOKENMILL_CACHE (for a hub id, HF_HOME)"
            f" to a directory on another disk.{_kept(partial)}"
        )
    return CheckpointError(
        f"Cannot store {_shown(source)} in {partial.parent}: {error.strerror or error}."
    )


def _note_etag(partial: Path, etag: str | None) -> None:
    """Weak ones promise no equal bytes."""
    if etag and not etag.startswith("W/"):
        _etag_file(partial).write_text(etag)
    else:
        _etag_file(partial).unlink(missing_ok=True)


def _etag_file(partial: Path) -> Path:
    return partial.with_name(f"{partial.name}.etag")


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _kept(partial: Path) -> str:
    num_bytes = _size(partial)
    if not num_bytes:
        return ""
    return f" {num_bytes:,} bytes are kept in {partial}; the next attempt goes on from there."


def _shown(source: RemoteFile) -> str:
    """The address without what may be secret in it."""
    parts = urllib.parse.urlsplit(source.url)
    netloc = parts.netloc.rpartition("@")[2]
    return urllib.parse.urlunsplit((parts.scheme, netloc, parts.path, "", ""))
