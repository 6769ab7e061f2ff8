"""Other weights for a model that is built, in the memory of those that it has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import nn

from tokenmill.checkpoint.checkpoint import Checkpoint
from tokenmill.config.engine_config import ModelConfig
from tokenmill.contracts.operations import Tensors
from tokenmill.errors import CheckpointError, InvalidRequestError
from tokenmill.layers.state_space import state_layers
from tokenmill.layers.weights import PLAIN_FORMATS, WeightSlot, plain_raw
from tokenmill.models.base import CausalLM
from tokenmill.models.loader import (
    DERIVED_SUFFIXES,
    HEAD,
    MAX_LISTED,
    check_names_and_shapes,
    fill,
    has_tied_head,
    weight_slots,
)
from tokenmill.models.registry import get_model_class


class Refill:
    """Fills a native model again. Addresses stay, so what was recorded of the model is still so."""

    def __init__(
        self, model: CausalLM, model_config: ModelConfig, formats: Mapping[str, str]
    ) -> None:
        """`formats` are those of the tensors that the model was filled with, by name."""
        assert isinstance(model, nn.Module)
        self._model = model
        self._family = get_model_class(model_config.architecture)
        self._architecture = model_config.architecture
        self._reads_head = model_config.pooling is None
        left_out = self._left_out(formats)
        self._formats = {_full(name, left_out): each for name, each in formats.items()}

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise `CheckpointError` unless the model has a place for each tensor and a tensor for
        each place, and `InvalidRequestError` for tensors of another format than those before.
        """
        slots, names = self._slots(checkpoint), checkpoint.tensor_shapes
        check_names_and_shapes(slots, checkpoint, self._unread(names))
        left_out = self._left_out(names)
        if (
            self._is_tied
            and self._reads_head
            and not has_tied_head(
                True, checkpoint, HEAD, self._family.embedding_name.removeprefix(left_out)
            )
        ):
            raise InvalidRequestError(
                f"{checkpoint.path} has a head of its own, and the model was built with one that is"
                f" its embedding. Build another engine."
            )
        for slot in slots:
            now = checkpoint.tensor_formats[slot.name]
            before = self._formats[_full(slot.name, left_out)]
            if now != before and not {now, before} <= PLAIN_FORMATS:
                raise InvalidRequestError(
                    f"{checkpoint.path}: {slot.name} has format {now}, and the model was built with"
                    f" {before}. Convert the checkpoint, or build another engine."
                )

    def from_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Read all tensors of one that is checked. Raises `CheckpointError`."""
        fill(self._slots(checkpoint), checkpoint, lambda done, total: None)
        self._settle()

    @torch.inference_mode()
    def from_tensors(self, tensors: Tensors) -> None:
        """Put each tensor into its place as it comes.

        Raises `CheckpointError` for one that has no place, comes twice, is of a wrong shape or type
        or does not come at all.
        """
        slots = {slot.name: slot for slot in weight_slots(self._model)}
        missing = dict.fromkeys(slots)
        tied: list[torch.Tensor] = []
        for given, tensor in tensors:
            if self._is_tied and given in (HEAD, self._family.embedding_name):
                tied.append(tensor)
            name = given if given in slots else self._family.optional_prefix + given
            if name not in slots and (
                given in self._unread([given]) or given.endswith(DERIVED_SUFFIXES)
            ):
                continue
            if name not in missing:
                what = "comes twice" if name in slots else f"is none of {self._architecture}'s"
                raise CheckpointError(f"The tensor {given!r} {what}.")
            _put(slots[name], tensor, self._formats[name])
            del missing[name]
        if missing:
            more = f", and {len(missing) - MAX_LISTED} more" if len(missing) > MAX_LISTED else ""
            names = ", ".join(list(missing)[:MAX_LISTED])
            raise CheckpointError(f"{len(missing)} tensors did not come: {names}{more}.")
        if len(tied) > 1 and self._reads_head and not torch.equal(*tied):
            raise CheckpointError(
                f"{HEAD} differs from the embedding, and the model was built without a head of its"
                f" own. Build another engine."
            )
        self._settle()

    def memory(self) -> Iterable[torch.Tensor]:
        """What is filled, each byte of it."""
        for slot in weight_slots(self._model):
            yield from slot.memory()

    @property
    def _is_tied(self) -> bool:
        """Whether the head is the embedding, or there is none."""
        return all(slot.name != HEAD for slot in weight_slots(self._model))

    def _left_out(self, names: Iterable[str]) -> str:
        """What names of tensors begin with in the model, but not in a checkpoint with `names`."""
        prefix = self._family.optional_prefix
        return "" if any(name.startswith(prefix) for name in names) else prefix

    def _unread(self, names: Iterable[str]) -> set[str]:
        """Tensors that there may be, though the model does not read them."""
        beyond: tuple[str, ...] = getattr(self._model, "unused_prefixes", ())
        unread = {name for name in names if name.startswith(beyond)}
        unread |= getattr(self._family, "unused_tensors", frozenset())
        return unread | ({HEAD} if self._is_tied else set())

    def _slots(self, checkpoint: Checkpoint) -> list[WeightSlot]:
        """Under the names that the checkpoint has."""
        left_out = self._left_out(checkpoint.tensor_shapes)
        slots = weight_slots(self._model)
        return [replace(slot, name=slot.name.removeprefix(left_out)) for slot in slots]

    @torch.inference_mode()
    def _settle(self) -> None:
        for layer in state_layers(self._model).values():
            layer.refresh()


def _full(name: str, left_out: str) -> str:
    return name if name == HEAD else left_out + name


def _put(slot: WeightSlot, tensor: torch.Tensor, before: str) -> None:
    shape = tuple(tensor.shape)
    if shape != slot.shape:
        raise CheckpointError(f"The tensor {slot.name!r} has shape {shape}, not {slot.shape}.")
    if before not in PLAIN_FORMATS:
        raise CheckpointError(
            f"The tensor {slot.name!r} cannot take the place of one in format {before}."
        )
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise CheckpointError(
            f"The tensor {slot.name!r} has dtype {tensor.dtype}; it must be float32, float16 or"
            f" bfloat16."
        )
    slot.load(plain_raw(tensor.detach().cpu()))
