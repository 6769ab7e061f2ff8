"""An engine stepped by hand, and where its host's time goes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from gpucheck.models import prompt
from gpucheck.timing import synchronize


@dataclass(frozen=True, slots=True)
class Steps:
    """A run of decoding steps."""

    num_steps: int
    num_tokens: int
    """Sampled in all of them."""
    seconds: float
    waited_seconds: float
    """Of these, what the host waited for the device."""
    num_replayed: int
    num_direct: int
    mean_cached_tokens: float
    """Keys that a step read, of all requests together."""

    @property
    def ms(self) -> float:
        """Of one step."""
        return self.seconds / self.num_steps * 1e3

    @property
    def host_ms(self) -> float:
        """What the host works for one step; hidden behind the device's time while it is less."""
        return (self.seconds - self.waited_seconds) / self.num_steps * 1e3

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def graph_hits(self) -> float:
        """Share of the steps that were replayed."""
        return self.num_replayed / max(self.num_replayed + self.num_direct, 1)


@dataclass
class Driver:
    """Steps an `LLM`'s engine; its requests run until they are aborted."""

    llm: Any
    device: str
    _num_ids: dict[str, int] = field(default_factory=dict)
    """Tokens that each request has, prompt and output."""
    _without_token: set[str] = field(default_factory=set)
    _next_index: int = 0

    def add(self, num_requests: int, prompt_len: int, **params: Any) -> None:
        """Queue requests with prompts of their own."""
        from tokenmill import RequestOutputKind, SamplingParams

        vocab_size = self.llm.llm_engine.config.model.vocab_size
        for _ in range(num_requests):
            index, self._next_index = self._next_index, self._next_index + 1
            sampling = SamplingParams(
                **({"max_tokens": None, "ignore_eos": True} | params),
                detokenize=False,
                seed=index,
                output_kind=RequestOutputKind.DELTA,
            )
            ids = prompt(index, prompt_len, vocab_size)
            self.llm.llm_engine.add_request(str(index), {"prompt_token_ids": ids}, sampling)
            self._num_ids[str(index)] = prompt_len
            self._without_token.add(str(index))

    def step(self) -> int:
        """One step; the number of tokens that it brought."""
        num_tokens = 0
        for output in self.llm.llm_engine.step():
            brought = len(output.outputs[0].token_ids)
            num_tokens += brought
            self._num_ids[output.request_id] += brought
            if brought:
                self._without_token.discard(output.request_id)
            if output.outputs[0].finish_reason == "error":
                raise RuntimeError(f"a request failed: {output.outputs[0].error}")
        return num_tokens

    def until_first_tokens(self) -> float:
        """Step until every request has a token; the seconds that it took."""
        synchronize(self.device)
        begin = time.perf_counter()
        while self._without_token:
            self.step()
        return time.perf_counter() - begin

    def decode(self, num_steps: int) -> Steps:
        """Time steps in which every request decodes."""
        stats = graph_stats(self.llm)
        replayed, direct = stats.num_replayed, stats.num_direct
        synchronize(self.device)
        cached_before = sum(self._num_ids.values())
        with waiting_counted() as waited:
            begin = time.perf_counter()
            num_tokens = sum(self.step() for _ in range(num_steps))
            seconds = time.perf_counter() - begin
        return Steps(
            num_steps=num_steps,
            num_tokens=num_tokens,
            seconds=seconds,
            waited_seconds=waited[0],
            num_replayed=stats.num_replayed - replayed,
            num_direct=stats.num_direct - direct,
            mean_cached_tokens=(cached_before + sum(self._num_ids.values())) / 2,
        )

    def clear(self) -> None:
        """Abort all requests and settle the steps in flight."""
        self.llm.llm_engine.abort_request(list(self._num_ids))
        self._num_ids.clear()
        self._without_token.clear()
        core = core_of(self.llm)
        while core.has_requests():
            core.step()
        synchronize(self.device)


@contextlib.contextmanager
def waiting_counted() -> Iterator[list[float]]:
    """Seconds that this thread spends waiting for events of the device, the one entry of a list."""
    waited = [0.0]
    original = torch.cuda.Event.synchronize
    thread = threading.get_ident()

    def synchronize_timed(event: torch.cuda.Event) -> None:
        begin = time.perf_counter()
        original(event)
        if threading.get_ident() == thread:
            waited[0] += time.perf_counter() - begin

    torch.cuda.Event.synchronize = synchronize_timed  # type: ignore[method-assign]
    try:
        yield waited
    finally:
        torch.cuda.Event.synchronize = original  # type: ignore[method-assign]


def core_of(llm: Any) -> Any:
    """The `EngineCore` behind an `LLM`, which runs in this process."""
    from tokenmill.engine.core import EngineCore

    for value in vars(llm.llm_engine).values():
        core = getattr(value, "core", value)
        if isinstance(core, EngineCore):
            return core
    raise LookupError("the engine's core is not in this process")


def graph_stats(llm: Any) -> Any:
    """The runner's counts of replayed and direct steps."""
    return core_of(llm)._executor._worker.runner.graph_stats


@dataclass(slots=True)
class Capture:
    """What recording the steps of an engine took."""

    seconds: float = 0.0
    num_bytes: int = 0
    """Device memory that was taken meanwhile."""


@contextlib.contextmanager
def capture_counted(device: str) -> Iterator[Capture]:
    """Time and memory of recordings made by engines that are built inside."""
    from tokenmill.worker.model_runner import ModelRunner

    total = Capture()
    original = ModelRunner.capture

    def capture_timed(runner: Any, *args: Any, **kwargs: Any) -> Any:
        free_before = free_bytes(device)
        begin = time.perf_counter()
        result = original(runner, *args, **kwargs)
        synchronize(device)
        total.seconds += time.perf_counter() - begin
        total.num_bytes += free_before - free_bytes(device)
        return result

    ModelRunner.capture = capture_timed  # type: ignore[method-assign]
    try:
        yield total
    finally:
        ModelRunner.capture = original  # type: ignore[method-assign]


def free_bytes(device: str) -> int:
    """Device memory that nobody has; 0 on a CPU, where recordings are not measured so."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0
