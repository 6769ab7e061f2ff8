"""The engine as a server uses it: requests in, streams out, whatever becomes of the core."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from tokenmill.engine.engine_stats import EngineStats
from tokenmill.engine.prompts import Prompt
from tokenmill.engine.serve_options import ServeOptions
from tokenmill.outputs import RequestOutput
from tokenmill.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tokenmill.config.engine_args import EngineArgs
    from tokenmill.config.engine_config import EngineConfig
    from tokenmill.engine.build import Progress
    from tokenmill.tokenizer.tokenizer import Tokenizer


class AsyncLLM:
    """Takes requests, gives streams; the core computes in a process of its own.

        llm = await AsyncLLM.start(EngineArgs(model="smollm2-135m"))
        async for output in llm.generate("Once", SamplingParams(), request_id="0", delta=True):
            print(output.outputs[0].text, end="")
        await llm.shutdown()

    All methods are called from the one event loop that `start` ran in.
    """

    config: EngineConfig
    tokenizer: Tokenizer | None
    default_params: SamplingParams

    @classmethod
    async def start(
        cls,
        args: EngineArgs,
        *,
        options: ServeOptions | None = None,
        on_progress: Progress | None = None,
    ) -> AsyncLLM:
        """Find the model, start the core's process, and wait until it takes requests.

        `on_progress(stage, done, total)` is called with bytes, from any thread. Raises
        `ModelNotFoundError`, `CheckpointError` or `ConfigError`, or `EngineDeadError` if the core
        cannot be started for another reason.
        """
        raise NotImplementedError

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        deadline: float | None = None,
        stream: bool = True,
        delta: bool = False,
    ) -> AsyncIterator[RequestOutput]:
        """The outputs of one prompt; the last one has `finished`.

        With `stream` an item comes whenever a sequence has news, with all it has so far, or with
        `delta` only what is new (text, ids, log-probabilities; `finish_reason` in its last).
        Whoever is slow gets several steps' news as one item. Without `stream` there is one item.
        `params.output_kind` is not looked at. `request_id` need not be unique. `deadline` is in
        seconds from now.

        Leaving the iterator, however it is left, ends the request at once.

        A request that fails while it runs ends with `finish_reason` `error`, and one whose deadline
        passes with `abort`; in both cases the sequence's `error` says why.

        Raises, before the first item: `InvalidRequestError`, `QueueFullError`,
        `EngineDrainingError`; at any time: `EngineDeadError`.
        """
        raise NotImplementedError

    async def abort(self, request_id: str) -> None:
        """End all requests with this id: their streams end with `finish_reason` `abort`."""
        raise NotImplementedError

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; a long one is tokenized in another thread.

        Raises `InvalidRequestError` if the text is not valid Unicode, or there is no tokenizer.
        """
        raise NotImplementedError

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False if requests are running, then nothing changes.

        Raises `EngineDeadError` if the core dies over it.
        """
        raise NotImplementedError

    async def stats(self) -> EngineStats:
        """The engine in numbers, from the core's latest message: asks nobody."""
        raise NotImplementedError

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken and computed now."""
        raise NotImplementedError

    @property
    def is_healthy(self) -> bool:
        """Whether the core lives, shows it, and gets on."""
        raise NotImplementedError

    def on_death(self, callback: Callable[[], None]) -> None:
        """Call back, in the event loop, once the core has failed too often to be started again."""
        raise NotImplementedError

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no new request, and wait until all have ended; False if `timeout` seconds were not
        enough.
        """
        raise NotImplementedError

    async def shutdown(self) -> None:
        """Abort what still runs and end the core; may be called twice."""
        raise NotImplementedError
