"""Weights that are in this process's memory, as files for engine cores in other ones."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.config.engine_config import ModelConfig
from tokenmill.contracts.encoding import plain
from tokenmill.contracts.operations import Tensors

if TYPE_CHECKING:
    import torch

_FILE_BYTES = 1 << 30
"""Tensors are gathered up to so many bytes, and then written to a file."""


@contextmanager
def spooled(tensors: Tensors, model: ModelConfig) -> Iterator[Path]:
    """A directory with these weights of a model, as long as the context lasts. Raises `OSError`."""
    with tempfile.TemporaryDirectory(prefix="tokenmill-weights-") as name:
        directory = Path(name)
        (directory / "config.json").write_text(json.dumps(dict(model.hf_config), default=plain))
        gathered: dict[str, torch.Tensor] = {}
        files: dict[str, str] = {}
        num_bytes = 0
        for tensor_name, tensor in tensors:
            # A copy: tensors may share memory, and may be changed once the next one is asked for.
            gathered[tensor_name] = tensor.detach().cpu().clone().contiguous()
            num_bytes += tensor.nbytes
            if num_bytes >= _FILE_BYTES:
                _write(directory, gathered, files)
                num_bytes = 0
        _write(directory, gathered, files)
        index = {"metadata": {}, "weight_map": files}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        yield directory


def _write(directory: Path, gathered: dict[str, torch.Tensor], files: dict[str, str]) -> None:
    from safetensors.torch import save_file

    name = f"model-{len(set(files.values())):05d}.safetensors"
    save_file(gathered, directory / name)
    files.update(dict.fromkeys(gathered, name))
    gathered.clear()
