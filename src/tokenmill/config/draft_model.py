"""The model that drafts: whether it can for the other one, and what it takes of the memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.config.draft_head import is_head, resolve_head
from tokenmill.config.encoder import read_tensors
from tokenmill.config.engine_config import MemoryLedger
from tokenmill.config.kv_layout import KVLayout
from tokenmill.config.memory import StepShape, kv_bytes_per_token, workspace_bytes
from tokenmill.config.parallel import ParallelConfig
from tokenmill.config.parameters import ModelParameters, read_parameters
from tokenmill.config.quantization import held_weights
from tokenmill.config.ranks import check_divided, check_quantized_parts, model_share
from tokenmill.config.speculation import DraftModel, SpeculativeConfig
from tokenmill.errors import ConfigError

_ONE_PROCESS = ParallelConfig()
_RUN_BYTES = 2 * 9
"""Of a run of tokens in a table that is half full (`csrc/ngram_index.h`)."""


@dataclass(frozen=True, slots=True)
class DraftFiles:
    """What the headers of its files say."""

    path: str
    config: Mapping[str, Any]
    tensor_shapes: Mapping[str, tuple[int, ...]]
    tensor_formats: Mapping[str, str]


def resolve_draft(
    speculation: SpeculativeConfig | None,
    files: DraftFiles | None,
    target: ModelParameters,
    step: StepShape,
    dtype: str,
    kernels: str,
    parallel: ParallelConfig = _ONE_PROCESS,
) -> SpeculativeConfig | None:
    """The settings of speculation with the model or head that drafts, if one does; of several
    ranks, each has a part of it as of `target`.

    Raises `ConfigError` for a model that cannot draft for `target`.
    """
    if speculation is None or speculation.model is None:
        return speculation
    assert files is not None, "the model that drafts was not opened"
    if speculation.reads_hidden_states:
        return resolve_head(speculation, files, target, step, dtype=dtype, kernels=kernels)
    if is_head(files.tensor_shapes):
        raise ConfigError(
            f"speculative_config.model={speculation.model!r} is a draft head: set"
            f" speculative_config.method='eagle' or 'eagle3'."
        )
    parameters = read_parameters(files.config)
    check_draft(speculation.model, parameters, target)
    own, shapes = _share(speculation.model, files, parameters, parallel)
    device = "cuda" if kernels == "triton" else "cpu"
    shapes = read_tensors(shapes, files.config, takes_images=False)
    tensors = shapes, files.tensor_formats
    weights = held_weights(*tensors, speculation.quantization, device, dtype, kernels)
    check_quantized_parts(weights.quantization, own, parallel)
    draft = DraftModel(
        path=files.path,
        architecture=parameters.architecture,
        hf_config=files.config,
        dtype=dtype,
        quantization=weights.quantization,
        max_model_len=min(parameters.max_context, step.max_model_len),
        vocab_size=parameters.vocab_size,
        num_bytes=weights.num_bytes + workspace_bytes(own, replace(step, max_num_drafts=0)),
        kv_bytes_per_token=kv_bytes_per_token(own, dtype),
    )
    return replace(speculation, draft=draft)


def _share(
    name: str, files: DraftFiles, parameters: ModelParameters, parallel: ParallelConfig
) -> tuple[ModelParameters, Mapping[str, tuple[int, ...]]]:
    try:
        check_divided(files.config, parameters, parallel)
    except ConfigError as error:
        raise ConfigError(f"speculative_config.model={name!r}: {error}") from error
    return model_share(parallel, parameters, files.tensor_shapes)


def check_draft(name: str, draft: ModelParameters, target: ModelParameters) -> None:
    """Raise `ConfigError` if a model cannot draft for another."""
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"speculative_config.model={name!r} has a vocabulary of {draft.vocab_size} tokens, but"
            f" the model that it should draft for has {target.vocab_size}: its tokens mean"
            f" something else. Take a smaller model of the same family."
        )
    if draft.states is not None:
        raise ConfigError(
            f"speculative_config.model={name!r} has state-space layers, which cannot forget a"
            f" token that was drafted; take a model with attention only."
        )


def with_draft(
    ledger: MemoryLedger, speculation: SpeculativeConfig | None, step: StepShape
) -> MemoryLedger:
    """What is left beside the model that drafts, or beside the tables of lookups."""
    if speculation is None:
        return ledger
    if speculation.draft is not None:
        return replace(ledger, draft=speculation.draft.num_bytes)
    return replace(ledger, draft=lookup_bytes(speculation, step))


def lookup_bytes(speculation: SpeculativeConfig, step: StepShape) -> int:
    """Of the tables at their largest: every request has the full length."""
    if speculation.method == "suffix":
        return speculation.suffix_decoding_cache_bytes
    lengths = speculation.prompt_lookup_max - speculation.prompt_lookup_min + 1
    return _RUN_BYTES * lengths * step.max_num_seqs * step.max_model_len


def beside_draft(layout: KVLayout, speculation: SpeculativeConfig | None) -> KVLayout:
    """Blocks that hold the K and V of the model that drafts, too."""
    if speculation is None or speculation.draft is None:
        return layout
    return replace(layout, draft_bytes_per_token=speculation.draft.kv_bytes_per_token)
