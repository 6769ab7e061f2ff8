"""Every environment variable that tokenmill reads. A value that makes no sense is refused.

Settings of the engine and the server are flags: see `config/`. `tokenmill serve` takes each of its
flags from a variable as well, `TOKENMILL_SERVE_PORT` for `--port`: see
`entrypoints/cli/serve_sources.py`. Libraries read variables of their own (`HF_HOME`,
`HF_HUB_OFFLINE`, `HF_TOKEN`, pip's `PIP_*`, `NO_COLOR`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tokenmill.errors import ConfigError, did_you_mean

VARIABLES = {
    "OPENAI_API_KEY": "Key that `tokenmill bench serve` sends to a server.",
    "TOKENMILL_CACHE": "Directory of fetched models; an absolute path.",
    "TOKENMILL_GPU_OVERLAP": "1: kernels on a Hopper GPU start before the one in front has ended.",
    "TOKENMILL_ISA": (
        "Instruction set of the kernels: amx, avx512, avx2 or portable; on aarch64 i8mm, dotprod or"
        " neon; or reference for torch."
    ),
    "TOKENMILL_LOG_LEVEL": "How much the command line logs: debug, info, warning or error.",
    "NOTIFY_SOCKET": "Socket of a service manager that `tokenmill serve` tells when it is ready.",
    "XDG_CACHE_HOME": "Parent of the cache directory if TOKENMILL_CACHE is not set.",
}
"""Name to meaning."""

LOG_LEVELS = ("debug", "info", "warning", "error")


def cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where fetched models lie; need not exist yet.

    `$TOKENMILL_CACHE`, else `$XDG_CACHE_HOME/tokenmill`, else `~/.cache/tokenmill`.
    Raises `ConfigError` if `TOKENMILL_CACHE` is relative or not a directory.
    """
    if chosen := environ.get("TOKENMILL_CACHE"):
        path = Path(chosen).expanduser()
        if not path.is_absolute():
            raise ConfigError(
                f"TOKENMILL_CACHE={chosen!r}: must be an absolute path, such as"
                f" {str(Path(chosen).absolute())!r}."
            )
        if path.exists() and not path.is_dir():
            raise ConfigError(f"TOKENMILL_CACHE={chosen!r}: is not a directory.")
        return path
    # The XDG base directory specification says that a relative path is to be ignored.
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "tokenmill"


def log_level(default: str, environ: Mapping[str, str] = os.environ) -> str:
    """One of `LOG_LEVELS`: `$TOKENMILL_LOG_LEVEL`, else `default`. Raises `ConfigError`."""
    chosen = environ.get("TOKENMILL_LOG_LEVEL") or default
    level = chosen.lower()
    if level not in LOG_LEVELS:
        raise ConfigError(
            f"TOKENMILL_LOG_LEVEL={chosen!r}: must be one of {', '.join(LOG_LEVELS)}."
            f"{did_you_mean(level, LOG_LEVELS)}"
        )
    return level


def wants_gpu_overlap(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether kernels on a GPU may start early; not by default. Raises `ConfigError`."""
    chosen = environ.get("TOKENMILL_GPU_OVERLAP") or "0"
    if chosen not in ("0", "1"):
        raise ConfigError(f"TOKENMILL_GPU_OVERLAP={chosen!r}: must be 0 or 1.")
    return chosen == "1"


def wants_tracebacks(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether errors are shown with their traceback: at log level debug. Raises nothing."""
    return environ.get("TOKENMILL_LOG_LEVEL", "").lower() == "debug"


def notify_socket(environ: Mapping[str, str] = os.environ) -> str | None:
    """Where a service manager wants to be told of changes; None if there is none."""
    path = environ.get("NOTIFY_SOCKET", "")
    return path if path.startswith(("/", "@")) else None


def openai_api_key(environ: Mapping[str, str] = os.environ) -> str | None:
    """The key for somebody else's server; None if there is none."""
    return environ.get("OPENAI_API_KEY") or None
