"""Requests of a recorded trace: one JSON object a line.

Two forms are read. `hash_ids` name the blocks of a prompt, `HASH_BLOCK` tokens each: requests whose
lists begin alike begin with the same tokens.

    {"time": 0.5, "input_len": 700, "output_len": 80, "prefix": "support", "prefix_len": 400}
    {"timestamp": 500, "input_length": 700, "output_length": 80, "hash_ids": [0, 7]}
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.errors import ConfigError
from tokenmill.simulate.requests import SimulatedRequest, part
from tokenmill.simulate.workload import OWN_MARK, PREFIX_MARK

HASH_BLOCK = 512
"""Tokens that a hash id stands for."""
_NAMES = {"timestamp": "time", "input_length": "input_len", "output_length": "output_len"}


class TraceLine(msgspec.Struct, forbid_unknown_fields=True):
    """One request."""

    time: float
    """Seconds."""
    input_len: int
    output_len: int
    priority: int = 0
    deadline: float | None = None
    """Seconds after it has come."""
    prefix: str | int | None = None
    """Requests with the same begin with the same `prefix_len` tokens."""
    prefix_len: int = 0
    hash_ids: list[int] = []


def read_trace(path: Path) -> list[TraceLine]:
    """In the order of times. Raises `ConfigError` that names the line at fault."""
    try:
        text = path.expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"trace={path}: cannot be read: {error.strerror}.") from error
    lines = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            lines.append(_read_line(msgspec.json.decode(line, type=dict[str, Any])))
        except (msgspec.DecodeError, ValueError) as error:
            raise ConfigError(f"trace={path}: line {number}: {error}.") from error
    if not lines:
        raise ConfigError(f"trace={path}: holds no request.")
    return sorted(lines, key=lambda line: line.time)


def _read_line(fields: dict[str, Any]) -> TraceLine:
    named = {_NAMES.get(name, name): value for name, value in fields.items()}
    line = msgspec.convert(named, TraceLine)
    if "timestamp" in fields:
        line.time /= 1e3
    if line.input_len < 1 or line.output_len < 1 or not 0 <= line.prefix_len <= line.input_len:
        raise ValueError(
            "input_len and output_len must be at least 1, prefix_len from 0 to input_len"
        )
    return line


class TraceWorkload:
    """The requests of a trace, at its times."""

    def __init__(self, lines: list[TraceLine]) -> None:
        self._lines = lines
        prefixes = dict.fromkeys(line.prefix for line in lines)
        self._marks = {prefix: PREFIX_MARK + mark for mark, prefix in enumerate(prefixes)}

    def arrivals(self) -> Iterator[SimulatedRequest]:
        start = self._lines[0].time
        for number, line in enumerate(self._lines):
            arrival = line.time - start
            yield SimulatedRequest(
                number=number,
                arrival=arrival,
                prompt=self._prompt(number, line),
                output_len=line.output_len,
                priority=line.priority,
                deadline=None if line.deadline is None else arrival + line.deadline,
            )

    def following(self, request: SimulatedRequest, now: float) -> None:
        """A trace knows when each request comes; none depends on another."""

    def _prompt(self, number: int, line: TraceLine) -> list[int]:
        shared: list[int] = []
        for hash_id in line.hash_ids:
            shared += part(PREFIX_MARK + hash_id, HASH_BLOCK)
        if line.hash_ids:
            # The last block is this request's own as far as its prompt reaches into it.
            return shared[: line.input_len] + part(OWN_MARK + number, line.input_len - len(shared))
        shared = part(self._marks[line.prefix], line.prefix_len)
        return shared + part(OWN_MARK + number, line.input_len - line.prefix_len)
