"""Quantises a checkpoint into a directory that the next start maps: `PackedDirectory`."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from tokenmill.checkpoint.checkpoint import Checkpoint, RawTensor
from tokenmill.checkpoint.hf_directory import CONFIG, HFDirectory
from tokenmill.checkpoint.nested_config import is_of_tower
from tokenmill.checkpoint.packed_directory import (
    ALIGNMENT,
    LAYOUT_VERSION,
    MANIFEST,
    WEIGHTS,
    Manifest,
    PackedTensor,
    digest,
    read_manifest,
)
from tokenmill.errors import CheckpointError, ConfigError
from tokenmill.kernels.gemm import GROUP_SIZE, PackedBlocks, QuantizedType
from tokenmill.quantization.dequantize import plain_values
from tokenmill.quantization.packed_blocks import QUANTIZED_TYPES, Quantization, packed_bytes

Progress = Callable[[int, int], None]
"""Called with the bytes of the source done so far, and in total."""

_PLAIN = ("F32", "F16", "BF16")
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_TRANSPOSED = ("GPT2LMHeadModel",)
"""Architectures whose checkpoints keep matrices as [in_features, out_features]."""
_ROUTERS = (".gate.weight", ".router.weight", ".shared_expert_gate.weight", ".wg.weight")
_EIGHT_BITS = ("embed_tokens.weight", "lm_head.weight", *_ROUTERS)
"""Ends of the names of matrices that take eight bits in any format: vocabularies, and routers."""
_KEPT = ("norm", "embed", "wte", "wpe", "kv_b_proj")
"""Parts of the names of weights that are no matrices of layers, such as tables of positions, or
that layers take apart and transpose: rounded twice they would have other bits, and more error.
"""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor goes."""

    name: str
    shape: tuple[int, ...]
    source_format: str
    block_type: QuantizedType | None
    """None: it is copied as it is."""
    begin: int
    end: int


def pack_checkpoint(
    checkpoint: Checkpoint,
    out: Path,
    format_: Quantization,
    *,
    source: str,
    order: Iterable[str],
    on_progress: Progress = lambda done, total: None,
) -> Manifest:
    """Write the directory `out`, or replace the packed weights in it.

    Matrices whose rows are a multiple of 32 values are quantised; the rest is copied, and matrices
    among it become `format_` when they are loaded. `order` names tensors in the order in which
    layers join them, so that joined ones are neighbours in the file. Memory
    holds one tensor at a time. If it fails, no new weights are left. Raises `ConfigError` and
    `CheckpointError` for a source that cannot be packed.
    """
    _check_source(checkpoint)
    places = _places(checkpoint, format_, order)
    out.mkdir(parents=True, exist_ok=True)
    temporary = out / f".{WEIGHTS}.part"
    try:
        with temporary.open("wb") as stream:
            header, source_digest = _write(stream, checkpoint, places, on_progress)
        _copy_others(checkpoint.path, out)
        manifest = Manifest(
            version=LAYOUT_VERSION,
            format=format_,
            source=source,
            source_digest=source_digest,
            config_digest=digest((out / CONFIG).read_bytes()),
            header_digest=digest(header),
            num_bytes=temporary.stat().st_size,
            tensors={
                place.name: PackedTensor(place.shape, place.block_type)
                for place in places
                if place.block_type is not None
            },
        )
        temporary.replace(out / WEIGHTS)
    finally:
        temporary.unlink(missing_ok=True)
    encoded = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    (out / MANIFEST).write_bytes(encoded + b"\n")
    return manifest


def tensors_digest(checkpoint: Checkpoint) -> str:
    """sha256 of the tensors' names, shapes, formats and bytes, in the order of their names."""
    total = hashlib.sha256()
    for name in sorted(checkpoint.tensor_shapes):
        total.update(_tensor_digest(name, checkpoint.read(name)))
    return total.hexdigest()


def existing_manifest(out: Path, *, read: bool = True) -> Manifest | None:
    """The manifest that is there; None for an empty or absent directory, and without `read`.

    Raises `ConfigError` if `out` holds anything else, which is never overwritten.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not (out / MANIFEST).is_file():
        raise ConfigError(
            f"{out}: exists and holds no packed weights; give a directory that is new or empty."
        )
    return read_manifest(out) if read else None


def _check_source(checkpoint: Checkpoint) -> None:
    if not isinstance(checkpoint, HFDirectory):
        raise ConfigError(
            f"{checkpoint.path}: only directories with safetensors can be packed. A GGUF file with"
            f" block weights needs no packing: its codes are kept when it is loaded."
        )
    architectures = checkpoint.config.get("architectures") or [""]
    if architectures[0] in _TRANSPOSED:
        raise ConfigError(
            f"{checkpoint.path}: {architectures[0]} keeps its matrices transposed, which cannot be"
            f" packed. Quantise them while they are loaded: --quantization int8 or int4."
        )
    for name, format_ in checkpoint.tensor_formats.items():
        if format_ not in _PLAIN:
            raise CheckpointError(
                f"{checkpoint.path}: tensor {name!r} has the format {format_}; only"
                f" {', '.join(_PLAIN)} can be packed."
            )


def _places(checkpoint: Checkpoint, format_: Quantization, order: Iterable[str]) -> list[_Place]:
    """Packed tensors first: their sizes are multiples of ALIGNMENT."""
    shapes = checkpoint.tensor_shapes
    names = [name for name in dict.fromkeys([*order, *shapes]) if name in shapes]
    types = {name: _block_type(name, shapes[name], format_) for name in names}
    places, begin = [], 0
    for name in sorted(names, key=lambda name: types[name] is None):
        shape, block_type = shapes[name], types[name]
        if block_type is None:
            num_bytes = checkpoint.read(name).data.numel()
        else:
            num_bytes = packed_bytes(block_type, *shape)
            assert num_bytes % ALIGNMENT == 0
        source_format = checkpoint.tensor_formats[name]
        places.append(_Place(name, shape, source_format, block_type, begin, begin + num_bytes))
        begin += num_bytes
    return places


def _block_type(name: str, shape: tuple[int, ...], format_: Quantization) -> QuantizedType | None:
    if len(shape) != 2 or not name.endswith("weight") or shape[1] % GROUP_SIZE or not shape[0]:
        return None
    if name.endswith(_EIGHT_BITS):
        return QUANTIZED_TYPES["int8"]
    is_kept = is_of_tower(name) or any(part in name for part in _KEPT)
    return None if is_kept else QUANTIZED_TYPES[format_]


def _write(
    stream: BinaryIO, checkpoint: Checkpoint, places: list[_Place], on_progress: Progress
) -> tuple[bytes, str]:
    """Returns the header, and the digest of the source."""
    header = _header(places)
    stream.write(len(header).to_bytes(8, "little"))
    stream.write(header)
    done, total = 0, checkpoint.num_bytes
    digests: dict[str, bytes] = {}
    on_progress(done, total)
    for place in places:
        raw = checkpoint.read(place.name)
        digests[place.name] = _tensor_digest(place.name, raw)
        packed = raw.data
        if place.block_type is not None:
            packed = PackedBlocks.quantize(place.block_type, plain_values(raw)).buffer
        stream.write(packed[: place.end - place.begin].numpy().data)
        done += raw.data.numel()
        on_progress(done, total)
    combined = hashlib.sha256()
    for name in sorted(digests):
        combined.update(digests[name])
    return header, combined.hexdigest()


def _header(places: list[_Place]) -> bytes:
    entries: dict[str, Any] = {}
    for place in places:
        is_packed = place.block_type is not None
        entries[place.name] = {
            "dtype": "U8" if is_packed else place.source_format,
            "shape": [place.end - place.begin] if is_packed else list(place.shape),
            "data_offsets": [place.begin, place.end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-(8 + len(text)) % ALIGNMENT)


def _tensor_digest(name: str, raw: RawTensor) -> bytes:
    total = hashlib.sha256(f"{name} {raw.shape} {raw.format} ".encode())
    total.update(raw.data.numpy().data)
    return total.digest()


def _copy_others(source: Path, out: Path) -> None:
    """Everything beside the weights."""
    for file in _other_files(source):
        shutil.copyfile(file, out / file.name)


def _other_files(source: Path) -> Iterator[Path]:
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES):
            yield file
