"""What a layer wants from a checkpoint.

A layer that merges several tensors of a checkpoint into one parameter says so where it is defined;
the loader only matches names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol, runtime_checkable

import torch

from tokenmill.checkpoint.checkpoint import RawTensor
from tokenmill.quantization.dequantize import dequantize, plain_values


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """A place for one tensor of a checkpoint."""

    name: str
    """Hugging Face name of the tensor."""
    shape: tuple[int, ...]
    load: Callable[[RawTensor], None]
    """Puts the tensor there; its shape has been checked."""
    rows: range | None = None
    """Rows of the tensor that `load` reads; None reads all."""
    memory: Callable[[], Iterable[torch.Tensor]] = tuple
    """What `load` fills, each byte of it, once it has: what may be dropped and loaded again. A
    second `load` fills the same memory."""


@runtime_checkable
class HasWeights(Protocol):
    """A layer with weights of its own."""

    def weight_slots(self, prefix: str) -> Iterable[WeightSlot]:
        """Its slots; `prefix` is the module's own name in the tree, such as `model.norm`."""
        ...


def empty_parameter(*shape: int, dtype: torch.dtype) -> torch.nn.Parameter:
    """A parameter to be filled by the loader; needs no gradient."""
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def parameter_slot(name: str, parameter: torch.Tensor, offset: float = 0.0) -> WeightSlot:
    """A slot that is `parameter` (or a part of one), filled with plain values plus `offset`."""

    def load(raw: RawTensor) -> None:
        values = dequantize(raw, parameter.dtype)
        parameter.copy_(values + offset if offset else values)
        raw.release()

    return WeightSlot(name, tuple(parameter.shape), load, memory=lambda: (parameter,))


def transposed_slot(slot: WeightSlot) -> WeightSlot:
    """`slot` for a matrix that its checkpoint keeps as [in_features, out_features]."""

    def load(raw: RawTensor) -> None:
        slot.load(plain_raw(plain_values(raw).t()))

    return replace(slot, shape=slot.shape[::-1], load=load)


def flattened_slot(slot: WeightSlot, shape: tuple[int, ...]) -> WeightSlot:
    """`slot` for a matrix that its checkpoint keeps as `shape`, with several dimensions for its
    columns: a convolution whose steps are as long as its window.
    """
    assert slot.shape == (shape[0], prod(shape[1:]))

    def load(raw: RawTensor) -> None:
        slot.load(replace(raw, shape=slot.shape))

    return replace(slot, shape=shape, load=load)


_FORMATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
PLAIN_FORMATS = frozenset(_FORMATS.values())
"""Of tensors that hold their values as they are."""


def plain_raw(values: torch.Tensor) -> RawTensor:
    """Values of a plain type as a checkpoint would hold them."""
    data = values.contiguous().view(-1).view(torch.uint8)
    return RawTensor(tuple(values.shape), _FORMATS[values.dtype], data)
