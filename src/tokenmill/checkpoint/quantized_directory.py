"""Checkpoints that other tools have quantised, as a `Checkpoint` of block weights.

    gptq                 qweight, qzeros, scales, g_idx       4 or 8 bits
    awq                  qweight, qzeros, scales              4 bits
    compressed-tensors   weight_packed, weight_scale, ...     4 or 8 bits; int8 or float8 weights
    fp8                  weight (float8), weight_scale_inv    blocks of a scale each

Several tensors of the file become one, `name.weight`, in a GGUF block type that every kernel knows.
Which type follows from the config and the headers; `quantized_tensors.py` makes the blocks when a
tensor is read. Scales of activations are left out: ours are found anew for each row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.checkpoint.checkpoint import RawTensor, TokenizerData
from tokenmill.checkpoint.gguf_types import TENSOR_TYPES
from tokenmill.checkpoint.hf_directory import HFDirectory
from tokenmill.checkpoint.mapped_file import FileRange
from tokenmill.errors import CheckpointError, did_you_mean

METHODS = ("gptq", "awq", "compressed-tensors", "fp8")
BLOCK_VALUES = 32
"""Values that share a scale in the block types that weights become."""

_TYPES = {kind.name: kind for kind in TENSOR_TYPES.values()}
_LEFT_OUT = (
    *(".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale"),
    *(".k_scale", ".v_scale", ".q_scale", ".bias_scale"),
)
"""Ends of the names of scales of activations and caches."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How matrices are quantised, from config.json."""

    method: str
    """One of METHODS."""
    bits: int
    group_size: int
    """Values along K that share a scale; -1: the whole row."""
    is_symmetric: bool
    """Whether all zeros are in the middle of the codes."""
    reorders: bool = False
    """Whether values of a group lie apart (GPTQ's desc_act)."""
    zero_offset: int = 0
    """What is added to stored zeros."""
    block_shape: tuple[int, int] = (128, 128)
    """Of a float8 weight: rows and columns that share a scale, where scales form a grid."""


@dataclass(frozen=True, slots=True)
class Packed:
    """One matrix of the file: the name before the last dot, and its parts."""

    module: str
    kind: str
    """gptq, awq, packed, int8 or float8."""
    parts: tuple[str, ...]
    """The last names of its tensors, such as qweight."""
    shape: tuple[int, int]
    """[out_features, in_features]."""
    block_type: str
    """What it becomes; F32 where rows are no whole blocks."""


class QuantizedDirectory:
    """A Hugging Face directory whose matrices are in several tensors each."""

    def __init__(self, files: HFDirectory) -> None:
        self.path: Path = files.path
        self.config: Mapping[str, Any] = files.config
        self.generation_config: Mapping[str, Any] = files.generation_config
        self.tokenizer_data: TokenizerData = files.tokenizer_data
        self.scheme = read_scheme(files.config, files.path)
        self._files = files
        self._packed = {f"{each.module}.weight": each for each in _find(files, self.scheme)}
        taken = {f"{each.module}.{part}" for each in self._packed.values() for part in each.parts}
        plain = [
            name
            for name in files.tensor_shapes
            if name not in taken and not name.endswith(_LEFT_OUT)
        ]
        self.tensor_shapes: Mapping[str, tuple[int, ...]] = {
            **{name: files.tensor_shapes[name] for name in plain},
            **{name: each.shape for name, each in self._packed.items()},
        }
        self.tensor_formats: Mapping[str, str] = {
            **{name: files.tensor_formats[name] for name in plain},
            **{name: each.block_type for name, each in self._packed.items()},
        }
        self.num_bytes = sum(map(self._bytes_of, self.tensor_shapes))

    def read(self, name: str) -> RawTensor:
        """The tensor of this name; matrices are turned into blocks now."""
        packed = self._packed.get(name)
        if packed is None:
            if name not in self.tensor_shapes:
                raise CheckpointError(
                    f"{self.path}: there is no tensor {name!r}."
                    f"{did_you_mean(name, self.tensor_shapes)}"
                )
            return self._files.read(name)
        from tokenmill.checkpoint.quantized_tensors import to_blocks

        tensors = {part: self._files.tensor(f"{packed.module}.{part}") for part in packed.parts}
        where = f"{self.path}: {packed.module}"
        try:
            data = to_blocks(packed, tensors, self.scheme, where)
        except (IndexError, KeyError, RuntimeError, ZeroDivisionError) as error:
            shapes = ", ".join(f"{part} {tuple(tensors[part].shape)}" for part in packed.parts)
            raise CheckpointError(
                f"{where}: its tensors do not fit each other and the config ({shapes}): {error}."
            ) from error
        return RawTensor(packed.shape, packed.block_type, data)

    def file_ranges(self, name: str) -> tuple[FileRange, ...]:
        """Where the parts of a matrix lie. Raises `CheckpointError` if there is no such tensor."""
        packed = self._packed.get(name)
        names = [f"{packed.module}.{part}" for part in packed.parts] if packed else [name]
        return tuple(where for each in names for where in self._files.file_ranges(each))

    def close(self) -> None:
        self._files.close()

    def _bytes_of(self, name: str) -> int:
        kind = _TYPES.get(self.tensor_formats[name])
        num_values = math.prod(self.tensor_shapes[name])
        return 0 if kind is None else num_values // kind.block_size * kind.block_bytes


def quantization_method(config: Mapping[str, Any]) -> str | None:
    """The method that a config names, if it is one that is read here."""
    settings = config.get("quantization_config")
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    return method if method in METHODS else None


def read_scheme(config: Mapping[str, Any], path: Path) -> Scheme:
    """From `quantization_config`. Raises `CheckpointError` for what cannot be read."""
    settings = config["quantization_config"]
    method = settings["quant_method"]
    readers = {
        "gptq": _gptq_scheme,
        "awq": _awq_scheme,
        "compressed-tensors": _compressed_scheme,
        "fp8": _fp8_scheme,
    }
    try:
        scheme = readers[method](settings)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: quantization_config of config.json cannot be understood ({error!r})."
        ) from error
    if scheme.bits not in (4, 8):
        raise CheckpointError(
            f"{path}: weights of {scheme.bits} bits ({method}) are not supported; 4 and 8 are."
        )
    return scheme


def _gptq_scheme(settings: Mapping[str, Any]) -> Scheme:
    if settings.get("dynamic"):
        raise ValueError("layers with settings of their own (dynamic) are not supported")
    is_second = settings.get("checkpoint_format", "gptq") == "gptq_v2"
    return Scheme(
        method="gptq",
        bits=int(settings["bits"]),
        group_size=int(settings["group_size"]),
        is_symmetric=bool(settings.get("sym", True)),
        reorders=bool(settings.get("desc_act", False)) and int(settings["group_size"]) != -1,
        zero_offset=0 if is_second else 1,
    )


def _awq_scheme(settings: Mapping[str, Any]) -> Scheme:
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm":
        raise ValueError(f"version {version!r} is not supported; gemm is")
    return Scheme(
        method="awq",
        bits=int(settings["bits"]),
        group_size=int(settings["group_size"]),
        is_symmetric=not settings.get("zero_point", True),
    )


def _compressed_scheme(settings: Mapping[str, Any]) -> Scheme:
    groups = list(settings["config_groups"].values())
    kinds = {
        (w["num_bits"], w["type"], w.get("symmetric", True), w.get("group_size"))
        for w in (group["weights"] for group in groups)
    }
    if len(kinds) != 1:
        raise ValueError("groups of layers with different weights are not supported")
    ((bits, _, symmetric, group_size),) = kinds
    shape = groups[0]["weights"].get("block_structure") or (128, 128)
    return Scheme(
        method="compressed-tensors",
        bits=int(bits),
        group_size=int(group_size or -1),
        is_symmetric=bool(symmetric),
        reorders=groups[0]["weights"].get("actorder") in ("group", True),
        block_shape=(int(shape[0]), int(shape[1])),
    )


def _fp8_scheme(settings: Mapping[str, Any]) -> Scheme:
    rows, columns = settings.get("weight_block_size") or (128, 128)
    return Scheme("fp8", 8, -1, True, block_shape=(int(rows), int(columns)))


def _find(files: HFDirectory, scheme: Scheme) -> Iterator[Packed]:
    """Every matrix that is in several tensors."""
    shapes, formats = files.tensor_shapes, files.tensor_formats
    for name, shape in shapes.items():
        module, _, part = name.rpartition(".")
        if part == "qweight" and scheme.method in ("gptq", "awq"):
            yield _from_qweight(module, shape, scheme, shapes)
        elif part == "weight_packed":
            yield _from_weight_packed(module, shape, scheme, shapes)
        elif part == "weight" and formats[name] in ("I8", "F8_E4M3"):
            yield _from_bytes(module, shape, formats[name], shapes)


def _from_qweight(
    module: str, shape: tuple[int, ...], scheme: Scheme, shapes: Mapping[str, tuple[int, ...]]
) -> Packed:
    per_word = 32 // scheme.bits
    if scheme.method == "gptq":
        size = (shape[1], shape[0] * per_word)
    else:
        size = (shape[1] * per_word, shape[0])
    wanted = ("qweight", "scales", "qzeros", "g_idx")
    parts = tuple(part for part in wanted if f"{module}.{part}" in shapes)
    return Packed(module, scheme.method, parts, size, _block_type(scheme, size[1]))


def _from_weight_packed(
    module: str, shape: tuple[int, ...], scheme: Scheme, shapes: Mapping[str, tuple[int, ...]]
) -> Packed:
    size = (shape[0], shape[1] * (32 // scheme.bits))
    wanted = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")
    parts = tuple(part for part in wanted if f"{module}.{part}" in shapes)
    return Packed(module, "packed", parts, size, _block_type(scheme, size[1]))


def _from_bytes(
    module: str, shape: tuple[int, ...], format_: str, shapes: Mapping[str, tuple[int, ...]]
) -> Packed:
    wanted = ("weight", "weight_scale", "weight_scale_inv", "weight_zero_point")
    parts = tuple(part for part in wanted if f"{module}.{part}" in shapes)
    rows, columns = shape
    kind = "int8" if format_ == "I8" else "float8"
    block_type = "F32" if columns % BLOCK_VALUES else "Q8_0"
    return Packed(module, kind, parts, (rows, columns), block_type)


def _block_type(scheme: Scheme, columns: int) -> str:
    """Four bits where a block of 32 has one scale and zero, else eight."""
    if columns % BLOCK_VALUES:
        return "F32"
    in_blocks = scheme.group_size == -1 or scheme.group_size % BLOCK_VALUES == 0
    if scheme.bits == 8 or scheme.reorders or not in_blocks:
        return "Q8_0"
    return "Q4_0" if scheme.is_symmetric else "Q4_1"
