"""From a checkpoint to a model of the library whose weights are in place."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tokenmill.checkpoint.checkpoint import Checkpoint
from tokenmill.config.engine_config import ModelConfig
from tokenmill.errors import ConfigError
from tokenmill.layers.kernels import LayerKernels, layer_kernels
from tokenmill.layers.weights import HasWeights, WeightSlot, empty_parameter, parameter_slot
from tokenmill.models import loader
from tokenmill.models.pooling import SCORE, add_head
from tokenmill.models.transformers_backend.checkpoint import NamedCheckpoint
from tokenmill.models.transformers_backend.experts import (
    IMPLEMENTATION,
    PACKED,
    PackedExperts,
    pack_experts,
)
from tokenmill.models.transformers_backend.interface import register
from tokenmill.models.transformers_backend.layers import ReadsWeight, Swapper, kind_of
from tokenmill.models.transformers_backend.library import (
    LibraryModel,
    library_model,
)
from tokenmill.models.transformers_backend.model import TransformersForCausalLM
from tokenmill.models.transformers_backend.probe import (
    check_rows_are_their_own,
    find_attention,
)

logger = logging.getLogger(__name__)

_SCORES = (f"{SCORE}.weight",)


@dataclass(frozen=True, slots=True)
class _Built:
    """A model without weights."""

    model: TransformersForCausalLM
    slots: list[WeightSlot]
    optional: frozenset[str]
    """Tensors that the library has computed; a checkpoint may have them."""


def load(
    model_config: ModelConfig,
    checkpoint: Checkpoint,
    on_progress: loader.Progress,
    kernels: LayerKernels | None,
) -> TransformersForCausalLM:
    """As `loader.load_model`, for a model that runs on the library's code.

    Raises `ConfigError` for what cannot run so, before a weight is read, and `CheckpointError`.
    """
    dtype = getattr(torch, model_config.dtype)
    kernels = kernels or layer_kernels(dtype)
    if kernels.device.type != "cpu":
        raise ConfigError(
            f"{model_config.architecture} runs through transformers (model_impl), and that has no"
            f" path on a GPU yet: torch's functions would not give the same bits in every batch."
            f" Run this model with device='cpu'."
        )
    found = library_model(model_config.hf_config)
    skeleton = build_skeleton(found, dtype)
    named = NamedCheckpoint(checkpoint, skeleton)
    names = vocabulary_names(skeleton)
    is_tied = model_config.pooling is not None or loader.has_tied_head(
        bool(getattr(found.config, "tie_word_embeddings", False)), named, *names
    )
    built = _build(found, skeleton, dtype, model_config.max_model_len, kernels, is_tied=is_tied)
    slots = [
        slot
        for slot in _by_expert(built, named)
        if slot.name not in built.optional or slot.name in named.tensor_shapes
    ]
    if model_config.pooling is not None:
        add_head(built.model, found.config.hidden_size, len(model_config.pooling.labels))
        slots += [slot for slot in loader.weight_slots(built.model) if slot.name in _SCORES]
    loader.check_names_and_shapes(slots, named, {names[0]} if is_tied else set())
    loader.fill(slots, named, on_progress)
    model = built.model.eval()
    _check_rows(found, model, model_config)
    return model


def tensor_shapes(hf_config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """As `loader.tensor_shapes`: under the names of the library's modules."""
    found = library_model(hf_config)
    skeleton = build_skeleton(found, torch.float32)
    is_tied = bool(getattr(found.config, "tie_word_embeddings", False))
    with loader.EmptyTensorsOnMeta():
        built = _build(
            found, skeleton, torch.float32, 8, layer_kernels(torch.float32), is_tied=is_tied
        )
    return {slot.name: slot.shape for slot in built.slots if slot.name not in built.optional}


def build_skeleton(found: LibraryModel, dtype: torch.dtype) -> Any:
    """The library's model as it makes it; parameters that weights go into take no memory."""
    register()
    try:
        with loader.EmptyTensorsOnMeta():
            model = found.cls._from_config(
                found.config,
                dtype=dtype,
                attn_implementation=IMPLEMENTATION,
                experts_implementation=IMPLEMENTATION,
            )
    except KeyError as error:
        raise found.refuse(
            "its attention does not go through the library's attention interface"
        ) from error
    except (ValueError, ImportError, NotImplementedError) as error:
        raise found.refuse(f"transformers does not make it ({error})") from error
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        raise found.refuse("it has no token embedding and no linear head over the vocabulary")
    model.requires_grad_(False)
    return model.eval()


def vocabulary_names(skeleton: Any) -> tuple[str, str]:
    """Names of the weights of head and embedding."""
    names = {id(module): name for name, module in skeleton.named_modules()}
    parts = (skeleton.get_output_embeddings(), skeleton.get_input_embeddings())
    head, embedding = (f"{names[id(part)]}.weight" for part in parts)
    return head, embedding


def _build(
    found: LibraryModel,
    skeleton: Any,
    dtype: torch.dtype,
    max_model_len: int,
    kernels: LayerKernels,
    *,
    is_tied: bool,
    kept: frozenset[str] = frozenset(),
) -> _Built:
    """Our layers in the skeleton's places, but for linear layers of the kinds `kept`."""
    computed = {name for name, tensor in skeleton.state_dict().items() if not tensor.is_meta} - {
        name for name, _ in skeleton.named_parameters()
    }
    if not pack_experts(skeleton, dtype, kernels):
        skeleton.set_experts_implementation("eager")
    swapper = Swapper(
        skeleton,
        dtype=dtype,
        max_model_len=max_model_len,
        kernels=kernels,
        is_tied=is_tied,
        kept=kept,
    )
    swapper.swap()
    model = TransformersForCausalLM(found, skeleton)

    def run(num_tokens: int) -> torch.Tensor:
        ids = torch.arange(num_tokens, dtype=torch.int32)
        hidden_states = model.forward(ids, torch.arange(num_tokens))
        assert isinstance(hidden_states, torch.Tensor)
        return model.compute_logits(hidden_states)

    try:
        find_attention(found, skeleton, run, dtype)
    except ReadsWeight as reads:
        names = {module: name for name, module in skeleton.named_modules()}
        kept |= {kind_of(names[reads.layer])}
        fresh = build_skeleton(found, dtype)
        return _build(found, fresh, dtype, max_model_len, kernels, is_tied=is_tied, kept=kept)
    _allocate(skeleton, swapper.float32_names)
    return _Built(model, list(_slots(skeleton)), frozenset(computed))


def _allocate(skeleton: nn.Module, float32_names: tuple[str, ...]) -> None:
    """Give memory to the parameters that are still the library's."""
    for prefix, module in skeleton.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full_name = f"{prefix}.{name}"
            is_float32 = any(part in full_name for part in float32_names)
            dtype = torch.float32 if is_float32 else parameter.dtype
            if parameter.is_meta or dtype != parameter.dtype:
                module._parameters[name] = empty_parameter(*parameter.shape, dtype=dtype)


def _slots(skeleton: nn.Module) -> Iterator[WeightSlot]:
    """Where weights go: into our layers, and into what is left of the library's tensors."""
    tensors = skeleton.state_dict(keep_vars=True)
    ours: list[str] = []
    for prefix, module in skeleton.named_modules():
        if isinstance(module, HasWeights):
            ours.append(f"{prefix}.")
            yield from module.weight_slots(prefix)
    for name, tensor in tensors.items():
        if not name.startswith(tuple(ours)):
            yield parameter_slot(name, tensor)


def _by_expert(built: _Built, named: NamedCheckpoint) -> Iterator[WeightSlot]:
    """The slots; those of all experts of a layer in parts, where the file has a tensor for each."""
    matrices = {
        f"{prefix.removesuffix(f'.{PACKED}')}.{name}": each
        for prefix, module in built.model.library.named_modules()
        if isinstance(module, PackedExperts)
        for name, each in zip(module.names, module.matrices, strict=True)
        if not each.is_transposed
    }
    for slot in built.slots:
        each = matrices.get(slot.name)
        own = None if each is None else named.stacked(slot.name, len(each.places))
        if each is None or own is None:
            yield slot
        else:
            yield from each.own_slots(own)


def _check_rows(
    found: LibraryModel, model: TransformersForCausalLM, model_config: ModelConfig
) -> None:
    def run(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden_states = model.forward(ids, positions)
        assert isinstance(hidden_states, torch.Tensor)
        return hidden_states

    longest = min(model_config.max_model_len, 512)
    if not check_rows_are_their_own(found, run, model_config.vocab_size, longest):
        logger.warning(
            "%s through transformers: the last bits of a token's results depend on the batch that"
            " it is computed in, since one of the library's modules computes so. Texts may differ"
            " with load.",
            found.architecture,
        )
