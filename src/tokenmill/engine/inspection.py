"""What a model is and what it needs, from its headers alone: no weight is read, and torch is loaded
only by transformers, if it has the model's code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from tokenmill.checkpoint.checkpoint import Checkpoint
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.machine import Machine
from tokenmill.config.parameters import ModelParameters, read_parameters
from tokenmill.config.resolve import apply_overrides, resolve
from tokenmill.engine.build import Progress, find_machine, open_model, settle_implementation
from tokenmill.errors import ConfigError
from tokenmill.models.registry import NATIVE, TRANSFORMERS

SHORTEST_CONTEXT = 1024
CONTEXT_STEP = 4
_ENOUGH = 1 << 60
"""Bytes; more than any model needs."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Memory for one request of some length, in bytes, by arithmetic."""

    context: int
    """Tokens, prompt and output."""
    kv_cache: int
    total: int
    """With weights, the buffers of a step and the process's own."""
    fits: bool
    """Whether that much is available now."""


@dataclass(frozen=True, slots=True)
class ModelReport:
    """What `tokenmill inspect` prints."""

    model: str
    path: str
    parameters: ModelParameters
    is_supported: bool
    """Whether there is code for its architecture."""
    implementation: str
    """Whose code it runs on: `tokenmill` (a native family) or `transformers`; empty if nobody's."""
    why_not: str
    """Why it is not supported; empty if it is."""
    num_parameters: int
    formats: dict[str, int]
    """Format of tensors, as in the file -> parameters in it, most first."""
    file_bytes: int
    """Bytes of all tensors as they lie in the files."""
    weight_bytes: int
    """Bytes of the weights as the engine holds them."""
    available_bytes: int
    dtype: str
    kernels: str
    kv_dtype: str
    """Of the KV cache."""
    needs: list[MemoryNeed]


def inspect_model(args: EngineArgs, on_progress: Progress) -> ModelReport:
    """Look at the model that `args` name.

    Raises `ModelNotFoundError`, `CheckpointError` and `ConfigError` as an engine would.
    """
    checkpoint = open_model(args, on_progress)
    try:
        return _report(args, checkpoint, find_machine(args))
    finally:
        checkpoint.close()


def _report(args: EngineArgs, checkpoint: Checkpoint, machine: Machine) -> ModelReport:
    formats: Counter[str] = Counter()
    for name, shape in checkpoint.tensor_shapes.items():
        formats[checkpoint.tensor_formats[name]] += prod(shape)
    accelerator = machine.accelerator
    implementation, config_json, why_not = _implementation(args, checkpoint.config)
    parameters = read_parameters(apply_overrides(config_json, args.hf_overrides))
    roomy = replace(
        machine,
        available_memory=_ENOUGH,
        accelerator=accelerator and replace(accelerator, available_memory=_ENOUGH),
    )
    needs, weights, dtype, kernels, kv_dtype, available = [], 0, "", "", "", 0
    for context in _contexts(parameters.max_context):
        one = replace(args, max_num_seqs=1, max_model_len=context, num_kv_blocks=None)
        config = resolve(
            one,
            path=str(checkpoint.path),
            config=config_json,
            tensor_shapes=checkpoint.tensor_shapes,
            tensor_formats=checkpoint.tensor_formats,
            machine=roomy,
            implementation=implementation or NATIVE,
        )
        dtype, kernels, weights = config.model.dtype, config.kernels, config.ledger.weights
        kv_dtype = config.cache.dtype
        available = (
            machine.available_memory
            if config.device == "cpu" or accelerator is None
            else accelerator.available_memory
        )
        total = config.ledger.available - config.ledger.left
        needs.append(MemoryNeed(context, config.ledger.kv_pool, total, total <= available))
    return ModelReport(
        model=args.model,
        path=str(checkpoint.path),
        parameters=parameters,
        is_supported=bool(implementation),
        implementation=implementation,
        why_not=why_not,
        num_parameters=formats.total(),
        formats=dict(formats.most_common()),
        file_bytes=checkpoint.num_bytes,
        weight_bytes=weights,
        available_bytes=available,
        dtype=dtype,
        kernels=kernels,
        kv_dtype=kv_dtype,
        needs=needs,
    )


def _implementation(
    args: EngineArgs, config: Mapping[str, Any]
) -> tuple[str, Mapping[str, Any], str]:
    """Whose code runs the model, its config with all sizes, and why nobody's does."""
    try:
        implementation, completed = settle_implementation(args, config)
        if implementation == TRANSFORMERS:  # whose own refusals need no weights
            from tokenmill.models.transformers_backend.library import library_model

            library_model(completed)
    except ConfigError as error:
        return "", config, str(error)
    return implementation, completed, ""


def _contexts(longest: int) -> Iterator[int]:
    """Lengths up to the model's own."""
    length = SHORTEST_CONTEXT
    while length < longest:
        yield length
        length *= CONTEXT_STEP
    yield longest
