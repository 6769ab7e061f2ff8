"""A user's word for a model, turned into a path on this machine.

In this order, the first that fits:

1. a directory or a file that exists, relative to the working directory or absolute;
2. an alias (`aliases.py`), fetched if it is not in the cache;
3. a hub id, `owner/name` or `owner/name:file.gguf`, fetched if it is not in the hub cache.

A name that can only be a path is never sent to the hub.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from tokenmill.checkpoint import download, hub
from tokenmill.checkpoint.aliases import ALIASES
from tokenmill.checkpoint.gguf_parts import first_parts
from tokenmill.errors import CheckpointError, ConfigError, ModelNotFoundError, did_you_mean

_PATH_LIKE = re.compile(
    r"""  [./~\\] .*              # ./here  ../there  /root  ~/home  .hidden
      | [A-Za-z]:[\\/] .*       # a drive
      | .* [/\\]                # ends as a directory does
      | [^:]* \.(gguf|safetensors)  # a file; of a hub's file the colon comes first
      | .* \\ .* | [^:]*/[^:]*/ .* # no hub id has so many parts
    """,
    re.VERBOSE | re.IGNORECASE,
)

_DIRECTORY_MARKS = ("config.json", "tokenizer.json")
"""A directory with one of these is used as it is: a model, or a tokenizer alone."""


def resolve_model(
    name: str,
    revision: str | None = None,
    *,
    on_progress: download.OnProgress | None = None,
) -> Path:
    """The directory or the GGUF file of the model that `name` means.

    `revision` is a branch, tag or commit of a hub id. `on_progress` is called while bytes are
    fetched, not at all if the model is here. Raises `ModelNotFoundError` with what was tried and
    the nearest known name, `CheckpointError` for files that cannot be used, and `ConfigError` for
    a revision of something that has none.
    """
    if not name:
        raise ModelNotFoundError(f"model='' names no model. Aliases: {', '.join(ALIASES)}.")
    path = _local(name)
    if os.path.exists(path):  # unlike the path's method, no error for a name that is too long
        _refuse_revision(name, revision, "a path")
        return _model_in(path)
    if name in ALIASES:
        _refuse_revision(name, revision, "an alias, which is pinned to one version")
        return download.fetch(ALIASES[name], on_progress)
    if not _PATH_LIKE.fullmatch(name) and (hub_id := hub.HubId.parse(name)):
        return _model_in(hub.fetch_from_hub(hub_id, revision, on_progress))
    raise ModelNotFoundError(_explain_miss(name))


def _local(name: str) -> Path:
    """The path that `name` would be; `~someone` stays as it is if there is no such user."""
    return Path(os.path.expanduser(name))


def known_names() -> list[str]:
    """Aliases, and the hub ids in the hub cache."""
    return [*ALIASES, *hub.cached_repos()]


def _model_in(path: Path) -> Path:
    """`path` itself, or the only GGUF file of a directory that holds nothing else to load."""
    if not path.is_dir() or any((path / name).is_file() for name in _DIRECTORY_MARKS):
        return path
    files = first_parts(sorted(file.name for file in path.glob("*.gguf")))
    if len(files) == 1:
        return path / files[0]
    if files:
        raise CheckpointError(
            f"{path} holds {len(files)} GGUF files and no config.json. Name one of them:"
            f" {', '.join(files)}."
        )
    raise CheckpointError(
        f"{path} holds neither a config.json nor a GGUF file, so there is no model to load. A GGUF"
        f" file of a hub repository is named as owner/name:file.gguf."
    )


def _refuse_revision(name: str, revision: str | None, what: str) -> None:
    if revision is not None:
        raise ConfigError(
            f"revision={revision!r}: {name!r} is {what}; only hub ids (owner/name) have revisions."
            f" Leave it out."
        )


def _explain_miss(name: str) -> str:
    """Says what was tried, and which known name is near."""
    if _PATH_LIKE.fullmatch(name):
        return (
            f"No model {name!r}: it reads as a path, and there is nothing at"
            f" {_local(name).absolute()}.{_nearest_file(name)}"
        )
    return (
        f"No model {name!r}: there is no such file or directory, it is none of the aliases"
        f" ({', '.join(ALIASES)}), and hub ids have the form owner/name or owner/name:file.gguf."
        f"{did_you_mean(name, known_names())}"
    )


def _nearest_file(name: str) -> str:
    path = _local(name)
    if not os.path.isdir(path.parent):
        return f" There is no directory {path.parent} either."
    return did_you_mean(path.name, [entry.name for entry in path.parent.iterdir()])
