"""Models by hub id, through `huggingface_hub` and its cache.

Large files come by `hub_weights.py`, which goes on where an earlier process has stopped. The
library is imported when a hub id is first resolved. It reads `HF_HUB_OFFLINE`, `HF_HOME`,
`HF_TOKEN` and `HF_ENDPOINT` itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.checkpoint.download import OnProgress, directory_bytes
from tokenmill.checkpoint.gguf_parts import part_names
from tokenmill.checkpoint.hub_weights import fetch_weights
from tokenmill.errors import CheckpointError, ModelNotFoundError, did_you_mean

PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
"""Files that are fetched: configuration, weights, chat template, tokenizer. Pickled weights are
not: reading them can run code."""

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_HUB_ID = re.compile(rf"(?P<repo>{_PART}/{_PART})(?::(?P<file>[^:]+\.gguf))?")
_SNAPSHOT_BAR = "huggingface_hub.snapshot_download"
"""Name of the library's bar that counts the bytes of all files."""


@dataclass(frozen=True, slots=True)
class HubId:
    """`owner/name`, or `owner/name:file.gguf` for one GGUF file of a repository; the name of one
    part stands for all of them.
    """

    repo: str
    file: str | None = None

    @classmethod
    def parse(cls, name: str) -> HubId | None:
        """None if `name` is no hub id."""
        match = _HUB_ID.fullmatch(name)
        return cls(match["repo"], match["file"]) if match else None


def fetch_from_hub(
    hub_id: HubId, revision: str | None = None, on_progress: OnProgress | None = None
) -> Path:
    """The model's directory or GGUF file in the hub cache; what is missing there is fetched.

    Raises `ModelNotFoundError` if the hub has no such model, or does not show it to this user, or
    cannot be reached while the cache lacks it; `CheckpointError` if files cannot be read or stored.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = PATTERNS if hub_id.file is None else part_names(hub_id.file)
    before = fetch_weights(hub_id.repo, revision, patterns, on_progress)
    try:
        snapshot = Path(
            snapshot_download(
                hub_id.repo,
                revision=revision,
                allow_patterns=patterns,
                tqdm_class=_reporter(on_progress, before),
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise _not_found(hub_id.repo, revision, error) from error
    except OSError as error:
        raise CheckpointError(
            f"Cannot fetch {hub_id.repo!r} into {hub_cache_directory()}: {error}. Check the"
            f" network and the disk, or set HF_HOME to another directory."
        ) from error
    if hub_id.file is None:
        return snapshot
    path = snapshot / hub_id.file
    if not path.is_file():
        raise ModelNotFoundError(
            f"The hub's {hub_id.repo!r} holds no file {hub_id.file!r}. Names are case-sensitive;"
            f" the model's page at the hub lists its files."
        )
    return path


def hub_cache_directory() -> Path:
    """Where `huggingface_hub` keeps what it fetched."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def cached_repos() -> dict[str, int]:
    """Hub ids of the models in the hub cache, and their sizes in bytes."""
    directories = sorted(hub_cache_directory().glob("models--*--*"))
    return {
        "/".join(path.name.split("--")[1:]): directory_bytes(path / "blobs") for path in directories
    }


def _not_found(repo: str, revision: str | None, error: Exception) -> ModelNotFoundError:
    """What the hub answered, with what to do about it. Most special kinds of error first."""
    from huggingface_hub import errors

    at = f" at revision {revision!r}" if revision else ""
    if isinstance(error, errors.GatedRepoError):
        why = (
            "the model is gated: accept its terms on its page at the hub, then set HF_TOKEN or run"
            " `hf auth login`"
        )
    elif isinstance(error, errors.RepositoryNotFoundError):
        why = (
            "there is no such repository, or it is private. Check the spelling; for a private one"
            " set HF_TOKEN or run `hf auth login`"
        )
    elif isinstance(error, errors.RevisionNotFoundError):
        why = "the repository has no such branch, tag or commit"
    elif isinstance(error, errors.LocalEntryNotFoundError):
        why = (
            "it is not in the hub cache, and the hub cannot be reached. Check the network, unset"
            " HF_HUB_OFFLINE if it is set, or give the path of a directory instead"
        )
    else:
        why = str(error).splitlines()[0].rstrip(".")
    hint = did_you_mean(repo, cached_repos())
    return ModelNotFoundError(f"The hub did not give {repo!r}{at}: {why}.{hint}")


def _reporter(on_progress: OnProgress | None, before: int) -> Any:
    """A stand-in for the library's progress bars that draws nothing and reports bytes, behind those
    that have come `before`.
    """
    from huggingface_hub.utils.tqdm import tqdm

    class Reporter(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.counts_bytes = kwargs.get("name") == _SNAPSHOT_BAR
            kwargs["disable"] = True
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self.counts_bytes and on_progress is not None and self.total:
                on_progress(before + int(self.n), before + int(self.total))

    return Reporter
