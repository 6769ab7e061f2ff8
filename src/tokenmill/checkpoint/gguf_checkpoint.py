"""A GGUF file as a `Checkpoint`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.checkpoint.checkpoint import RawTensor, TokenizerData
from tokenmill.checkpoint.gguf_architecture import GGUFArchitecture, Parameters
from tokenmill.checkpoint.gguf_experts import GPT_OSS, QWEN3MOE
from tokenmill.checkpoint.gguf_families import GEMMA2, GEMMA3, OLMO2, PHI3, QWEN2, QWEN3
from tokenmill.checkpoint.gguf_llama import LLAMA
from tokenmill.checkpoint.gguf_parts import GGUFParts, open_parts
from tokenmill.checkpoint.gguf_reader import GGUFHeader, GGUFTensor
from tokenmill.checkpoint.mapped_file import FileRange, MappedFile
from tokenmill.errors import CheckpointError, did_you_mean

ARCHITECTURES: dict[str, GGUFArchitecture] = {
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gpt-oss": GPT_OSS,
    "llama": LLAMA,
    "olmo2": OLMO2,
    "phi3": PHI3,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3moe": QWEN3MOE,
}
"""`general.architecture` -> how to read it."""

_END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")

_MAX_EXPERTS = 1 << 20
"""Of all tensors together; far above what models have."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies: all of one of the file, or an expert's part."""

    name: str
    """Of the file's tensor."""
    shape: tuple[int, ...]
    begin: int
    """In the file."""
    end: int


class GGUFCheckpoint:
    """A GGUF file or its parts, mapped into memory once; tensors are views of the mapping.

    The end of text, turn and message are all end ids: `config["eos_token_id"]` lists them, the end
    of text first.
    """

    def __init__(self, parts: GGUFParts) -> None:
        header = parts.header
        self.path = header.path
        self._files: Mapping[str, MappedFile] | None = parts.files
        architecture = _architecture(header)
        parameters = Parameters(
            header,
            lambda name: parts.files[name].data,
            str(header.metadata["general.architecture"]),
        )
        self.config: Mapping[str, Any] = {
            **architecture.build_config(parameters),
            **_special_ids(header),
        }
        self.generation_config: Mapping[str, Any] = {}
        self.tokenizer_data = TokenizerData(
            gguf_metadata={
                key: value for key, value in header.metadata.items() if key.startswith("tokenizer.")
            }
        )
        self._architecture = architecture
        self._tensors = header.tensors
        self._places = _places(header, architecture)
        self.tensor_shapes: Mapping[str, tuple[int, ...]] = {
            hf_name: place.shape for hf_name, place in self._places.items()
        }
        self.tensor_formats: Mapping[str, str] = {
            hf_name: header.tensors[place.name].type.name for hf_name, place in self._places.items()
        }
        self.num_bytes = sum(tensor.num_bytes for tensor in header.tensors.values())

    @classmethod
    def open(cls, path: Path) -> GGUFCheckpoint:
        """Map the file and check its header; no tensor is read. Of a model in parts, any part
        stands for all.

        Raises `CheckpointError` if a file cannot be read or is missing, its header lies, or its
        architecture is not supported.
        """
        return cls(open_parts(path))

    def read(self, name: str) -> RawTensor:
        """The tensor of this name, still as it lies in the file.

        Its memory belongs to the mapping, which lasts as long as any tensor does. Writing to it
        changes neither the file nor another process's view.
        """
        (pages,) = self.file_ranges(name)
        place = self._places[name]
        return RawTensor(
            shape=place.shape,
            format=self._tensors[place.name].type.name,
            data=pages.file.tensor(pages.begin, pages.end),
            head_permutation=self._architecture.head_permutation(place.name, self.config),
            value_offset=self._architecture.value_offset(place.name),
            pages=pages,
        )

    def file_ranges(self, name: str) -> tuple[FileRange, ...]:
        """Where the tensor of this name lies. Raises `CheckpointError` if there is none."""
        if self._files is None:
            raise CheckpointError(f"{self.path}: tensor {name!r} was read after the file's close.")
        place = self._places.get(name)
        if place is None:
            raise CheckpointError(
                f"{self.path}: there is no tensor {name!r}.{did_you_mean(name, self._places)}"
            )
        return (FileRange(self._files[place.name], place.begin, place.end),)

    def close(self) -> None:
        self._files = None


def _places(header: GGUFHeader, architecture: GGUFArchitecture) -> dict[str, _Place]:
    """By Hugging Face name. Raises `CheckpointError` for more experts than a model can have."""
    places: dict[str, _Place] = {}
    num_experts = 0
    for name, tensor in header.tensors.items():
        if name in architecture.consumed_tensors:
            continue
        pattern = architecture.expert_name(name)
        if pattern is None or len(tensor.shape) != 3:
            end = tensor.offset + tensor.num_bytes
            places[architecture.hf_name(name)] = _Place(name, tensor.shape, tensor.offset, end)
            continue
        num_experts += tensor.shape[0]
        if num_experts > _MAX_EXPERTS:
            raise CheckpointError(
                f"{header.path}: tensor {name!r} has the shape {tensor.shape}; with it there are"
                f" {num_experts} matrices of experts, and the limit is {_MAX_EXPERTS}."
            )
        for expert, place in enumerate(_experts(name, tensor)):
            places[pattern.format(expert)] = place
    return places


def _experts(name: str, tensor: GGUFTensor) -> Iterator[_Place]:
    """The matrices of a tensor, one behind another; rows are whole blocks."""
    size = tensor.num_bytes // tensor.shape[0]
    for begin in range(tensor.offset, tensor.offset + tensor.num_bytes, size):
        yield _Place(name, tensor.shape[1:], begin, begin + size)


def _architecture(header: GGUFHeader) -> GGUFArchitecture:
    name = header.metadata.get("general.architecture")
    architecture = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if architecture is None:
        raise CheckpointError(
            f"{header.path}: key 'general.architecture' is {name!r:.80}, which is not supported."
            f" Supported: {', '.join(sorted(ARCHITECTURES))}."
        )
    return architecture


def _special_ids(header: GGUFHeader) -> dict[str, Any]:
    """The ids of special tokens, under the names of a config.json."""
    ids: dict[str, Any] = {}
    for key, hf_key in (("bos_token_id", "bos_token_id"), ("padding_token_id", "pad_token_id")):
        token_id = _token_id(header, key)
        if token_id is not None:
            ids[hf_key] = token_id
    end_ids = [_token_id(header, key) for key in _END_IDS]
    unique = list(dict.fromkeys(token_id for token_id in end_ids if token_id is not None))
    if unique:
        ids["eos_token_id"] = unique
    return ids


def _token_id(header: GGUFHeader, name: str) -> int | None:
    token_id = header.metadata.get(f"tokenizer.ggml.{name}")
    if token_id is not None and (type(token_id) is not int or token_id < 0):
        raise CheckpointError(
            f"{header.path}: key 'tokenizer.ggml.{name}' is {token_id!r:.80}; it must be a"
            " token id, a whole number of at least 0."
        )
    return token_id
