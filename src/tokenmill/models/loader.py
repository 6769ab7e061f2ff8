"""From a checkpoint to a model whose weights are in place."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tokenmill.checkpoint.checkpoint import Checkpoint
from tokenmill.checkpoint.nested_config import has_vision_tower, is_of_tower
from tokenmill.checkpoint.read_ahead import ReadAhead
from tokenmill.config.engine_config import ModelConfig
from tokenmill.config.parameters import read_parameters
from tokenmill.config.pooling import CLASSIFIER, num_labels
from tokenmill.errors import CheckpointError
from tokenmill.layers.kernels import LayerKernels, layer_kernels
from tokenmill.layers.weights import HasWeights, WeightSlot
from tokenmill.models.base import CausalLM
from tokenmill.models.pooling import add_head
from tokenmill.models.registry import NATIVE, TRANSFORMERS, get_model_class
from tokenmill.observe.rate import rate
from tokenmill.quantization.dequantize import dequantize

logger = logging.getLogger(__name__)

HEAD = "lm_head.weight"
DERIVED_SUFFIXES = (".rotary_emb.inv_freq", ".position_ids", ".attn.bias", ".attn.masked_bias")
"""Tensors that old checkpoints hold although they follow from the config."""
MAX_LISTED = 8

Progress = Callable[[int, int], None]
"""Called with the bytes of the checkpoint done so far, and in total."""


def load_model(
    model_config: ModelConfig,
    checkpoint: Checkpoint,
    on_progress: Progress = lambda done, total: None,
    *,
    kernels: LayerKernels | None = None,
    layers: range | None = None,
) -> CausalLM:
    """Build the model and fill it, in evaluation mode and without gradients; of a family whose
    layers can be on several ranks, perhaps with some of them only.

    It lies on the device of its `kernels` (by default the best of the CPU). Memory holds the
    weights once, and parts of the files that are read ahead. Raises `CheckpointError` that lists
    every tensor which is missing, unexpected or of a wrong shape, and `ConfigError` for a config
    that the model's family cannot serve.
    """
    if model_config.implementation == TRANSFORMERS:
        from tokenmill.models.transformers_backend.load import load

        return load(model_config, checkpoint, on_progress, kernels)
    family = get_model_class(model_config.architecture)
    prefix = _left_out(family.optional_prefix, checkpoint)
    hf_config = {**family.config_defaults, **model_config.hf_config}
    pooling = model_config.pooling
    # A model that pools reads no head: it counts as tied.
    hf_config["tie_word_embeddings"] = pooling is not None or has_tied_head(
        bool(hf_config.get("tie_word_embeddings", False)),
        checkpoint,
        HEAD,
        family.embedding_name.removeprefix(prefix),
    )
    dtype = getattr(torch, model_config.dtype)
    kernels = kernels or layer_kernels(dtype)
    with kernels.device:
        model = family(
            hf_config,
            dtype=dtype,
            max_model_len=model_config.max_model_len,
            kernels=kernels,
            **_of_some_families(model_config, layers),
        )
    assert isinstance(model, nn.Module)
    sizes = read_parameters(hf_config)
    if pooling is not None and (layers is None or layers.stop == sizes.num_layers):
        add_head(model, sizes.hidden_size, len(pooling.labels))
    slots = _own_slots(model, prefix, layers)
    skipped = {HEAD} if hf_config["tie_word_embeddings"] else set()
    skipped |= getattr(family, "unused_tensors", frozenset())
    if layers is not None:
        whole = outline(model_config, kernels)
        assert isinstance(whole, nn.Module)
        skipped |= {slot.name.removeprefix(prefix) for slot in weight_slots(whole)}
    beyond: tuple[str, ...] = getattr(model, "unused_prefixes", ())
    skipped |= {name for name in checkpoint.tensor_shapes if name.startswith(beyond)}
    check_names_and_shapes(slots, checkpoint, skipped)
    fill(slots, checkpoint, on_progress)
    model.eval()
    return model


def _of_some_families(model_config: ModelConfig, layers: range | None) -> dict[str, Any]:
    """Arguments that families take whose layers can be on several ranks, or that have a tower."""
    settings: dict[str, Any] = {} if layers is None else {"layers": layers}
    if has_vision_tower(model_config.hf_config):
        settings["takes_images"] = model_config.takes_images
    return settings


def _own_slots(model: nn.Module, prefix: str, layers: range | None) -> list[WeightSlot]:
    """Without the tower's where it is not filled: images are encoded in the first stage."""
    slots = [replace(slot, name=slot.name.removeprefix(prefix)) for slot in weight_slots(model)]
    if layers is None or not layers.start:
        return slots
    return [slot for slot in slots if not is_of_tower(slot.name)]


def outline(model_config: ModelConfig, kernels: LayerKernels) -> CausalLM:
    """A native model with all its layers, but without memory for their weights."""
    family, pooling = get_model_class(model_config.architecture), model_config.pooling
    with EmptyTensorsOnMeta():
        model = family(
            {**family.config_defaults, **model_config.hf_config},
            dtype=getattr(torch, model_config.dtype),
            max_model_len=1,
            kernels=kernels,
        )
        assert isinstance(model, nn.Module)
        if pooling is not None:
            hidden_size = read_parameters(model_config.hf_config).hidden_size
            add_head(model, hidden_size, len(pooling.labels))
    return model


def tensor_shapes(
    hf_config: Mapping[str, Any], implementation: str = NATIVE
) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a model of this config reads; takes no memory for them.

    Raises `ConfigError` for a config that cannot be served.
    """
    if implementation == TRANSFORMERS:
        from tokenmill.models.transformers_backend import load

        return load.tensor_shapes(hf_config)
    with EmptyTensorsOnMeta():
        sizes = read_parameters(hf_config)
        model = get_model_class(sizes.architecture)(hf_config, dtype=torch.float32, max_model_len=1)
        assert isinstance(model, nn.Module)
        if sizes.architecture.endswith(CLASSIFIER):
            add_head(model, sizes.hidden_size, num_labels(hf_config))
    return {slot.name: slot.shape for slot in weight_slots(model)}


class EmptyTensorsOnMeta(TorchFunctionMode):
    """Gives tensors that are to be filled by the loader no memory.

    Only those: under `torch.device("meta")` what a model computes from its config would have no
    values, either.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty:
            kwargs = {**(kwargs or {}), "device": "meta"}
        return func(*args, **(kwargs or {}))


def weight_slots(model: nn.Module) -> list[WeightSlot]:
    """Every place for a tensor in our layers of `model`, by its names of modules."""
    return [
        slot
        for prefix, module in model.named_modules()
        if isinstance(module, HasWeights)
        for slot in module.weight_slots(prefix)
    ]


@torch.inference_mode()
def fill(slots: list[WeightSlot], checkpoint: Checkpoint, on_progress: Progress) -> None:
    """Read every slot's tensor into its place."""
    done, total = 0, checkpoint.num_bytes
    on_progress(done, total)
    begin = time.monotonic()
    rows = {slot.name: slot.rows for slot in slots if slot.rows is not None}
    with ReadAhead(checkpoint, [slot.name for slot in slots], rows) as ahead:
        for slot in slots:
            raw = ahead.read(slot.name)
            slot.load(raw)
            done += raw.data.numel()
            on_progress(done, total)
    on_progress(total, total)
    logger.info("loaded %s: %s", checkpoint.path, rate(total, time.monotonic() - begin))


def _left_out(prefix: str, checkpoint: Checkpoint) -> str:
    """`prefix` if no tensor has it, else nothing."""
    return "" if any(name.startswith(prefix) for name in checkpoint.tensor_shapes) else prefix


def has_tied_head(tied: bool, checkpoint: Checkpoint, head: str, embedding: str) -> bool:
    """Whether the head is the embedding; against `tied`, the config's word, the checkpoint is
    right. `head` and `embedding` are names of tensors.
    """
    if head not in checkpoint.tensor_shapes:
        if not tied:
            logger.warning(
                "The config has tie_word_embeddings=false, but the checkpoint has no %s;"
                " the embedding serves as head.",
                head,
            )
        return True
    if tied and not _same_values(checkpoint, head, embedding):
        logger.warning(
            "The config has tie_word_embeddings=true, but the checkpoint's %s differs from the"
            " embedding; it is kept as head.",
            head,
        )
        return False
    return tied


def _same_values(checkpoint: Checkpoint, *names: str) -> bool:
    shapes = [checkpoint.tensor_shapes.get(name) for name in names]
    if shapes[0] != shapes[1]:
        return False
    first, second = (checkpoint.read(name) for name in names)
    if first.format == second.format:
        return torch.equal(first.data, second.data)
    return torch.equal(dequantize(first, torch.float32), dequantize(second, torch.float32))


@dataclass(slots=True)
class _Faults:
    """What is wrong with a checkpoint, by kind."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)

    def raise_if_any(self, checkpoint: Checkpoint) -> None:
        kinds = [
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("of a wrong shape", self.misshapen),
        ]
        found = [f"{len(names)} {kind}: {_listed(names)}" for kind, names in kinds if names]
        if found:
            raise CheckpointError(
                f"The tensors of {checkpoint.path} do not fit its config. {'. '.join(found)}."
                f" The file may be incomplete, or its config may name another architecture."
            )


def _listed(names: list[str]) -> str:
    more = [f"and {len(names) - MAX_LISTED} more"] if len(names) > MAX_LISTED else []
    return ", ".join([*names[:MAX_LISTED], *more])


def check_names_and_shapes(
    slots: list[WeightSlot], checkpoint: Checkpoint, skipped: set[str]
) -> None:
    """Raise `CheckpointError` that lists every fault; `skipped` tensors may be there."""
    shapes = checkpoint.tensor_shapes
    wanted = {slot.name for slot in slots} | skipped
    faults = _Faults(
        unexpected=[
            name for name in shapes if name not in wanted and not name.endswith(DERIVED_SUFFIXES)
        ]
    )
    for slot in slots:
        if slot.name not in shapes:
            faults.missing.append(slot.name)
        elif tuple(shapes[slot.name]) != slot.shape:
            faults.misshapen.append(f"{slot.name} {shapes[slot.name]} for {slot.shape}")
    faults.raise_if_any(checkpoint)
