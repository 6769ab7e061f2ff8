"""How the GGUF files of one model family read as a Hugging Face directory.

A family is one `GGUFArchitecture`: a function for its configuration and tables for its tensor
names. To add a family, write them (gguf_families.py has the patterns) and add a line to
`ARCHITECTURES` in gguf_checkpoint.py.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tokenmill.checkpoint.gguf_reader import GGUFHeader
from tokenmill.errors import CheckpointError

_BLOCK_TENSOR = re.compile(r"blk\.([0-9]+)\.([a-z0-9_]+)\.(weight|bias)")


class Parameters:
    """The metadata of one architecture, read by the part of the key behind `llama.` or the like.

    Every getter raises `CheckpointError` naming file, key and value if the value is missing or not
    of the kind asked for.
    """

    def __init__(
        self, header: GGUFHeader, content: Callable[[str], mmap.mmap | bytes], prefix: str
    ) -> None:
        """`content` gives the content of the file that a tensor lies in."""
        self.tensors = header.tensors
        self._header = header
        self._content = content
        self._prefix = prefix

    def keys(self, start: str) -> set[str]:
        """Every key that begins with `start`, without the architecture's prefix."""
        full, cut = f"{self._prefix}.{start}", len(self._prefix) + 1
        return {key[cut:] for key in self._header.metadata if key.startswith(full)}

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self._get(key, default)
        if type(value) is not int or value < minimum:
            self.fail(key, f"is {value!r:.80}; it must be a whole number of at least {minimum}")
        return value

    def positive_float(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            self.fail(key, f"is {value!r:.80}; it must be a number above 0")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            self.fail(key, f"is {value!r:.80}; it must be a string")
        return value

    def float_vector(self, name: str, length: int) -> list[float]:
        """The values of a tensor that belongs to the configuration: F32 [length]."""
        tensor = self.tensors[name]
        if tensor.type.name != "F32" or tensor.shape != (length,):
            raise CheckpointError(
                f"{self._header.path}: tensor {name!r} has type {tensor.type.name} and shape"
                f" {tensor.shape}; it must have type F32 and shape {(length,)}."
            )
        return list(struct.unpack_from(f"<{length}f", self._content(name), tensor.offset))

    def fail(self, key: str, problem: str) -> NoReturn:
        raise CheckpointError(
            f"{self._header.path}: metadata key '{self._prefix}.{key}' {problem}."
        )

    def _get(self, key: str, default: Any) -> Any:
        value = self._header.metadata.get(f"{self._prefix}.{key}", default)
        if value is None:
            self.fail(key, "is missing")
        return value


@dataclass(frozen=True, slots=True)
class GGUFArchitecture:
    """One model family: configuration, tensor names, and what llama.cpp did to its rows."""

    build_config: Callable[[Parameters], dict[str, Any]]
    """The config.json of the model, without the ids of special tokens."""
    global_tensors: Mapping[str, str]
    """GGUF name -> Hugging Face name of tensors outside the layers."""
    block_tensors: Mapping[str, str]
    """`attn_q` of `blk.3.attn_q.weight` -> `self_attn.q_proj` of `model.layers.3....`."""
    renamed_tensors: Mapping[str, str] = field(default_factory=dict)
    """As `block_tensors`, of names with their ending: `attn_sinks.weight` -> `self_attn.sinks`."""
    expert_tensors: Mapping[str, str] = field(default_factory=dict)
    """Block tensor of all experts, one behind another -> the name of one, with {} for its number.
    """
    permuted_heads: Mapping[str, str] = field(default_factory=dict)
    """Block tensor whose rows are interleaved by head -> the config key that counts its heads."""
    consumed_tensors: frozenset[str] = frozenset()
    """Tensors that are not weights: `build_config` has read them, or nothing needs them."""
    norm_offset: float = 0.0
    """What was added to every norm's weight."""

    def hf_name(self, name: str) -> str:
        """The Hugging Face name of a GGUF tensor; a name nobody knows stays as it is."""
        match = _BLOCK_TENSOR.fullmatch(name)
        if match is None:
            return self.global_tensors.get(name, name)
        layer, part, ending = match.groups()
        renamed = self.renamed_tensors.get(f"{part}.{ending}")
        if renamed is not None:
            return f"model.layers.{layer}.{renamed}"
        if part in self.block_tensors:
            return f"model.layers.{layer}.{self.block_tensors[part]}.{ending}"
        return name

    def expert_name(self, name: str) -> str | None:
        """The Hugging Face name of an expert's part of a GGUF tensor, with {} for its number; None
        for a tensor of something else.
        """
        match = _BLOCK_TENSOR.fullmatch(name)
        if match is None or match[2] not in self.expert_tensors or match[3] != "weight":
            return None
        return f"model.layers.{match[1]}.{self.expert_tensors[match[2]]}.weight"

    def head_permutation(self, name: str, config: Mapping[str, Any]) -> int | None:
        """Number of heads whose rows are interleaved in the GGUF tensor `name`, or None."""
        match = _BLOCK_TENSOR.fullmatch(name)
        if match and match[2] in self.permuted_heads:
            return int(config[self.permuted_heads[match[2]]])
        return None

    def value_offset(self, name: str) -> float:
        """What was added to the values of the GGUF tensor `name`."""
        return self.norm_offset if name.endswith("norm.weight") else 0.0
