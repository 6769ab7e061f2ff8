"""One face for every checkpoint format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from tokenmill.checkpoint.mapped_file import FileRange


PACKED_PREFIX = "packed "
"""Before a block type, in the format of a tensor that lies in the file as kernels read it."""


class Pages(Protocol):
    """Memory that a file is mapped to, as far as one tensor lies in it."""

    def need(self, begin: int, end: int) -> None:
        """Wait until bytes [begin, end) of the tensor are there, if they are on their way.

        Raises `CheckpointError` if they cannot be read.
        """
        ...

    def release(self, begin: int, end: int) -> None:
        """Bytes [begin, end) are done with: they need no memory. They may still be read, again from
        the file.
        """
        ...


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor's bytes as they lie in the file; mapped, not copied."""

    shape: tuple[int, ...]
    """As in torch: a linear weight is [out_features, in_features]."""
    format: str
    """`F32`, `F16`, `BF16`, a GGUF block type such as `Q4_1`, or `packed Q4_1`: see
    quantization/packed_blocks.py."""
    data: torch.Tensor
    """uint8 [num_bytes], backed by the mapped file. Rows follow one another; within a row, blocks
    of a block type."""
    head_permutation: int | None = None
    """Number of heads whose rows llama.cpp has interleaved (q and k projections of the llama
    family); the loader undoes it. None: rows are in order."""
    value_offset: float = 0.0
    """What llama.cpp has added to every value; the loader subtracts it. Of plain tensors only."""
    pages: Pages | None = None
    """Of `data`, if it is a view of a file and nothing else. Whoever copies the data may say which
    bytes are needed next, and which no more; nobody has to."""

    def need(self) -> None:
        """Wait for all of the data."""
        if self.pages is not None:
            self.pages.need(0, self.data.numel())

    def release(self) -> None:
        """All of the data is done with."""
        if self.pages is not None:
            self.pages.release(0, self.data.numel())


@dataclass(frozen=True, slots=True)
class TokenizerData:
    """Where a tokenizer comes from: a directory, or the metadata of a GGUF file."""

    directory: Path | None = None
    """Holds tokenizer.json (and tokenizer_config.json, special_tokens_map.json)."""
    gguf_metadata: Mapping[str, Any] = field(default_factory=dict)
    """The `tokenizer.*` keys of a GGUF file."""


class Checkpoint(Protocol):
    """A model's files, opened: headers are read and checked, tensors are not."""

    @property
    def path(self) -> Path:
        """Directory or file."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's parameters under the names of a Hugging Face config.json."""
        ...

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """Default sampling parameters and end ids; empty if the model has none."""
        ...

    @property
    def tokenizer_data(self) -> TokenizerData: ...

    @property
    def tensor_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's shape under its Hugging Face name."""
        ...

    @property
    def tensor_formats(self) -> Mapping[str, str]:
        """Every tensor's `RawTensor.format`."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as they lie in the files."""
        ...

    def read(self, name: str) -> RawTensor:
        """The tensor of this name. Raises `CheckpointError` if its data is out of bounds."""
        ...

    def file_ranges(self, name: str) -> Sequence[FileRange]:
        """What `read` of this tensor reads, in this order; empty if it reads no file."""
        ...

    def close(self) -> None:
        """Unmap the files; tensors that were read must not be used any more."""
        ...
