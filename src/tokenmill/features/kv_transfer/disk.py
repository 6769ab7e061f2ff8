"""Blocks in a directory: found again after they were evicted, and after a restart.

    <directory>/<root>/<ab>/<key>.kv        magic | bytes of the block | HMAC-SHA256 | the block

A file is written beside its place and moved there, so that nobody sees half of one. What is read is
checked against its digest, which is keyed with the engines' secret and covers the block's key: a
file that is damaged, or somebody else's, is no block. Several engines may share a directory, also
with different models; each keeps the size of it all below its own limit. The file that was not
read for the longest time goes first. Whatever else is in the directory is left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import hmac
import itertools
import logging
import os
import re
import secrets
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tokenmill.errors import ConfigError

logger = logging.getLogger(__name__)

_MAGIC = b"TMILLKV1"
_HEADER = struct.Struct("<8sQ32s")
_SUFFIX, _UNFINISHED = ".kv", ".tmp"
_LOCK = "lock"
_FOLDERS = os.path.join("[0-9a-f]" * 16, "[0-9a-f]" * 2)
_OURS = re.compile(r"[0-9a-f]+\.kv(\.[0-9a-f]{16}\.\d+\.tmp)?")
"""Names in these folders. No other file is touched: a directory may have been there before us."""
_ROOM_LEFT = 1 / 16
"""Of the limit: so much is freed at once, and after so many bytes of its own an engine looks at
what others have written."""
_LOCK_SECONDS, _LOCK_INTERVAL = 5.0, 0.01
"""How long another engine may take to make room, and between two looks at that."""
_ABANDONED_SECONDS = 3600.0
"""After which an unfinished file belongs to nobody."""


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    num_bytes: int
    used: float


class DiskStore:
    """Blocks of one root below a directory that may hold others. Called from any thread."""

    def __init__(self, directory: Path, root: bytes, max_bytes: int, secret: bytes = b"") -> None:
        """Raises `ConfigError` if the directory cannot be written."""
        self._directory = directory
        self._blocks = directory / hashlib.sha256(b"directory" + root).hexdigest()[:16]
        self._max_bytes = max_bytes
        self._secret = secret or b"none"
        self._name = secrets.token_hex(8)
        """Of this engine: process ids are not unique where machines share a directory."""
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._num_bytes = 0
        """Of all files: when they were counted, and what this engine has written since."""
        self._num_uncounted = 0
        """What this engine has written since."""
        try:
            self._blocks.mkdir(parents=True, exist_ok=True, mode=0o700)
            (directory / _LOCK).touch(mode=0o600)
        except OSError as error:
            raise ConfigError(
                f"kv_offload_dir={str(directory)!r} cannot be written: {error.strerror}."
                " Name a directory that this user may write to."
            ) from error
        self._count()

    def has(self, key: bytes) -> bool:
        """Whether there is a file for the block."""
        return os.path.exists(self._path(key))

    def read(self, key: bytes, num_bytes: int) -> torch.Tensor | None:
        """uint8 [num_bytes]; None if there is no such block, or none that is right."""
        path = self._path(key)
        try:
            with open(path, "rb", buffering=0) as file:
                header = file.read(_HEADER.size)
                data = torch.empty(num_bytes + 1, dtype=torch.uint8)  # one more shows a longer file
                count = file.readinto(_bytes_of(data))
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("KV transfer: %s cannot be read: %s", path, error)
            return None
        data = data[:num_bytes]
        if count != num_bytes or header != self._header(key, _bytes_of(data)):
            logger.warning("KV transfer: %s is damaged, and removed", path)
            _remove(path)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return data

    def write(self, key: bytes, data: torch.Tensor) -> None:
        """Keep a block, uint8 [num_bytes]. Raises `OSError` if the disk does not take it."""
        view = _bytes_of(data)
        num_bytes = _HEADER.size + len(view)
        if num_bytes > self._max_bytes or self.has(key):
            return
        self._make_room(num_bytes)
        path = self._path(key)
        unfinished = f"{path}.{self._name}.{next(self._numbers)}{_UNFINISHED}"
        os.makedirs(os.path.dirname(path), exist_ok=True, mode=0o700)
        try:
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb", buffering=0) as file:
                for part in (self._header(key, view), view):
                    _write_all(file.fileno(), part)
            os.replace(unfinished, path)
        except OSError:
            _remove(unfinished)
            raise
        with self._lock:
            self._num_bytes += num_bytes
            self._num_uncounted += num_bytes

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._blocks}/{name[:2]}/{name}{_SUFFIX}"

    def _header(self, key: bytes, data: memoryview) -> bytes:
        digest = hmac.new(self._secret, key, "sha256")
        digest.update(data)
        return _HEADER.pack(_MAGIC, len(data), digest.digest())

    def _make_room(self, num_bytes: int) -> None:
        """Look at the directory if too much may be in it, and remove what was used least lately."""
        with self._lock:
            is_full = self._num_bytes + num_bytes > self._max_bytes
            if not is_full and self._num_uncounted < _ROOM_LEFT * self._max_bytes:
                return
        files = self._count()
        with self._lock:
            excess = self._num_bytes + num_bytes - self._max_bytes
        if excess > 0:
            self._evict(files, excess + int(_ROOM_LEFT * self._max_bytes))

    def _evict(self, files: list[_File], num_bytes: int) -> None:
        """Remove so much; one engine at a time, and the others look again. Raises `OSError` if one
        of them takes too long.
        """
        with self._locked():
            freed = 0
            for file in sorted(files, key=lambda file: file.used):
                if freed >= num_bytes:
                    break
                _remove(file.path)  # gone already is as good
                freed += file.num_bytes
        with self._lock:
            self._num_bytes = max(self._num_bytes - freed, 0)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._directory / _LOCK, os.O_RDONLY | os.O_CREAT, 0o600)
        end = time.monotonic() + _LOCK_SECONDS
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:  # it may be stopped, and nobody shall wait for that
                    if time.monotonic() > end:
                        raise
                time.sleep(_LOCK_INTERVAL)
            yield
        finally:
            os.close(descriptor)

    def _count(self) -> list[_File]:
        """All blocks of all roots, and what they take."""
        files = list(self._files())
        with self._lock:
            self._num_bytes = sum(file.num_bytes for file in files)
            self._num_uncounted = 0
        return files

    def _files(self) -> Iterator[_File]:
        abandoned = time.time() - _ABANDONED_SECONDS
        for found in glob.iglob(os.path.join(_FOLDERS, "*"), root_dir=self._directory):
            path = os.path.join(self._directory, found)
            if not _OURS.fullmatch(os.path.basename(path)):
                continue
            try:
                state = os.stat(path)
            except OSError:
                continue  # another engine has removed it
            if path.endswith(_SUFFIX):
                yield _File(path, state.st_size, state.st_mtime)
            elif state.st_mtime < abandoned:
                _remove(path)


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.remove(path)


def _bytes_of(data: torch.Tensor) -> memoryview:
    return data.numpy().data
