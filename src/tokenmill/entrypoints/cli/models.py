"""`tokenmill models`: the names there are, and what is on this machine."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter

from tokenmill.checkpoint import download, hub
from tokenmill.checkpoint.aliases import ALIASES
from tokenmill.checkpoint.names import resolve_model
from tokenmill.entrypoints.cli.flags import Quiet
from tokenmill.entrypoints.cli.progress import loading_progress
from tokenmill.entrypoints.cli.session import open_console
from tokenmill.errors import ModelNotFoundError, did_you_mean

NAME = Parameter(help="An alias, owner/name at the hub, or owner/name:file.gguf.")
ALIAS = Parameter(help="An alias.")
REVISION = Parameter(help="Branch, tag or commit of a hub id.")

app = App(name="models", help="List, fetch and remove models.")


@app.default
def list_models() -> int:
    """List the aliases and the models on this machine, with sizes and places."""
    print("Aliases, in", download.models_directory())
    for alias in ALIASES.values():
        state = "here" if download.is_cached(alias) else "not fetched"
        print(f"  {alias.name}  {_megabytes(alias.num_bytes)}  {state}")
        print(f"      {alias.description} ({alias.license})")
        if download.is_cached(alias):
            print(f"      {download.cached_path(alias)}")
    print("Hub cache, in", hub.hub_cache_directory())
    repos = hub.cached_repos()
    for repo, num_bytes in repos.items():
        print(f"  {repo}  {_megabytes(num_bytes)}")
    if not repos:
        print("  (no models)")
    return 0


@app.command
def get(
    name: Annotated[str, NAME],
    /,
    *,
    revision: Annotated[str | None, REVISION] = None,
    quiet: Quiet = False,
) -> int:
    """Fetch a model, and print where it is."""
    with loading_progress(open_console(), shown=not quiet) as on_progress:
        path = resolve_model(
            name,
            revision,
            on_progress=lambda done, total: on_progress("download", done, total),
        )
    print(path)
    return 0


@app.command
def remove(name: Annotated[str, ALIAS], /) -> int:
    """Delete the files of an alias. (Models of the hub cache: `hf cache rm`.)"""
    if name not in ALIASES:
        raise ModelNotFoundError(
            f"No alias {name!r}; there are: {', '.join(ALIASES)}.{did_you_mean(name, ALIASES)}"
            f" `hf cache rm model/{name}` removes a model from the hub cache."
        )
    freed = download.remove(ALIASES[name])
    print(f"{name}: {_megabytes(freed)} freed")
    return 0


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
