"""From settings to an engine. The only place that knows every part."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.checkpoint.checkpoint import TokenizerData
from tokenmill.checkpoint.dummy import open_dummy
from tokenmill.checkpoint.names import resolve_model
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.config.argument_types import one_of
from tokenmill.config.draft_model import DraftFiles
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.engine_config import EngineConfig, Reason
from tokenmill.config.lora import check_adapted_model
from tokenmill.config.machine import Machine, read_machine
from tokenmill.config.memory import render
from tokenmill.config.resolve import apply_overrides, resolve
from tokenmill.config.speculation import read_speculative_config
from tokenmill.contracts.seams import GrammarManager, NoGrammars
from tokenmill.core.build import build_scheduler
from tokenmill.engine.client import InProcessClient
from tokenmill.engine.collection import collection_postponed
from tokenmill.engine.core import EngineCore
from tokenmill.engine.generation_defaults import (
    default_sampling_params,
    end_token_ids,
    generation_config,
)
from tokenmill.engine.input_processor import InputProcessor
from tokenmill.engine.llm_engine import LLMEngine
from tokenmill.engine.output_processor import OutputProcessor
from tokenmill.engine.pooling_processor import PoolingProcessor
from tokenmill.engine.workers import start_workers
from tokenmill.errors import ConfigError
from tokenmill.features.multimodal.build import build_images
from tokenmill.kernels.accelerator import find_accelerator
from tokenmill.kernels.native import active_isa
from tokenmill.models.registry import NATIVE, choose_implementation
from tokenmill.sampling_params import SamplingParams
from tokenmill.structured_output.build import build_grammars
from tokenmill.tokenizer.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from tokenmill.checkpoint.checkpoint import Checkpoint
    from tokenmill.worker.ranks import GroupRanks
    from tokenmill.worker.worker import Worker

logger = logging.getLogger(__name__)

LOAD_FORMATS = ("auto", "dummy")

Progress = Callable[[str, int, int], None]
"""Called with a stage (`download`, `load`), bytes done, and bytes in all."""


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """What stands between users and a core."""

    config: EngineConfig
    tokenizer: Tokenizer | None
    default_params: SamplingParams
    input_processor: InputProcessor
    output_processor: OutputProcessor


@collection_postponed()
def build_engine(args: EngineArgs, on_progress: Progress | None = None) -> LLMEngine:
    """Find the model, settle the settings, load the weights, wire the parts.

    The tokenizer is built in a second thread while torch is imported and weights are read.
    """
    progress = on_progress or silent
    checkpoint = open_model(args, progress, without_torch=args.data_parallel_size > 1)
    if args.data_parallel_size > 1:
        return _build_replicas(args, checkpoint)
    with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as pool:
        loading_tokenizer = pool.submit(read_tokenizer, args, checkpoint)
        config = settle_config(args, checkpoint)
        core = _build_core(config, checkpoint, progress, args, loading_tokenizer.result)
        front_end = build_front_end(args, checkpoint, config, loading_tokenizer.result())
    return LLMEngine(front_end, InProcessClient(core))


def _build_replicas(args: EngineArgs, checkpoint: Checkpoint) -> LLMEngine:
    """An engine whose cores are in processes of their own. Raises `ConfigError` without what they
    talk over.
    """
    try:
        from tokenmill.engine.replica_client import ReplicasClient
    except ImportError as error:
        raise ConfigError(
            f"data_parallel_size={args.data_parallel_size} needs the packages of a server, and"
            f" {error.name} is missing: pip install 'tokenmill[serve]'."
        ) from error
    config = settle_config(args, checkpoint)
    client = ReplicasClient(args, config)
    try:
        front_end = build_front_end(args, checkpoint, config, read_tokenizer(args, checkpoint))
        client.wait_until_ready()
    except BaseException:
        client.shutdown()
        raise
    checkpoint.close()
    return LLMEngine(front_end, client)


def open_model(
    args: EngineArgs, on_progress: Progress, *, without_torch: bool = False
) -> Checkpoint:
    """Find the model, fetching it if need be, and open its files.

    `without_torch` keeps torch out of this process where a dummy model's shapes need it.
    """
    opener = _opener(args, without_torch=without_torch)
    path = resolve_model(
        args.model,
        args.revision,
        on_progress=lambda done, total: on_progress("download", done, total),
    )
    return opener(path)


def settle_config(
    args: EngineArgs, checkpoint: Checkpoint, machine: Machine | None = None
) -> EngineConfig:
    """Settings, model and machine (this one) to what the engine runs with; the choices are
    logged.
    """
    implementation, model_config = settle_implementation(args, checkpoint.config)
    config = resolve(
        args,
        path=str(checkpoint.path),
        config=model_config,
        tensor_shapes=checkpoint.tensor_shapes,
        tensor_formats=checkpoint.tensor_formats,
        machine=machine or find_machine(args),
        implementation=implementation,
        draft=_draft_files(args),
    )
    config = replace(config, model=replace(config.model, implementation=implementation))
    check_adapted_model(config)
    if implementation != NATIVE and args.model_impl == "auto":
        why = f"there is no native family for {config.model.architecture}"
        reasons = (*config.reasons, Reason("model_impl", implementation, why))
        config = replace(config, reasons=reasons)
    _log_choices(config)
    return config


def _draft_files(args: EngineArgs) -> DraftFiles | None:
    """The headers of the model that drafts, fetched if need be; None if none does.

    Raises `ConfigError` for settings that cannot work, and what opening it raises.
    """
    speculation = read_speculative_config(args)
    if speculation is None or speculation.model is None:
        return None
    checkpoint = open_checkpoint(resolve_model(speculation.model, speculation.revision))
    try:
        return DraftFiles(
            path=str(checkpoint.path),
            config=dict(checkpoint.config),
            tensor_shapes=dict(checkpoint.tensor_shapes),
            tensor_formats=dict(checkpoint.tensor_formats),
        )
    finally:
        checkpoint.close()


def settle_implementation(
    args: EngineArgs, config: Mapping[str, Any]
) -> tuple[str, Mapping[str, Any]]:
    """Whose code the model of a config.json runs on, and the config with all sizes.

    Raises `ConfigError` if there is no code for it.
    """
    overridden = apply_overrides(config, args.hf_overrides)
    architectures = overridden.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        return NATIVE, config  # which is refused where sizes are read
    implementation = choose_implementation(args.model_impl, str(architectures[0]))
    if implementation == NATIVE:
        return implementation, config
    from tokenmill.models.transformers_backend.library import completed

    return implementation, completed(overridden)


def find_machine(args: EngineArgs) -> Machine:
    """What a replica has to run on; GPUs are looked for unless the CPU was asked for."""
    machine = read_machine(isa=active_isa()).shared_by(max(args.data_parallel_size, 1))
    if args.device == "cpu":
        return machine
    found = find_accelerator()
    if isinstance(found, str):
        return replace(machine, no_accelerator=found)
    return replace(machine, accelerator=found)


def build_front_end(
    args: EngineArgs, checkpoint: Checkpoint, config: EngineConfig, tokenizer: Tokenizer | None
) -> FrontEnd:
    """All that needs no torch. Raises `ConfigError` for a generation config that cannot work."""
    generation = generation_config(args, checkpoint.generation_config)
    eos_token_ids = _end_token_ids(config, generation, tokenizer)
    return FrontEnd(
        config=config,
        tokenizer=tokenizer,
        default_params=default_sampling_params(generation),
        input_processor=_input_processor(config, tokenizer, eos_token_ids),
        output_processor=OutputProcessor(tokenizer, config.sampling.stream_interval),
    )


def _input_processor(
    config: EngineConfig, tokenizer: Tokenizer | None, eos_token_ids: tuple[int, ...]
) -> InputProcessor:
    if config.model.pooling is not None:
        return PoolingProcessor(config, tokenizer, eos_token_ids)
    return InputProcessor(config, tokenizer, eos_token_ids, build_images(config, tokenizer))


def _end_token_ids(
    config: EngineConfig, generation: Mapping[str, Any], tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    return end_token_ids(
        config.model.hf_config.get("eos_token_id"),
        generation.get("eos_token_id"),
        () if tokenizer is None else tokenizer.eos_token_ids,
    )


@collection_postponed()
def build_core(args: EngineArgs, config: EngineConfig, on_progress: Progress) -> EngineCore:
    """The core of a settled config, in a process that has not opened the model yet."""
    checkpoint = _opener(args)(Path(config.model.path))
    # Only grammars need the tokenizer here: it is read when the first request has one.
    core = _build_core(
        config,
        checkpoint,
        on_progress,
        args,
        lambda: read_tokenizer(args, checkpoint),
        on_death=lambda: os._exit(1),  # between steps nobody would notice; now the front end does
    )
    gc.freeze()  # the process is there for this; no step waits while its objects are looked through
    return core


def _build_core(
    config: EngineConfig,
    checkpoint: Checkpoint,
    progress: Progress,
    args: EngineArgs,
    tokenizer: Callable[[], Tokenizer | None],
    on_death: Callable[[], None] | None = None,
) -> EngineCore:
    """Workers, executor and scheduler."""
    workers = start_workers(
        args, config, checkpoint, lambda done, total: progress("load", done, total), on_death
    )
    depth = config.scheduler.max_steps_in_flight
    generation = generation_config(args, checkpoint.generation_config)
    grammars: GrammarManager = NoGrammars()
    if not args.skip_tokenizer_init:
        grammars = build_grammars(
            config, tokenizer, lambda known: _end_token_ids(config, generation, known)
        )
    scheduler = build_scheduler(config, workers.kv_cache_config, grammars, workers.kv_transfer)
    return EngineCore(
        scheduler,
        workers.executor,
        max_steps_in_flight=depth,
        grammars=grammars,
        memory=workers.memory,
    )


def build_rank(
    args: EngineArgs,
    config: EngineConfig,
    on_progress: Callable[[int, int], None],
    ranks: GroupRanks,
) -> Worker:
    """The worker of one rank of a settled config, in a process of its own."""
    from tokenmill.worker.build import build_worker

    return build_worker(config, _opener(args)(Path(config.model.path)), on_progress, ranks)


def _opener(args: EngineArgs, *, without_torch: bool = False) -> Callable[[Path], Checkpoint]:
    """How the model's files are opened. Raises `ConfigError` for an unknown `load_format`."""
    if one_of("load_format", args.load_format, LOAD_FORMATS) == "auto":
        return open_checkpoint
    return partial(_open_dummy, args, without_torch=without_torch)


def _open_dummy(args: EngineArgs, path: Path, *, without_torch: bool) -> Checkpoint:
    def shapes(config: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
        if without_torch:
            from tokenmill.engine.dummy_shapes import shapes_elsewhere as shapes_of
        else:
            from tokenmill.models.loader import tensor_shapes as shapes_of
        implementation, _ = settle_implementation(args, config)
        return shapes_of(apply_overrides(config, args.hf_overrides), implementation)

    return open_dummy(path, tensor_shapes=shapes, seed=args.seed)


def read_tokenizer(args: EngineArgs, checkpoint: Checkpoint) -> Tokenizer | None:
    """The tokenizer that the settings name, or the model's own; None if none is wanted."""
    if args.skip_tokenizer_init:
        return None
    if args.tokenizer is None:
        return load_tokenizer(checkpoint.tokenizer_data)
    path = resolve_model(args.tokenizer, args.revision)
    if path.is_dir():
        return load_tokenizer(TokenizerData(directory=path))
    other = open_checkpoint(path)
    try:
        return load_tokenizer(other.tokenizer_data)
    finally:
        other.close()


def _log_choices(config: EngineConfig) -> None:
    for reason in config.reasons:
        logger.info("%s=%s: %s", reason.setting, reason.value, reason.why)
    logger.info("memory:\n%s", render(config.ledger))


def silent(stage: str, done: int, total: int) -> None:
    """Report progress to nobody."""
