"""What the server needs of an engine. `engine.async_llm.AsyncLLM` is one; tests have others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Protocol

from tokenmill.config.engine_config import EngineConfig
from tokenmill.contracts.operations import EngineState, Operation
from tokenmill.contracts.request import AdapterRef
from tokenmill.engine.adapters import AdapterRegistry, KnownAdapter
from tokenmill.engine.engine_stats import EngineStats
from tokenmill.engine.input_processor import RequestParams
from tokenmill.engine.prompts import Prompt
from tokenmill.lora_request import LoRARequest
from tokenmill.outputs import RequestOutput
from tokenmill.sampling_params import SamplingParams
from tokenmill.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenmill.features.multimodal.images import Images


class Operations(Protocol):
    """Sleeping, waking up, other weights; `ServedOperations` is one."""

    state: EngineState

    @property
    def is_paused(self) -> bool: ...

    async def operate(self, operation: Operation) -> EngineState: ...


class Engine(Protocol):
    """An engine that computes beside the event loop. `AsyncLLM` says what each member does."""

    config: EngineConfig
    tokenizer: Tokenizer | None
    default_params: SamplingParams
    adapters: AdapterRegistry

    @property
    def operations(self) -> Operations: ...

    @property
    def images(self) -> Images | None: ...

    @property
    def end_token_ids(self) -> tuple[int, ...]: ...

    def generate(
        self,
        prompt: Prompt,
        params: RequestParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        deadline: float | None = None,
        stream: bool = True,
        delta: bool = False,
        adapter: AdapterRef | None = None,
        data_parallel_rank: int | None = None,
    ) -> AsyncIterator[RequestOutput]: ...

    async def load_adapter(self, request: LoRARequest) -> KnownAdapter: ...

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    async def reset_prefix_cache(self) -> bool: ...

    async def stats(self) -> EngineStats: ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def is_healthy(self) -> bool: ...

    def on_death(self, callback: Callable[[], None]) -> None: ...

    async def drain(self, timeout: float | None = None) -> bool: ...

    async def shutdown(self) -> None: ...
