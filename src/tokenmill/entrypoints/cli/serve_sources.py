"""Where the flags of `tokenmill serve` come from, if not from the command line: an environment
variable for each (`TOKENMILL_SERVE_MAX_MODEL_LEN` for `--max-model-len`), then a file (`--config`).
Those of `tokenmill route` come from `TOKENMILL_ROUTE_...` in the same way.

The first that says something wins: command line, environment, file, default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from cyclopts import App, ArgumentCollection, Token

from tokenmill.errors import ConfigError, did_you_mean, shown

FORMATS = (".yaml", ".yml", ".toml", ".json")
NOT_IN_SOURCES = ("config", "print_config")
"""Flags that say where settings are and what to do with them. The file's path may come from the
environment.
"""


class Sources:
    """Fills in flags while the command line is parsed; remembers where each came from."""

    def __init__(self, environ: Mapping[str, str] = os.environ, *, command: str = "serve") -> None:
        self._environ = environ
        self._command = command
        self._prefix = f"TOKENMILL_{command.upper()}_"
        self.origins: dict[str, str] = {}
        """Setting to its source, for those that are not at their default."""

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Cyclopts' hook. Raises `ConfigError` for settings that do not exist, and for a file that
        cannot be read.
        """
        known = {_setting(each.name): each for each in arguments if each.name.startswith("--")}
        self.origins = {name: "command line" for name, each in known.items() if each.tokens}
        self._fill(known, self._from_environment(known))
        config = known["config"].tokens
        if config:
            path = config[-1].value
            values = read_file(Path(path))
            _refuse_unknown(values, known, path)
            self._fill(known, {name: (value, path) for name, value in values.items()})

    def _from_environment(self, known: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        given = {
            name.removeprefix(self._prefix).lower(): (value, name)
            for name, value in self._environ.items()
            if name.startswith(self._prefix)
        }
        for setting, (_, variable) in given.items():
            if setting not in known:
                near = did_you_mean(variable, [self._prefix + name.upper() for name in known])
                raise ConfigError(
                    f"{variable} belongs to no flag of tokenmill {self._command}.{near}"
                )
        return {name: (_from_text(value), variable) for name, (value, variable) in given.items()}

    def _fill(self, known: Mapping[str, Any], given: Mapping[str, tuple[Any, str]]) -> None:
        for name, (value, source) in given.items():
            if name in self.origins or value is None:
                continue
            self.origins[name] = source
            values = value if isinstance(value, list) else [value]
            for index, each in enumerate(values):
                known[name].append(
                    Token(keyword=name, value=_as_text(each), source=source, index=index)
                )


def read_file(path: Path) -> dict[str, Any]:
    """Settings of a YAML, TOML or JSON file, names with underscores. Raises `ConfigError`."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"--config {path}: must end in one of {', '.join(FORMATS)}.")
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path}: is no UTF-8 text (byte {error.start}).") from error
    try:
        values = _parse(text, path.suffix)
    except ValueError as error:
        raise ConfigError(f"--config {path}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: must hold settings as `name: value`.")
    return {str(name).replace("-", "_"): value for name, value in values.items()}


def _parse(text: str, suffix: str) -> Any:
    """Raises `ValueError` for text that is not of the format."""
    if suffix == ".toml":
        import tomllib

        return tomllib.loads(text)
    import yaml  # JSON is YAML

    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _refuse_unknown(values: Mapping[str, Any], known: Mapping[str, Any], path: str) -> None:
    settings = [name for name in known if name not in NOT_IN_SOURCES]
    for name in values:
        if name not in settings:
            raise ConfigError(
                f"--config {path}: there is no setting {shown(name)}.{did_you_mean(name, settings)}"
            )


def _setting(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _from_text(value: str) -> Any:
    """A variable's value; a list is written as a JSON array."""
    if value.startswith("["):
        try:
            return msgspec.json.decode(value, type=list[Any])
        except msgspec.DecodeError:
            return value
    return value


def _as_text(value: Any) -> str:
    """A value as it would stand on the command line."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
