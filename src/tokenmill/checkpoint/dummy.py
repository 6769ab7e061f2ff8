"""A checkpoint without weights: random ones, for benchmarks and tests of a model's shapes.

One buffer of random values is drawn, and every matrix is a piece of it from a place that its name
decides. Nothing is drawn or scaled for each tensor, so 16 GB of weights cost no more than copying
them to where they are used.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.checkpoint.checkpoint import RawTensor, TokenizerData
from tokenmill.checkpoint.hf_directory import CONFIG, read_configs
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.errors import CheckpointError, did_you_mean

if TYPE_CHECKING:
    import torch

    from tokenmill.checkpoint.mapped_file import FileRange

STANDARD_DEVIATION = 0.02
"""Of all values but those of norms, as models are initialised for training: activations stay near
1 for hidden sizes up to tens of thousands."""
FORMAT = "BF16"
_VALUE_BYTES = 2
_MAX_BUFFER_VALUES = (64 << 20) - 1
"""Odd: the rows of a matrix that is larger than the buffer do not repeat, whatever their length."""
_SPARE_VALUES = 1 << 16
"""At least so many more than the largest tensor, so that tensors of its size differ."""
_SLAB_VALUES = 1 << 20
"""Drawn at once: as float32 they stay in the caches."""
_ALIGNMENT = 32
"""Values; pieces start at multiples of 64 bytes."""
_CODES, _EXPONENTS = "_blocks", "_scales"
"""Ends of the names of MXFP4 in tensors of its own, which are bytes."""
_EXPONENT = 120
"""Of all groups of MXFP4: random codes on it have about the deviation of the other values."""
_NUM_CODE_BYTES = (1 << 20) - 1


class DummyCheckpoint:
    """A model of a config, with random weights.

    A weight's values depend on its name, on `seed`, and on the size of the model's largest tensor.
    All are bfloat16: norms 1, everything else normally distributed around 0; but a config that asks
    for MXFP4 gets random codes.
    """

    def __init__(
        self,
        path: Path,
        *,
        config: Mapping[str, Any],
        generation_config: Mapping[str, Any],
        tokenizer_data: TokenizerData,
        tensor_shapes: Mapping[str, tuple[int, ...]],
        seed: int,
    ) -> None:
        self.path = path
        self.config = config
        self.generation_config = generation_config
        self.tokenizer_data = tokenizer_data
        self.tensor_shapes = tensor_shapes
        self.tensor_formats: Mapping[str, str] = {
            name: "U8" if name.endswith((_CODES, _EXPONENTS)) else FORMAT for name in tensor_shapes
        }
        self.num_bytes = sum(
            prod(shape) * (1 if self.tensor_formats[name] == "U8" else _VALUE_BYTES)
            for name, shape in tensor_shapes.items()
        )
        self._seed = seed

    def read(self, name: str) -> RawTensor:
        """The tensor of this name; its memory is shared with others, so it must not be written."""
        import torch

        shape = self.tensor_shapes.get(name)
        if shape is None:
            raise CheckpointError(
                f"{self.path}: there is no tensor {name!r}.{did_you_mean(name, self.tensor_shapes)}"
            )
        if name.endswith(_EXPONENTS):
            return RawTensor(shape, "U8", torch.full((prod(shape),), _EXPONENT, dtype=torch.uint8))
        if name.endswith(_CODES):
            return RawTensor(shape, "U8", self._code_piece(name, prod(shape)))
        if _is_norm(name):
            values = torch.ones(prod(shape), dtype=torch.bfloat16)
        else:
            values = self._piece(name, prod(shape))
        return RawTensor(shape, FORMAT, values.view(torch.uint8))

    def file_ranges(self, name: str) -> tuple[FileRange, ...]:
        """None: there is no file."""
        return ()

    def close(self) -> None:
        self.__dict__.pop("_buffer", None)

    @functools.cached_property
    def _buffer(self) -> torch.Tensor:
        """Random values, bfloat16 [n]."""
        import numpy as np
        import torch

        largest = max(map(prod, self.tensor_shapes.values()), default=0)
        buffer = torch.empty(min(largest + _SPARE_VALUES, _MAX_BUFFER_VALUES), dtype=torch.bfloat16)
        generator = np.random.Generator(np.random.SFC64(self._seed))
        for begin in range(0, len(buffer), _SLAB_VALUES):
            slab = buffer[begin : begin + _SLAB_VALUES]
            drawn = generator.standard_normal(len(slab), dtype=np.float32)
            slab.copy_(torch.from_numpy(drawn).mul_(STANDARD_DEVIATION))
        return buffer

    @functools.cached_property
    def _code_buffer(self) -> torch.Tensor:
        """Random bytes."""
        import numpy as np
        import torch

        drawn = np.random.Generator(np.random.SFC64(self._seed)).bytes(_NUM_CODE_BYTES)
        return torch.frombuffer(bytearray(drawn), dtype=torch.uint8)

    def _code_piece(self, name: str, num_bytes: int) -> torch.Tensor:
        begin = self._number(name) % _NUM_CODE_BYTES
        times = -(-(begin + num_bytes) // _NUM_CODE_BYTES)
        return self._code_buffer.repeat(times)[begin : begin + num_bytes]

    def _number(self, name: str) -> int:
        digest = hashlib.blake2b(f"{self._seed}:{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def _piece(self, name: str, num_values: int) -> torch.Tensor:
        """The values of a tensor, bfloat16 [num_values]: a view, unless the buffer is too short."""
        buffer, number = self._buffer, self._number(name)
        room = len(buffer) - num_values
        if room >= 0:
            begin = number % (room // _ALIGNMENT + 1) * _ALIGNMENT
            return buffer[begin : begin + num_values]
        begin = number % len(buffer)
        piece = buffer.new_empty(num_values)
        filled = 0
        while filled < num_values:
            part = buffer[begin : begin + num_values - filled]
            piece[filled : filled + len(part)] = part
            filled, begin = filled + len(part), 0
        return piece


def open_dummy(
    path: Path,
    *,
    tensor_shapes: Callable[[Mapping[str, Any]], Mapping[str, tuple[int, ...]]],
    seed: int,
) -> DummyCheckpoint:
    """A model of the config at `path`: a directory with a config.json, whatever else it holds, or
    whatever `open_checkpoint` opens.

    `tensor_shapes` tells the tensors of a config by name. Raises `CheckpointError` and
    `ModelNotFoundError` as `open_checkpoint` does.
    """
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    if (path / CONFIG).is_file():
        config, generation_config = read_configs(path)
        tokenizer_data = TokenizerData(directory=path)
    else:
        model = open_checkpoint(path)
        config, generation_config = model.config, model.generation_config
        tokenizer_data = model.tokenizer_data
        model.close()
    return DummyCheckpoint(
        path,
        config=config,
        generation_config=generation_config,
        tokenizer_data=tokenizer_data,
        tensor_shapes=tensor_shapes(config),
        seed=seed,
    )


def _is_norm(name: str) -> bool:
    """Whether this is the weight of a norm, by its name: `input_layernorm`, `q_norm`, `ln_f`."""
    return name.endswith(".weight") and any(
        mark in part for part in name.split(".")[-2:-1] for mark in ("norm", "ln_")
    )
