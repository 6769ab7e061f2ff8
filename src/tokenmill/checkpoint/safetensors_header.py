"""The header of a safetensors file, which says where tensors lie.

The file is its length (u64), the header (JSON: name to dtype, shape and data_offsets, which count
from the header's end), and the tensors.
"""

from __future__ import annotations

from pathlib import Path

from tokenmill.errors import CheckpointError

_MAX_HEADER_BYTES = 64 << 20


def read_header(file: Path) -> tuple[bytes, int]:
    """The header's JSON, and where the tensors begin. Raises `CheckpointError`."""
    try:
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > _MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{file}: the header's length, {size} bytes, cannot be right."
                )
            return stream.read(size), 8 + size
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}.") from error
