"""The engine of a GPU on the CPU, by Triton's interpreter: every part but graphs and streams."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.config.draft_model import DraftFiles
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.machine import Accelerator, Machine
from tokenmill.config.resolve import resolve
from tokenmill.config.speculation import read_speculative_config
from tokenmill.core.build import build_scheduler
from tokenmill.engine.build import build_front_end, read_tokenizer
from tokenmill.engine.client import InProcessClient
from tokenmill.engine.core import EngineCore
from tokenmill.engine.llm_engine import LLMEngine
from tokenmill.executor.local import InlineExecutor
from tokenmill.features.lora.build import OnGpu, build_adapters
from tokenmill.features.spec.build import build_drafter
from tokenmill.lora_request import LoRARequest
from tokenmill.models.base import CausalLM
from tokenmill.outputs import RequestOutput
from tokenmill.sampling_params import SamplingParams
from tokenmill.structured_output.build import build_grammars
from tokenmill.worker.batch import BatchShape
from tokenmill.worker.gpu import (
    load_gpu_draft,
    load_gpu_model,
    make_gpu_draft_runner,
    make_gpu_runner,
)
from tokenmill.worker.graphs.cuda import GraphSizes
from tokenmill.worker.graphs.forward import DirectForward
from tokenmill.worker.inputs.staging import Staging
from tokenmill.worker.kv_cache import kv_cache_config
from tokenmill.worker.worker import Worker

if os.environ["TRITON_INTERPRET"] == "1":
    from helpers.triton_interpreter import adapt_interpreter

    adapt_interpreter()

GIB = 1 << 30
MACHINE = Machine(
    num_cpus=1,
    total_memory=8 * GIB,
    available_memory=4 * GIB,
    accelerator=Accelerator("interpreted", (9, 0), 8 * GIB, 8 * GIB),
)


def device() -> torch.device:
    """A GPU where the tests run on one."""
    return torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")


class PaddedForward(DirectForward):
    """Steps in the shapes of CUDA graphs, run directly."""

    def __init__(self, model: CausalLM, sizes: GraphSizes) -> None:
        super().__init__(model)
        self._sizes = sizes

    def padded(self, shape: BatchShape) -> BatchShape:
        padded = self._sizes.padded(shape)
        self.stats.num_padded_tokens += padded.num_tokens - shape.num_tokens
        return padded


def gpu_engine(
    path: Path,
    *,
    sizes: GraphSizes | None = None,
    with_tokenizer: bool = False,
    **settings: Any,
) -> LLMEngine:
    """An engine on the parts of a GPU. Steps are not recorded, but padded to `sizes`. Without a
    tokenizer there are no grammars.
    """
    args = EngineArgs(model=str(path), device="cuda", **settings)
    checkpoint = open_checkpoint(path)
    config = resolve(
        args,
        path=str(path),
        config=checkpoint.config,
        tensor_shapes=checkpoint.tensor_shapes,
        tensor_formats=checkpoint.tensor_formats,
        machine=MACHINE,
        draft=draft_files(args),
    )
    model = load_gpu_model(config, checkpoint, device())
    adapters = build_adapters(config, model, OnGpu(device(), Staging(device()).stage_into))
    cache = kv_cache_config(config, model)
    draft = load_gpu_draft(config, device())
    drafter = build_drafter(config, partial(make_gpu_draft_runner, draft, cache, device()))
    runner = make_gpu_runner(config, model, cache, device(), adapters, drafter)
    if sizes is not None:
        runner.capture(lambda model, largest, blank_step: PaddedForward(model, sizes))
    worker = Worker(runner, cache)
    tokenizer = read_tokenizer(args, checkpoint) if with_tokenizer else None
    grammars = None
    if tokenizer is not None:
        grammars = build_grammars(config, lambda: tokenizer, lambda known: known.eos_token_ids)
    core = EngineCore(
        build_scheduler(config, cache, grammars),
        InlineExecutor(worker),
        max_steps_in_flight=config.scheduler.max_steps_in_flight,
        grammars=grammars,
    )
    front_end = build_front_end(args, checkpoint, config, tokenizer)
    return LLMEngine(front_end, InProcessClient(core))


def draft_files(args: EngineArgs) -> DraftFiles | None:
    """The headers of the model that drafts; None if none does."""
    speculation = read_speculative_config(args)
    if speculation is None or speculation.model is None:
        return None
    checkpoint = open_checkpoint(Path(speculation.model))
    return DraftFiles(
        path=str(checkpoint.path),
        config=checkpoint.config,
        tensor_shapes=checkpoint.tensor_shapes,
        tensor_formats=checkpoint.tensor_formats,
    )


def generate(
    engine: LLMEngine,
    prompts: list[list[int]],
    params: list[SamplingParams],
    adapters: Sequence[LoRARequest | None] | None = None,
) -> list[RequestOutput]:
    """Run token prompts to their ends; outputs in the order of the prompts."""
    given = adapters or [None] * len(prompts)
    for i, (prompt, asked, adapter) in enumerate(zip(prompts, params, given, strict=True)):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, asked, lora_request=adapter)
    ended = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                ended[output.request_id] = output
    return [ended[str(i)] for i in range(len(prompts))]
