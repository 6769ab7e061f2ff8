"""A directory in Hugging Face format as a `Checkpoint`: config.json and safetensors files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

from tokenmill.checkpoint.checkpoint import RawTensor, TokenizerData
from tokenmill.checkpoint.expert_layout import with_expert_layout
from tokenmill.checkpoint.mapped_file import FileRange, MappedFile
from tokenmill.checkpoint.nested_config import canonical_tensors, flat_config
from tokenmill.checkpoint.safetensors_header import read_header
from tokenmill.errors import CheckpointError, did_you_mean

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
_GENERATION_CONFIG = "generation_config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")

_MAX_JSON_BYTES = 64 << 20

_READABLE = ("F32", "F16", "BF16", "U8")
"""U8 are codes, of which a model must know what they stand for."""
_DTYPE_BYTES = (
    dict.fromkeys(("F64", "I64", "U64", "C64"), 8)
    | dict.fromkeys(("F32", "I32", "U32"), 4)
    | dict.fromkeys(("F16", "BF16", "I16", "U16"), 2)
    | dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1)
)
_TORCH_DTYPES = (
    {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    | {"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "BOOL": "bool"}
    | {"U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "C64": "complex64"}
    | {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
)


class _Entry(NamedTuple):
    """A tensor as the header of its file describes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    begin: int
    """Where its bytes begin in the file."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _DTYPE_BYTES[self.dtype]


class HFDirectory:
    """A Hugging Face model directory.

    The index, if there is one, decides which file each tensor is read from; files it does not name
    are not opened. Pickled weights are never read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: Mapping[str, Any]
        self.generation_config: Mapping[str, Any]
        self.config, self.generation_config = read_configs(path)
        self.tokenizer_data = TokenizerData(directory=path)
        self._entries = canonical_tensors(self.config, _find_tensors(path))
        self.tensor_shapes: Mapping[str, tuple[int, ...]] = {
            name: entry.shape for name, entry in self._entries.items()
        }
        self.tensor_formats: Mapping[str, str] = {
            name: entry.dtype for name, entry in self._entries.items()
        }
        self.config = with_expert_layout(self.config, self.tensor_shapes)
        self.num_bytes = sum(entry.num_bytes for entry in self._entries.values())
        self._mapped: dict[Path, MappedFile] = {}

    @classmethod
    def open(cls, path: Path) -> HFDirectory:
        """Read the configuration and the headers of the weight files; no tensor is read.

        Raises `CheckpointError`, naming file and tensor, if a file is missing or damaged or lacks a
        tensor that the index places in it.
        """
        return cls(path)

    def read(self, name: str) -> RawTensor:
        """The tensor of this name, still as it lies in the file.

        Its memory belongs to a mapping of the file, which lasts as long as any tensor does. Writing
        to it changes neither the file nor another process's view.
        """
        (pages,) = self.file_ranges(name)
        entry = self._entries[name]
        if entry.dtype not in _READABLE:
            raise CheckpointError(
                f"{entry.file}: tensor {name!r} has dtype {entry.dtype}, which is not supported."
                f" Supported: {', '.join(_READABLE)}."
            )
        data = pages.file.tensor(pages.begin, pages.end)
        return RawTensor(entry.shape, entry.dtype, data, pages=pages)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of this name, of any dtype and in its shape; mapped as by `read`."""
        import torch

        (pages,) = self.file_ranges(name)
        entry = self._entries[name]
        dtype: torch.dtype = getattr(torch, _TORCH_DTYPES[entry.dtype])
        return pages.file.tensor(pages.begin, pages.end).view(dtype).view(entry.shape)

    def file_ranges(self, name: str) -> tuple[FileRange, ...]:
        """Where the tensor of this name lies. Raises `CheckpointError` if there is none."""
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(
                f"{self.path}: there is no tensor {name!r}.{did_you_mean(name, self._entries)}"
            )
        if entry.file not in self._mapped:
            self._mapped[entry.file] = MappedFile(entry.file)
        return (FileRange(self._mapped[entry.file], entry.begin, entry.begin + entry.num_bytes),)

    def close(self) -> None:
        self._mapped.clear()


def read_configs(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and generation_config.json, which is empty if there is none.

    The first is as `flat_config` makes it. Raises `CheckpointError` for a file that cannot be read
    or holds no JSON object.
    """
    generation_config = directory / _GENERATION_CONFIG
    return flat_config(_read_json(directory / CONFIG)), (
        _read_json(generation_config) if generation_config.is_file() else {}
    )


def _find_tensors(directory: Path) -> dict[str, _Entry]:
    """Every tensor of the model, checked against the headers of the files."""
    if (directory / _INDEX).is_file():
        return _from_index(directory)
    if (directory / _WEIGHTS).is_file():
        return _read_entries(directory / _WEIGHTS)
    looked_for = f"looked for {_INDEX} and {_WEIGHTS}"
    for name in _PICKLED_WEIGHTS:
        if (directory / name).is_file():
            raise CheckpointError(
                f"{directory}: the weights are pickled ({name}), which can run code when read;"
                f" {looked_for}. Convert them to safetensors with `save_pretrained`."
            )
    raise CheckpointError(f"{directory}: no weights; {looked_for}.")


def _from_index(directory: Path) -> dict[str, _Entry]:
    index = directory / _INDEX
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: 'weight_map' is missing or is not an object of names.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(
                f"{index}: tensor {name!r} is placed in {file!r:.80}, which is not the name of a"
                " file in the same directory."
            )
    in_files = {
        file: _read_entries(directory / file) for file in _shards(directory, weight_map.values())
    }
    for name, file in weight_map.items():
        if name not in in_files[file]:
            raise CheckpointError(
                f"{directory / file}: there is no tensor {name!r}, which {_INDEX} places here."
            )
    return {name: in_files[file][name] for name, file in weight_map.items()}


def _shards(directory: Path, names: Iterable[str]) -> list[str]:
    shards = sorted(set(names))
    missing = [name for name in shards if not (directory / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{directory}: {_INDEX} names {', '.join(missing)}, which"
            f" {'is' if len(missing) == 1 else 'are'} not there. The download is incomplete."
        )
    return shards


def _read_entries(file: Path) -> dict[str, _Entry]:
    _check_header(file)
    header, begin = read_header(file)
    entries: dict[str, _Entry] = {}
    for name, entry in json.loads(header).items():
        if name == "__metadata__":
            continue
        dtype = entry["dtype"]
        if dtype not in _DTYPE_BYTES:
            raise CheckpointError(f"{file}: tensor {name!r} has the unknown dtype {dtype!r}.")
        first = begin + entry["data_offsets"][0]
        entries[name] = _Entry(file, tuple(entry["shape"]), dtype, first)
    return entries


def _check_header(file: Path) -> None:
    """Have the library compare names, shapes, offsets and the file's size."""
    try:
        safe_open(file, framework="np")  # numpy, because that needs no torch
    except SafetensorError as error:
        raise CheckpointError(
            f"{file}: the file is damaged or incomplete ({error}). Fetch it again."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}.") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            raw = stream.read(_MAX_JSON_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}.") from error
    if len(raw) > _MAX_JSON_BYTES:
        raise CheckpointError(f"{file}: is larger than the limit of {_MAX_JSON_BYTES} bytes.")
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{file}: holds a JSON {type(content).__name__}; it must be an object."
        )
    return content
