"""An engine for the server without a model: what it says is written in its script.

Everything before and behind the core is real (input and output processor, tokenizer, detokenizer,
stop strings), so that requests are refused and texts are cut as they are in a server. The core is
a list of tokens: those of the prompt once more, unless the script says otherwise.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
import math
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from helpers.tiny_text import write_tokenizer
from tokenmill.checkpoint.checkpoint import TokenizerData
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.machine import Machine
from tokenmill.config.resolve import resolve
from tokenmill.contracts.operations import TAGS, EngineState, Sleep, UpdateWeights, WakeUp
from tokenmill.contracts.request import (
    AdapterInfo,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    TokenLogprobs,
)
from tokenmill.engine.adapters import AdapterRegistry
from tokenmill.engine.engine_stats import EngineStats
from tokenmill.engine.input_processor import InputProcessor
from tokenmill.engine.output_processor import OutputProcessor
from tokenmill.engine.prompts import parse_prompt
from tokenmill.errors import EngineDrainingError
from tokenmill.sampling_params import RequestOutputKind, SamplingParams
from tokenmill.tokenizer.tokenizer import load_tokenizer


@dataclass
class Script:
    """What happens to one sequence."""

    token_ids: list[int]
    finish_reason: FinishReason = FinishReason.STOP
    error: str | None = None
    step_seconds: float = 0.0
    first_step_seconds: float = 0.0
    gates: dict[int, threading.Event] = field(default_factory=dict)
    """A step, counted from 0, waits for its event, where it has one."""


Author = Callable[[list[int], SamplingParams], Script]


def echo(prompt_token_ids, params):
    """The prompt's tokens again, and the end."""
    return Script(list(prompt_token_ids))


@functools.cache
def tiny_tokenizer(chat_template=True):
    with tempfile.TemporaryDirectory() as name:
        kwargs = {} if chat_template else {"chat_template": None}
        write_tokenizer(Path(name), **kwargs)
        return load_tokenizer(TokenizerData(directory=Path(name)))


def engine_config(**settings):
    """Settings of an engine for a model of four layers that nobody loads."""
    model = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "vocab_size": tiny_tokenizer().vocab_size,
        "max_position_embeddings": 16_384,
    }
    chosen = {
        "model": "fake/model",
        "max_model_len": 512,
        "dtype": "float32",
        "max_num_seqs": 8,
        "scheduling_policy": "priority",
        "num_kv_blocks": 1024,
        "num_threads": 1,
    }
    return resolve(
        EngineArgs(**(chosen | settings)),
        path="/nowhere",
        config=model,
        tensor_shapes={"weight": (64, 64)},
        tensor_formats={"weight": "F32"},
        machine=Machine(2, total_memory=8 << 30, available_memory=8 << 30),
    )


DRAFTS = {
    "num_drafts": 10,
    "num_draft_tokens": 30,
    "num_accepted_tokens_per_pos": [9, 6, 3],
}
"""What a scheduler with drafts has counted."""


class FakeOperations:
    """Does what it is asked for at once, and keeps it."""

    def __init__(self):
        self.asked = []
        self.error = None
        self.state = EngineState()

    @property
    def is_paused(self):
        return bool(self.state.asleep)

    async def operate(self, operation):
        self.asked.append(operation)
        if self.error is not None:
            raise self.error
        match operation:
            case Sleep(level):
                self.state = EngineState(TAGS if level else TAGS[:1], "default", level)
            case WakeUp():
                self.state = EngineState()
            case UpdateWeights(_, version):
                self.state = EngineState((), version or "1")
        return self.state


class FakeEngine:
    """`engine.async_llm.AsyncLLM` as a script; keeps what it was asked for."""

    def __init__(self, author: Author = echo, *, chat_template=True, images=None, **config):
        self.images = images
        self.config = engine_config(**config)
        self.tokenizer = tiny_tokenizer(chat_template)
        self.default_params = SamplingParams()
        self.end_token_ids = (2,)
        self.author = author
        self.operations = FakeOperations()
        self.is_ready = True
        self.is_healthy = True
        self.is_draining = False
        self.calls = []
        self.adapters = AdapterRegistry(is_enabled=self.config.lora is not None)
        self.adapters_asked = []
        self.ranks_asked = []
        self.running = set()
        self.num_aborted = 0
        self.num_output_tokens = 0
        self.num_resets = 0
        self.shut_down = False
        self._died = []
        self._input = InputProcessor(self.config, self.tokenizer, (2,), images)
        self._output = OutputProcessor(self.tokenizer)

    async def generate(
        self,
        prompt,
        params,
        *,
        request_id,
        priority=0,
        cache_salt=None,
        deadline=None,
        stream=True,
        delta=False,
        adapter=None,
        data_parallel_rank=None,
    ):
        self.adapters_asked.append(adapter)
        self.ranks_asked.append(data_parallel_rank)
        if self.is_draining:
            raise EngineDrainingError("the engine takes no more requests.")
        kind = RequestOutputKind.FINAL_ONLY
        if stream:
            kind = RequestOutputKind.DELTA if delta else RequestOutputKind.CUMULATIVE
        source = self._input.process(
            request_id, prompt, params.replace(output_kind=kind), priority=priority
        )
        call = parse_prompt(prompt), params, priority, cache_salt, deadline
        self.calls.append(call)
        self._output.add_request(source)
        self.running.add(request_id)
        finished = False
        try:
            async with asyncio.timeout(deadline):
                async for output in self._steps(source):
                    finished = output.finished
                    yield output
        except TimeoutError:
            outputs, _ = self._output.abort([request_id])
            finished = True
            for output in outputs:
                output.outputs[0].error = f"the deadline of {deadline:g} s has passed."
            yield outputs[-1]
        finally:
            self.running.discard(request_id)
            if not finished:
                self.num_aborted += 1
                self._output.abort([request_id])

    async def _steps(self, source):
        scripts = [
            _Sequence(child, self.author(source.prompt_token_ids, source.params))
            for child in source.children
        ]
        running = scripts
        for number in itertools.count():
            script = running[0].script
            await asyncio.sleep(script.step_seconds if number else script.first_step_seconds)
            while number in script.gates and not script.gates[number].is_set():
                await asyncio.sleep(0.002)
            step = EngineCoreOutputs([sequence.step(source) for sequence in running])
            self.num_output_tokens += sum(len(each.new_token_ids) for each in step.outputs)
            outputs, stopped = self._output.process_outputs(step)
            for output in outputs:
                yield output
            running = [
                sequence
                for sequence in running
                if not sequence.finished and sequence.request.request_id not in stopped
            ]
            if not running:
                return

    async def abort(self, request_id):
        self._output.abort([request_id])

    async def load_adapter(self, request):
        loading = self.adapters.begin(request)
        if loading.known is None:
            load_id = hashlib.sha256(repr(loading.signature).encode()).hexdigest()
            self.adapters.finish(loading, AdapterInfo(load_id, 8, 3))
        return self.adapters.get(request.name)

    async def encode(self, text, *, add_special_tokens=True):
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    async def reset_prefix_cache(self):
        if self.running:
            return False
        self.num_resets += 1
        return True

    async def stats(self):
        return EngineStats(
            num_running=len(self.running),
            num_blocks=256,
            num_used_blocks=len(self.running),
            num_unfinished=len(self.running),
            num_output_tokens=self.num_output_tokens,
            prefix_cache_queries=100,
            prefix_cache_hits=25,
            num_preemptions=3,
            **(DRAFTS if self.config.speculation else {}),
        )

    def on_death(self, callback):
        self._died.append(callback)

    def die(self):
        self.is_ready = self.is_healthy = False
        for callback in self._died:
            callback()

    async def drain(self, timeout=None):
        self.is_draining = True
        self.is_ready = False
        return not self.running

    async def shutdown(self):
        self.is_draining = True
        self.is_ready = False
        self.shut_down = True


class _Sequence:
    def __init__(self, request, script):
        self.request = request
        self.script = script
        self.num_done = 0
        self.finished = False

    def step(self, source):
        """The next token; the end comes with the last one."""
        script, request = self.script, self.request
        ids = script.token_ids[: request.max_tokens]
        new = ids[self.num_done : self.num_done + 1]
        self.num_done += 1
        reason = None
        if self.num_done >= request.max_tokens and script.error is None:
            reason = FinishReason.LENGTH
        elif self.num_done >= len(script.token_ids):
            reason = script.finish_reason
        self.finished = reason is not None
        if self.finished and reason is FinishReason.STOP:
            new = [*new, request.eos_token_id] if request.eos_token_id is not None else new
        params = source.params
        return EngineCoreOutput(
            request.request_id,
            new_token_ids=new,
            new_logprobs=None
            if params.logprobs is None
            else [logprobs_of(each, params.logprobs) for each in new],
            prompt_logprobs=[
                logprobs_of(each, params.prompt_logprobs) for each in source.prompt_token_ids[1:]
            ]
            if params.prompt_logprobs is not None and self.num_done == 1
            else None,
            finish_reason=reason,
            error=script.error if self.finished else None,
            num_cached_tokens=len(source.prompt_token_ids) // 16 * 16,
            first_scheduled_time=request.arrival_time,
        )


def logprobs_of(token_id, count):
    """The chosen token is the third best, after 10 and 11; then come 12, 13, ..."""
    best = [10, 11, token_id, *range(12, 40)]
    chosen = math.log(1 / 8)
    values = [math.log(1 / 2), math.log(1 / 4), chosen, *(chosen - i for i in range(1, 29))]
    return TokenLogprobs([token_id, *best[:count]], [chosen, *values[:count]], 3)
