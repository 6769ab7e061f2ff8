"""From a checkpoint to a draft head whose weights are in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tokenmill.checkpoint.hf_directory import HFDirectory
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.config.draft_head import canonical_name, without_weights
from tokenmill.errors import CheckpointError
from tokenmill.layers.kernels import LayerKernels
from tokenmill.models.base import CausalLM
from tokenmill.models.draft_head import DraftHead, Eagle3Head, EagleHead, HeadSettings
from tokenmill.models.loader import check_names_and_shapes, fill, weight_slots

_KINDS: dict[str, type[DraftHead]] = {"eagle": EagleHead, "eagle3": Eagle3Head}


def load_draft_head(
    method: str,
    path: str,
    hf_config: Mapping[str, Any],
    target: CausalLM,
    *,
    dtype: torch.dtype,
    kernels: LayerKernels,
    max_model_len: int,
    max_num_tokens: int,
) -> DraftHead:
    """Build the head of a method (`eagle`, `eagle3`) and fill it; `hf_config` is as `head_config`
    makes it.

    Raises `CheckpointError` for files in another format, and as `load_model` does for tensors that
    do not fit.
    """
    checkpoint = open_checkpoint(Path(path))
    if not isinstance(checkpoint, HFDirectory):
        raise CheckpointError(
            f"{path}: a draft head is read from safetensors as it was published, not from"
            f" {type(checkpoint).__name__}; speculative_config.quantization makes it smaller."
        )
    names = {canonical_name(name): name for name in checkpoint.tensor_shapes}
    others = without_weights(method)
    head = _KINDS[method](
        HeadSettings(
            hf_config=hf_config,
            shapes={
                here: checkpoint.tensor_shapes[name]
                for here, name in names.items()
                if here not in others
            },
            target=target,
            dtype=dtype,
            kernels=kernels,
            max_model_len=max_model_len,
            max_num_tokens=max_num_tokens,
        )
    )
    slots = [replace(slot, name=names.get(slot.name, slot.name)) for slot in weight_slots(head)]
    check_names_and_shapes(slots, checkpoint, {names[here] for here in others if here in names})
    fill(slots, checkpoint, lambda done, total: None)
    head.target_ids = _target_ids(head, checkpoint, names)
    return head.eval()


def _target_ids(
    head: DraftHead, checkpoint: HFDirectory, names: Mapping[str, str]
) -> torch.Tensor | None:
    """The model's ids of the head's tokens, int64 [own vocabulary]; None if they are the same."""
    own_size = head.lm_head.vocab_size if hasattr(head, "lm_head") else head.vocab_size
    if "d2t" not in names:
        if own_size == head.vocab_size:
            return None
        raise CheckpointError(
            f"{checkpoint.path}: the head knows {own_size} of {head.vocab_size} tokens, but no"
            f" tensor d2t says which."
        )
    distances = checkpoint.tensor(names["d2t"])
    is_integer = not (distances.is_floating_point() or distances.dtype == torch.bool)
    if tuple(distances.shape) != (own_size,) or not is_integer:
        raise CheckpointError(
            f"{checkpoint.path}: d2t is {distances.dtype} {tuple(distances.shape)}, but must be"
            f" integers ({own_size},): a distance for each token of the head."
        )
    target_ids = torch.arange(own_size) + distances.long()
    if not ((target_ids >= 0) & (target_ids < head.vocab_size)).all():
        raise CheckpointError(
            f"{checkpoint.path}: d2t leads to tokens outside of 0 to {head.vocab_size - 1}."
        )
    return target_ids
