"""The engine's outputs for one HTTP request: of one prompt, or of several that run together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field

from tokenmill.contracts.request import AdapterRef
from tokenmill.engine.prompts import Prompt
from tokenmill.entrypoints.beam_search import BeamSearchParams
from tokenmill.entrypoints.http.beams import beam_outputs
from tokenmill.entrypoints.http.errors import DeadlineExceededError, UnavailableError
from tokenmill.entrypoints.http.progress import Progress
from tokenmill.entrypoints.http.record import RequestRecord
from tokenmill.entrypoints.http.state import ServerState
from tokenmill.errors import GenerationError, TokenmillError
from tokenmill.outputs import RequestOutput
from tokenmill.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_QUEUED_OUTPUTS = 16
"""Outputs of several prompts that wait for a slow client; more wait in the engine, merged."""


@dataclass(slots=True)
class Generation:
    """What to generate, and what has come of it."""

    state: ServerState
    record: RequestRecord
    prompts: list[Prompt]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    adapter: AdapterRef | None = None
    deadline: float | None = None
    """Seconds from now."""
    beams: BeamSearchParams | None = None
    """Search instead of sampling."""
    hides_output: bool = False
    """A token is generated only for what is told about the prompt."""
    progress: list[Progress] = field(default_factory=list)
    """One a prompt."""

    def __post_init__(self) -> None:
        self.progress = [
            Progress(self.params, hides_output=self.hides_output) for _ in self.prompts
        ]

    async def outputs(self) -> list[RequestOutput]:
        """The final output of each prompt.

        Raises what `AsyncLLM.generate` raises, `GenerationError`, `DeadlineExceededError`, or
        `UnavailableError`.
        """
        if len(self.prompts) == 1:
            return [await self._last(0)]
        tasks = [asyncio.create_task(self._last(i)) for i in range(len(self.prompts))]
        try:
            return await asyncio.gather(*tasks)
        finally:
            await _end(tasks)

    async def stream(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(Number of the prompt, what is new) until all have finished. Raises as `outputs` does."""
        if len(self.prompts) == 1:
            async with aclosing(self._outputs(0, stream=True)) as outputs:
                async for output in outputs:
                    yield 0, output
            return
        queue: asyncio.Queue[tuple[int, RequestOutput] | None] = asyncio.Queue(_QUEUED_OUTPUTS)

        async def forward(number: int) -> None:
            async with aclosing(self._outputs(number, stream=True)) as outputs:
                async for output in outputs:
                    await queue.put((number, output))

        async def forward_all() -> None:
            tasks = [asyncio.create_task(forward(i)) for i in range(len(self.prompts))]
            try:
                await asyncio.gather(*tasks)
            finally:
                await _end(tasks)
                if not has_left:
                    await queue.put(None)

        has_left = False
        forwarding = asyncio.create_task(forward_all())
        try:
            while (item := await queue.get()) is not None:
                yield item
            await forwarding
        finally:
            has_left = True
            await _end([forwarding])

    async def _last(self, number: int) -> RequestOutput:
        last: RequestOutput | None = None
        async with aclosing(self._outputs(number, stream=False)) as outputs:
            async for output in outputs:
                last = output
        if last is None:
            raise GenerationError("the engine gave no answer.")
        return last

    async def _outputs(self, number: int, *, stream: bool) -> AsyncGenerator[RequestOutput, None]:
        state, progress = self.state, self.progress[number]
        items = self._items(self.prompts[number], stream=stream)
        refused = False
        try:
            async for output in items:
                if progress.num_prompt_tokens == 0:
                    self._begin(progress, output)
                num_new = progress.update(output)
                state.metrics.new_tokens(progress, num_new, stream=stream)
                self.record.num_output_tokens += num_new
                for sequence in output.outputs:
                    if sequence.finish_reason in ("error", "abort"):
                        raise self._failure(sequence.finish_reason, sequence.error)
                yield output
        except TokenmillError:
            refused = progress.num_prompt_tokens == 0
            raise
        finally:
            closing = getattr(items, "aclose", None)
            if closing is not None:
                await closing()
            if not refused:
                state.metrics.end_of_prompt(progress)
                state.traces.end_of_prompt(progress, self.record)

    def _items(self, prompt: Prompt, *, stream: bool) -> AsyncIterator[RequestOutput]:
        if self.beams is not None:
            return beam_outputs(
                self.state,
                prompt,
                self.beams,
                num_logprobs=self.params.logprobs or 0,
                priority=self.priority,
                cache_salt=self.cache_salt,
                adapter=self.adapter,
                deadline=self.deadline,
                data_parallel_rank=self.record.data_parallel_rank,
            )
        return self.state.engine.generate(
            prompt,
            self.params,
            request_id=self.state.new_name(),
            priority=self.priority,
            cache_salt=self.cache_salt,
            deadline=self.deadline,
            stream=stream,
            delta=stream,
            adapter=self.adapter,
            data_parallel_rank=self.record.data_parallel_rank,
        )

    def _begin(self, progress: Progress, output: RequestOutput) -> None:
        """The first sign of a prompt: the engine has taken it and given a token."""
        progress.num_prompt_tokens = len(output.prompt_token_ids)
        record = self.record
        record.num_prompt_tokens += progress.num_prompt_tokens
        if record.first_token_time is None:
            record.first_token_time = output.metrics.first_token_time
        bos = self.state.tokenizer.bos_token_id
        if bos is not None and output.prompt_token_ids[:2] == [bos, bos]:
            _warn_double_bos()

    def _failure(self, reason: str, why: str | None) -> TokenmillError:
        if reason == "error":
            return GenerationError(why or "the request failed in the engine.")
        if self.state.stopping:
            return UnavailableError("the server is stopping; the request was ended.")
        if self.deadline is not None:
            return DeadlineExceededError(why or f"not finished within {self.deadline:g} s.")
        return UnavailableError(why or "the engine ended the request.")


_warned: set[str] = set()


def _warn_double_bos() -> None:
    if "bos" not in _warned:
        _warned.add("bos")
        logger.warning(
            "a prompt begins with two BOS tokens: the tokenizer adds one, and the text has its own;"
            " set add_special_tokens=false for such texts"
        )


async def _end(tasks: list[asyncio.Task[None]] | list[asyncio.Task[RequestOutput]]) -> None:
    """Cancel what still runs and wait until it has."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
