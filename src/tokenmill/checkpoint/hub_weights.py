"""Large files of a hub repository, fetched so that a later process can go on.

`huggingface_hub` goes on after a lost connection, but what a process that ends has of a file is
lost with it. So weights are put into the library's cache beforehand, under the name that it gives
them; it links them and fetches the rest.

    models--owner--name/blobs/<etag>            a whole file, as the library would have put it
    models--owner--name/blobs/<etag>.partial    the beginning of one
    .locks/models--owner--name/<etag>.lock      the library's own lock
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from tokenmill.checkpoint.resumable import RemoteFile, download

logger = logging.getLogger(__name__)

MIN_BYTES = 8 << 20
"""Smaller files are left to the library: to begin anew is quick."""
MAX_BYTES = 50 * 10**9
"""The hub gives larger ones to the library only."""
SUFFIXES = (".safetensors", ".gguf")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[0-9a-zA-Z]+")


@dataclass(frozen=True, slots=True)
class _Weights:
    """A file that is not in the cache yet."""

    source: RemoteFile
    blob: Path
    lock: Path
    num_bytes: int


def fetch_weights(
    repo: str,
    revision: str | None,
    patterns: list[str],
    on_progress: Callable[[int, int], None] | None,
) -> int:
    """Put the large files of a repository that match `patterns` into the library's cache.

    Returns their bytes, as far as they were not there. Does nothing where the hub does not answer:
    the library says why. Raises `ModelNotFoundError` and `CheckpointError` as `download` does.
    """
    from filelock import FileLock

    missing = _missing(repo, revision, patterns)
    total, done = sum(weights.num_bytes for weights in missing), 0
    for weights in missing:
        before = done

        def report(num_bytes: int, before: int = before) -> None:
            if on_progress is not None:
                on_progress(before + num_bytes, total)

        weights.lock.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(weights.lock):
            if not weights.blob.exists():
                download(weights.source, weights.blob, report)
        done += weights.num_bytes
    return done


def _missing(repo: str, revision: str | None, patterns: list[str]) -> list[_Weights]:
    import huggingface_hub as hub
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if constants.HF_HUB_OFFLINE:
        return []
    refusals: tuple[type[Exception], ...] = (HfHubHTTPError, HFValidationError, OSError)
    refusals += _transport_errors()
    cache = Path(constants.HF_HUB_CACHE)
    found = []
    try:
        info = hub.HfApi().model_info(repo, revision=revision)
        for name in (each.rfilename for each in info.siblings or []):
            is_wanted = any(fnmatchcase(name, pattern) for pattern in patterns)
            if is_wanted and name.endswith(SUFFIXES):
                weights = _described(repo, name, info.sha, cache)
                found += [] if weights is None or weights.blob.exists() else [weights]
    except refusals as error:
        logger.info("%s: %s; left to the library", repo, error)
        return []
    return found


def _described(repo: str, name: str, revision: str | None, cache: Path) -> _Weights | None:
    """What the hub says of a file; None if it is left to the library."""
    import huggingface_hub as hub

    url = hub.hf_hub_url(repo, name, revision=revision)
    metadata = hub.get_hf_file_metadata(url)
    etag, size = metadata.etag, metadata.size
    if not etag or not _NAME.fullmatch(etag) or not size or not MIN_BYTES <= size <= MAX_BYTES:
        return None
    folder = f"models--{repo.replace('/', '--')}"
    token = hub.get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    sha256 = etag if _SHA256.fullmatch(etag) else None
    return _Weights(
        RemoteFile(url, headers, num_bytes=size, sha256=sha256),
        blob=cache / folder / "blobs" / etag,
        lock=cache / ".locks" / folder / f"{etag}.lock",
        num_bytes=size,
    )


def _transport_errors() -> tuple[type[Exception], ...]:
    """What the library raises without a connection: errors of the HTTP client that it uses."""
    clients = [sys.modules[name] for name in ("httpx2", "httpx") if name in sys.modules]
    return tuple(client.HTTPError for client in clients)
