"""Reads the header of a GGUF file and trusts none of it.

    magic "GGUF" | version u32 | tensor_count u64 | kv_count u64
    kv_count x     key (length u64, bytes) | value type u32 | value
    tensor_count x name | n_dims u32 | dims u64 each, innermost first | type u32 | offset u64
    padding to the alignment
    tensor data, each tensor at its offset from here

Every count and length is compared with what is left of the file before anything of that size is
sliced or allocated. Versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tokenmill.checkpoint.gguf_types import ARRAY, SCALARS, STRING, TENSOR_TYPES, TensorType
from tokenmill.errors import CheckpointError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32

# Far above what real files hold (about 1.3 million array elements, 20,000 tensors), and low enough
# that a file made to be slow is refused within a second.
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 17
_MAX_ARRAY_ELEMENTS = 1 << 22
_MAX_NAME_BYTES = 1024
_MAX_STRING_BYTES = 1 << 24
_MAX_ALIGNMENT = 1 << 16
_MAX_DIMS = 4

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_MIN_KEY_VALUE_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies in the file. The range is inside the file and overlaps no other."""

    shape: tuple[int, ...]
    """As in torch, outermost first."""
    type: TensorType
    offset: int
    """From the start of the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Everything a GGUF file says before its tensor data, checked."""

    path: Path
    version: int
    alignment: int
    metadata: Mapping[str, Any]
    """Numbers, bools, strings, and lists of these. Bytes that are not UTF-8 read as U+FFFD."""
    tensors: Mapping[str, GGUFTensor]
    """By name, in file order."""


def read_header(path: Path, data: mmap.mmap | bytes) -> GGUFHeader:
    """Parse and check the header of the GGUF file at `path` whose whole content is `data`.

    Raises `CheckpointError` naming the file, the field, its value and the limit it breaks.
    """
    reader = _HeaderReader(path, data)
    version, num_tensors, num_keys = reader.preamble()
    metadata = reader.metadata(num_keys)
    infos = reader.tensor_infos(num_tensors)
    alignment = reader.alignment(metadata)
    tensors = reader.place(infos, alignment)
    return GGUFHeader(path, version, alignment, metadata, tensors)


class _TensorInfo(NamedTuple):
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    """From the start of the data section, as the file says it."""


class _HeaderReader:
    """A position in the file; each method reads one part of the header from there."""

    def __init__(self, path: Path, data: mmap.mmap | bytes) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._position = 0
        self._elements_left = _MAX_ARRAY_ELEMENTS

    def preamble(self) -> tuple[int, int, int]:
        """Version, number of tensors, number of keys."""
        magic = bytes(self._data[:4])
        if magic != MAGIC:
            self._fail("magic", f"is {magic!r}, not {MAGIC!r}: this is not a GGUF file")
        self._position = 4
        version = self._number(_U32, "version")
        if version & 0xFFFF == 0:
            self._fail("version", "is stored big-endian; only little-endian files can be read")
        if version not in _VERSIONS:
            self._fail("version", f"is {version}; versions 2 and 3 can be read")
        num_tensors = self._count("tensor_count", _MAX_TENSORS, _MIN_TENSOR_BYTES)
        num_keys = self._count("kv_count", _MAX_KEYS, _MIN_KEY_VALUE_BYTES)
        return version, num_tensors, num_keys

    def metadata(self, num_keys: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(num_keys):
            key = self._name(f"key {index}")
            if key in metadata:
                self._fail(f"key {key!r}", "is a duplicate")
            metadata[key] = self._value(f"key {key!r}")
        return metadata

    def tensor_infos(self, num_tensors: int) -> dict[str, _TensorInfo]:
        infos: dict[str, _TensorInfo] = {}
        for index in range(num_tensors):
            name = self._name(f"name of tensor {index}")
            if name in infos:
                self._fail(f"tensor {name!r}", "is a duplicate")
            infos[name] = self._tensor_info(f"tensor {name!r}")
        return infos

    def alignment(self, metadata: Mapping[str, Any]) -> int:
        value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        valid = type(value) is int and 8 <= value <= _MAX_ALIGNMENT and value.bit_count() == 1
        if not valid:
            self._fail(
                "key 'general.alignment'",
                f"is {_shown(value)}; it must be a power of two from 8 to {_MAX_ALIGNMENT}",
            )
        return int(value)

    def place(self, infos: Mapping[str, _TensorInfo], alignment: int) -> dict[str, GGUFTensor]:
        """Turn offsets into ranges of the file, which begin after the header and its padding."""
        data_start = -(-self._position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, (shape, tensor_type, offset) in infos.items():
            if offset % alignment:
                self._fail(
                    f"tensor {name!r}: offset", f"is {offset}, not a multiple of {alignment}"
                )
            num_bytes = math.prod(shape) // tensor_type.block_size * tensor_type.block_bytes
            start = data_start + offset
            if start + num_bytes > self._size:
                self._fail(
                    f"tensor {name!r}",
                    f"of shape {shape} and type {tensor_type.name} takes bytes {start} to"
                    f" {start + num_bytes} (its offset is {offset}), but the file ends at"
                    f" {self._size}; it is damaged or incomplete",
                )
            tensors[name] = GGUFTensor(shape, tensor_type, start, num_bytes)
        self._check_overlap(tensors)
        return tensors

    def _check_overlap(self, tensors: Mapping[str, GGUFTensor]) -> None:
        in_order = sorted(tensors.items(), key=lambda item: item[1].offset)
        for (name, tensor), (next_name, next_tensor) in pairwise(in_order):
            end = tensor.offset + tensor.num_bytes
            if end > next_tensor.offset:
                self._fail(
                    f"tensor {next_name!r}: offset",
                    f"puts it at byte {next_tensor.offset}, but tensor {name!r} ends at {end}",
                )

    def _tensor_info(self, field: str) -> _TensorInfo:
        num_dims = self._number(_U32, f"{field}: n_dims")
        if not 1 <= num_dims <= _MAX_DIMS:
            self._fail(f"{field}: n_dims", f"is {num_dims}; it must be 1 to {_MAX_DIMS}")
        dims = [self._number(_U64, f"{field}: dimension {i}") for i in range(num_dims)]
        if 0 in dims:
            self._fail(f"{field}: dimension {dims.index(0)}", "is 0; it must be at least 1")
        type_id = self._number(_U32, f"{field}: type")
        tensor_type = TENSOR_TYPES.get(type_id)
        if tensor_type is None:
            self._fail(f"{field}: type", f"is {type_id}, which is not a known tensor type")
        if dims[0] % tensor_type.block_size:
            self._fail(
                f"{field}: dimension 0",
                f"is {dims[0]}, not a multiple of {tensor_type.name}'s block of"
                f" {tensor_type.block_size} values",
            )
        offset = self._number(_U64, f"{field}: offset")
        return _TensorInfo(tuple(reversed(dims)), tensor_type, offset)

    def _value(self, field: str) -> Any:
        type_id = self._number(_U32, f"{field}: type")
        if type_id in SCALARS:
            return self._number(SCALARS[type_id], field)
        if type_id == STRING:
            return self._strings(field, 1)[0]
        if type_id == ARRAY:
            return self._array(field)
        return self._fail(f"{field}: type", f"is {type_id}, which is not a known value type")

    def _array(self, field: str) -> list[Any]:
        type_id = self._number(_U32, f"{field}: element type")
        if type_id == ARRAY:
            self._fail(f"{field}: element type", "is array; nested arrays are not supported")
        if type_id == STRING:
            return self._strings(field, self._array_length(field, item_bytes=8))
        scalar = SCALARS.get(type_id)
        if scalar is None:
            self._fail(f"{field}: element type", f"is {type_id}, which is not a known value type")
        count = self._array_length(field, item_bytes=scalar.size)
        values = struct.unpack_from(f"<{count}{scalar.format[1:]}", self._data, self._position)
        self._position += count * scalar.size
        return list(values)

    def _array_length(self, field: str, item_bytes: int) -> int:
        count = self._count(f"{field}: array length", self._elements_left, item_bytes)
        self._elements_left -= count
        return count

    def _strings(self, field: str, count: int) -> list[str]:
        """`count` strings in a row. Vocabularies come this way, so the loop is kept tight."""
        data, size, position, read_length = self._data, self._size, self._position, _U64.unpack_from
        strings: list[str] = []
        for index in range(count):
            start = position + 8
            if start > size:
                self._fail(f"{field}: string {index}", f"starts at the end of the file, {size}")
            length: int = read_length(data, position)[0]
            position = start + length
            if position > size or length > _MAX_STRING_BYTES:
                limit = min(size - start, _MAX_STRING_BYTES)
                self._fail(
                    f"{field}: length of string {index}", f"is {length}; it can be {limit} at most"
                )
            strings.append(data[start:position].decode("utf-8", "replace"))
        self._position = position
        return strings

    def _name(self, field: str) -> str:
        """A key or a tensor's name: never empty, always UTF-8."""
        length = self._count(f"length of {field}", _MAX_NAME_BYTES, 1)
        raw = self._data[self._position : self._position + length]
        self._position += length
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            self._fail(field, f"is {_shown(raw)}, which is not UTF-8")
        if not name:
            self._fail(field, "is empty")
        return name

    def _count(self, field: str, maximum: int, item_bytes: int) -> int:
        """A count of items that take at least `item_bytes` each in the rest of the file."""
        count: int = self._number(_U64, field)
        room = (self._size - self._position) // item_bytes
        if count > room:
            self._fail(field, f"is {count}, but the rest of the file has room for {room} at most")
        if count > maximum:
            self._fail(field, f"is {count}; the limit is {maximum}")
        return count

    def _number(self, layout: struct.Struct, field: str) -> Any:
        end = self._position + layout.size
        if end > self._size:
            self._fail(field, f"ends at byte {end}, but the file ends at {self._size}")
        (value,) = layout.unpack_from(self._data, self._position)
        self._position = end
        return value

    def _fail(self, field: str, problem: str) -> NoReturn:
        raise CheckpointError(f"{self._path}: {field} {problem}.")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
