"""A path on this machine -> an open checkpoint, whatever its format."""

from __future__ import annotations

from pathlib import Path

from tokenmill.checkpoint.checkpoint import Checkpoint
from tokenmill.checkpoint.gguf_checkpoint import GGUFCheckpoint
from tokenmill.checkpoint.gguf_parts import first_parts
from tokenmill.checkpoint.hf_directory import HFDirectory
from tokenmill.checkpoint.packed_directory import MANIFEST, PackedDirectory
from tokenmill.checkpoint.quantized_directory import QuantizedDirectory, quantization_method
from tokenmill.errors import CheckpointError, ModelNotFoundError


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file, a directory of Hugging Face or of `tokenmill quantize`, or one that holds
    one GGUF file or its parts.

    Raises `ModelNotFoundError` if there is no model, and `CheckpointError` if it cannot be read.
    """
    if path.is_file():
        return GGUFCheckpoint.open(path)
    if not path.is_dir():
        raise ModelNotFoundError(f"{path}: there is no such file or directory.")
    if (path / MANIFEST).is_file():
        return PackedDirectory.open(path)
    if (path / "config.json").is_file():
        files = HFDirectory.open(path)
        return QuantizedDirectory(files) if quantization_method(files.config) else files
    gguf_files = first_parts(sorted(file.name for file in path.glob("*.gguf")))
    if not gguf_files:
        raise ModelNotFoundError(
            f"{path}: there is no model here; looked for config.json and for a .gguf file."
        )
    if len(gguf_files) > 1:
        raise CheckpointError(
            f"{path}: there are {len(gguf_files)} GGUF files ({', '.join(gguf_files)}); give the"
            f" path of one."
        )
    return GGUFCheckpoint.open(path / gguf_files[0])
