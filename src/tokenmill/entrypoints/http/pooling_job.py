"""One HTTP request to a pooling model: its prompts through the engine, and its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill.config.engine_config import PoolingConfig
from tokenmill.engine.prompts import Prompt
from tokenmill.entrypoints.http.generation import Generation
from tokenmill.entrypoints.http.pooling_protocol import PoolingFields, PoolingUsage
from tokenmill.entrypoints.http.record import RequestRecord
from tokenmill.entrypoints.http.sampling import deadline_of, salt_of
from tokenmill.entrypoints.http.state import ServerState
from tokenmill.entrypoints.pooling import pooling_of
from tokenmill.errors import InvalidRequestError
from tokenmill.outputs import RequestOutput
from tokenmill.pooling_params import PoolingParams
from tokenmill.sampling_params import SamplingParams

MAX_INPUTS = 2048
"""Most inputs of one request, as at OpenAI."""
MIN_SECONDS = 0.001
"""What is left of a deadline that has passed: the engine then ends the request and says why."""


@dataclass(slots=True)
class PooledGeneration(Generation):
    """Prompts that end with a result in place of tokens.

    So many at once are in the engine as it can run; the others wait here, in nobody's queue.
    """

    pooling: PoolingParams = field(default_factory=PoolingParams)
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    started: float = field(default_factory=time.monotonic)

    async def results(self) -> list[RequestOutput]:
        """As `outputs`, and counted."""
        outputs = await self.outputs()
        for progress in self.progress:
            self.state.metrics.pooled(progress)
        return outputs

    async def _items(self, prompt: Prompt, *, stream: bool) -> AsyncIterator[RequestOutput]:
        async with self.slots:
            items = self.state.engine.generate(
                prompt,
                self.pooling,
                request_id=self.state.new_name(),
                priority=self.priority,
                cache_salt=self.cache_salt,
                deadline=self._time_left(),
                stream=False,
                adapter=self.adapter,
                data_parallel_rank=self.record.data_parallel_rank,
            )
            try:
                async for output in items:
                    yield output
            finally:
                closing = getattr(items, "aclose", None)
                if closing is not None:
                    await closing()

    def _time_left(self) -> float | None:
        """The deadline is the whole request's."""
        if self.deadline is None:
            return None
        return max(self.deadline - (time.monotonic() - self.started), MIN_SECONDS)


class PoolingJob:
    """Raises `InvalidRequestError` or `ModelNotFoundError` when made for what cannot be served."""

    def __init__(
        self, state: ServerState, record: RequestRecord, fields: PoolingFields, prefix: str
    ) -> None:
        """`prefix` begins the answer's id."""
        self._state, self._record, self._fields = state, record, fields
        record.choose_rank(fields.data_parallel_rank)
        self.model = state.model_name(fields.model)
        self._adapter = state.adapter(self.model)
        self.id = f"{prefix}-{state.new_name()}"
        self.created = int(time.time())
        self._deadline = deadline_of(fields, state.args)
        self._salt = salt_of(fields, record.key_name, state.args)

    @property
    def pooling(self) -> PoolingConfig:
        """How the model pools."""
        return pooling_of(self._state.engine.config, "this endpoint")

    def require(self, task: str, endpoint: str) -> None:
        """Raise `InvalidRequestError` for a model that cannot do what an endpoint is for."""
        tasks = self.pooling.tasks
        if task not in tasks:
            raise InvalidRequestError(
                f"{endpoint} needs a model that can {task}; what {self.model} can do is:"
                f" {', '.join(tasks)}.",
                parameter="model",
            )

    def params(self, **more: Any) -> PoolingParams:
        """Parameters for the engine; `more` are those that not all endpoints have."""
        return PoolingParams(
            truncate_prompt_tokens=self._fields.truncate_prompt_tokens,
            use_activation=self._fields.use_activation,
            **more,
        )

    async def run(
        self, prompts: Sequence[Any], params: PoolingParams, parameter: str
    ) -> list[RequestOutput]:
        """The prompts' results, in their order; `parameter` is what the client called them.

        Raises what `Generation.outputs` raises.
        """
        num_running = min(len(prompts), self._state.engine.config.scheduler.max_num_seqs)
        with self._state.admission.entered(num_running, parameter):
            return await PooledGeneration(
                self._state,
                self._record,
                list(prompts),
                SamplingParams(max_tokens=1),
                priority=self._fields.priority or 0,
                cache_salt=self._salt,
                adapter=self._adapter,
                deadline=self._deadline,
                pooling=params,
                slots=asyncio.Semaphore(num_running),
            ).results()


def usage_of(outputs: Sequence[RequestOutput]) -> PoolingUsage:
    """Tokens of all prompts."""
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return PoolingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
