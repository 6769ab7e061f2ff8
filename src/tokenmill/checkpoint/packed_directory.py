"""A directory that `tokenmill quantize` has written: weights as the native kernels read them.

    packed.json          what was made of what: see `Manifest`
    packed.safetensors   tensors; packed ones are plain bytes (U8), at multiples of 64
    config.json, ...     the model's own files beside its weights

The weights are mapped, not copied. What cannot be right is refused: another version of the layout,
weights or config.json that are not those that the manifest was written for.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tokenmill.checkpoint.checkpoint import PACKED_PREFIX, RawTensor, TokenizerData
from tokenmill.checkpoint.expert_layout import with_expert_layout
from tokenmill.checkpoint.hf_directory import CONFIG, read_configs
from tokenmill.checkpoint.mapped_file import FileRange, MappedFile
from tokenmill.checkpoint.safetensors_header import read_header
from tokenmill.errors import CheckpointError, did_you_mean

if TYPE_CHECKING:
    import torch

MANIFEST = "packed.json"
WEIGHTS = "packed.safetensors"
LAYOUT_VERSION = 1
"""Of the packed layouts; rises when csrc/gemm_kernels.h changes what bytes mean."""
ALIGNMENT = 64


class PackedTensor(msgspec.Struct, frozen=True):
    """What the bytes of a packed tensor are."""

    shape: tuple[int, ...]
    """[out_features, in_features]."""
    block_type: str
    """Of the codes, such as `Q4_1`."""


class Manifest(msgspec.Struct, frozen=True):
    """packed.json."""

    version: int
    """LAYOUT_VERSION of who wrote it."""
    format: str
    """int8 or int4."""
    source: str
    """The model that it was made of, as it was named."""
    source_digest: str
    """sha256 of the source's tensors: names, shapes, formats, bytes."""
    config_digest: str
    """sha256 of config.json."""
    header_digest: str
    """sha256 of the header of the weights."""
    num_bytes: int
    """Size of the weights' file."""
    tensors: dict[str, PackedTensor]
    """The packed ones by name."""


class PackedDirectory:
    """Such a directory as a `Checkpoint`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = read_manifest(path)
        self.config: Mapping[str, Any]
        self.generation_config: Mapping[str, Any]
        self.config, self.generation_config = read_configs(path)
        self.tokenizer_data = TokenizerData(directory=path)
        header, self._data_begin = read_header(path / WEIGHTS)
        _check(self.manifest, path, header)
        self._entries: dict[str, dict[str, Any]] = {
            name: entry for name, entry in json.loads(header).items() if name != "__metadata__"
        }
        packed = self.manifest.tensors
        self.tensor_shapes: Mapping[str, tuple[int, ...]] = {
            name: packed[name].shape if name in packed else tuple(entry["shape"])
            for name, entry in self._entries.items()
        }
        self.tensor_formats: Mapping[str, str] = {
            name: PACKED_PREFIX + packed[name].block_type if name in packed else entry["dtype"]
            for name, entry in self._entries.items()
        }
        self.config = with_expert_layout(self.config, self.tensor_shapes)
        self.num_bytes = self.manifest.num_bytes - self._data_begin

    @classmethod
    def open(cls, path: Path) -> PackedDirectory:
        """Read the manifest and the header of the weights; no tensor is read.

        Raises `CheckpointError` if something is missing or does not belong together.
        """
        return cls(path)

    def read(self, name: str) -> RawTensor:
        """The tensor of this name: a view of the mapped file."""
        (pages,) = self.file_ranges(name)
        # All tensors are views of one, so that neighbours can be views of one piece.
        data = self._bytes[pages.begin : pages.end]
        return RawTensor(self.tensor_shapes[name], self.tensor_formats[name], data, pages=pages)

    def file_ranges(self, name: str) -> tuple[FileRange, ...]:
        """Where the tensor of this name lies. Raises `CheckpointError` if there is none."""
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(
                f"{self.path}: there is no tensor {name!r}.{did_you_mean(name, self._entries)}"
            )
        begin, end = (self._data_begin + offset for offset in entry["data_offsets"])
        return (FileRange(self._file, begin, end),)

    def close(self) -> None:
        self.__dict__.pop("_bytes", None)
        self.__dict__.pop("_file", None)

    @functools.cached_property
    def _file(self) -> MappedFile:
        return MappedFile(self.path / WEIGHTS)

    @functools.cached_property
    def _bytes(self) -> torch.Tensor:
        """The whole file."""
        return self._file.tensor(0, self.manifest.num_bytes)


def read_manifest(directory: Path) -> Manifest:
    """packed.json. Raises `CheckpointError` if it cannot be read, or is of another version."""
    file = directory / MANIFEST
    try:
        content = file.read_bytes()
        version = msgspec.json.decode(content, type=dict[str, Any]).get("version")
        if version != LAYOUT_VERSION:
            raise CheckpointError(
                f"{file}: version {version} of packed weights; this tokenmill reads"
                f" {LAYOUT_VERSION}. Make them again with `tokenmill quantize`."
            )
        return msgspec.json.decode(content, type=Manifest)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}.") from error
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise CheckpointError(f"{file}: is not a manifest of packed weights: {error}.") from error


def digest(content: bytes) -> str:
    """sha256, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def _check(manifest: Manifest, path: Path, header: bytes) -> None:
    remedy = "Make them again with `tokenmill quantize`."
    if digest(header) != manifest.header_digest:
        raise CheckpointError(
            f"{path / WEIGHTS}: these are not the weights that {MANIFEST} was written for (their"
            f" header has another digest). {remedy}"
        )
    actual = (path / WEIGHTS).stat().st_size
    if actual != manifest.num_bytes:
        raise CheckpointError(
            f"{path / WEIGHTS}: has {actual} bytes instead of {manifest.num_bytes}; it is"
            f" incomplete. {remedy}"
        )
    if digest((path / CONFIG).read_bytes()) != manifest.config_digest:
        raise CheckpointError(
            f"{path / CONFIG}: is not the one that the packed weights were made with (another"
            f" digest). Restore it, use hf_overrides, or make the weights again."
        )
