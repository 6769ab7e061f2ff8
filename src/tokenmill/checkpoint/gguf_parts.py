"""A GGUF file, or one that was cut into several: name-00001-of-00003.gguf and so on.

    part 1   metadata, split.no = 0, split.count = 3, split.tensors.count; some tensors or none
    part 2   split.no = 1, split.count = 3; more tensors
    part 3   split.no = 2, ...

Any of the parts stands for all of them. They are one model: a part that is missing, is of another
model, or repeats a tensor is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenmill.checkpoint.gguf_reader import GGUFHeader, read_header
from tokenmill.checkpoint.mapped_file import MappedFile
from tokenmill.errors import CheckpointError

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_MAX_PARTS = 99_999
"""What five digits can say."""


@dataclass(frozen=True, slots=True)
class GGUFParts:
    """All parts of a model, opened."""

    header: GGUFHeader
    """The first part's, with the tensors of all."""
    files: Mapping[str, MappedFile]
    """The file that each tensor lies in."""


def open_parts(path: Path) -> GGUFParts:
    """Map a GGUF file, and the other parts if it is one of several; check their headers.

    Raises `CheckpointError` that names the file and what is wrong with it.
    """
    file = MappedFile(path)
    header = read_header(path, file.data)
    count = _count(header)
    if count == 1:
        return GGUFParts(header, dict.fromkeys(header.tensors, file))
    opened = [
        (header, file) if part == path else _open_part(part) for part in _paths(path, header, count)
    ]
    return _joined([*opened], count)


def part_names(name: str) -> list[str]:
    """File names of all parts of the model that the part `name` belongs to, in order; `name` alone
    if it is no part's.
    """
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return [name]
    numbers = range(1, int(match["count"]) + 1)
    return [f"{match['stem']}-{number:05}-of-{match['count']}.gguf" for number in numbers]


def first_parts(names: list[str]) -> list[str]:
    """`names` without those that are the second or a later part of a model of which another is
    there.
    """
    firsts = {name: part_names(name)[0] for name in names}
    return [name for name in names if firsts[name] == name or firsts[name] not in names]


def _open_part(path: Path) -> tuple[GGUFHeader, MappedFile]:
    file = MappedFile(path)
    return read_header(path, file.data), file


def _paths(path: Path, header: GGUFHeader, count: int) -> list[Path]:
    number = _integer(header, "split.no", count - 1)
    names = part_names(path.name)
    if len(names) != count or names[number] != path.name:
        raise CheckpointError(
            f"{path}: this is part {number + 1} of {count} by its keys 'split.no' and"
            f" 'split.count', so its name must end in -{number + 1:05}-of-{count:05}.gguf, by which"
            f" the other parts are found. Rename it, and them."
        )
    paths = [path.with_name(name) for name in names]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{path}: the model has {count} parts, of which {missing[0]}{more} cannot be found"
            f" beside it. The download is incomplete."
        )
    return paths


def _joined(parts: list[tuple[GGUFHeader, MappedFile]], count: int) -> GGUFParts:
    first, _ = parts[0]
    tensors: dict[str, Any] = {}
    files: dict[str, MappedFile] = {}
    for number, (header, file) in enumerate(parts):
        found = _integer(header, "split.no", count - 1), _count(header)
        if found != (number, count):
            raise CheckpointError(
                f"{header.path}: says that it is part {found[0] + 1} of {found[1]}, but stands in"
                f" the place of part {number + 1} of {count}. The parts are not of one model."
            )
        repeated = tensors.keys() & header.tensors.keys()
        if repeated:
            raise CheckpointError(
                f"{header.path}: tensor {min(repeated)!r} is in {files[min(repeated)].path.name} as"
                f" well. The parts are not of one model."
            )
        tensors.update(header.tensors)
        files.update(dict.fromkeys(header.tensors, file))
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise CheckpointError(
            f"{first.path}: key 'split.tensors.count' is {expected!r:.80}, but the {count} parts"
            f" hold {len(tensors)} tensors. The parts are not of one model."
        )
    return GGUFParts(replace(first, tensors=tensors), files)


def _count(header: GGUFHeader) -> int:
    """In how many parts the model is; 0 in a file stands for 1."""
    return max(_integer(header, "split.count", _MAX_PARTS), 1)


def _integer(header: GGUFHeader, key: str, most: int) -> int:
    value = header.metadata.get(key, 0)
    if type(value) is not int or not 0 <= value <= most:
        raise CheckpointError(
            f"{header.path}: key {key!r} is {value!r:.80}; it must be a whole number from 0 to"
            f" {most}."
        )
    return value
