"""The engine as a server uses it: requests in, streams out, whatever becomes of its cores."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from tokenmill.contracts.request import AdapterRef
from tokenmill.engine import build
from tokenmill.engine.adapters import AdapterRegistry, KnownAdapter
from tokenmill.engine.core_client import DEFAULT_FACTORY
from tokenmill.engine.daemon_thread import in_daemon_thread
from tokenmill.engine.engine_stats import EngineStats
from tokenmill.engine.input_processor import ProcessedInput, RequestParams
from tokenmill.engine.prompts import Prompt, is_long, with_salt
from tokenmill.engine.queue_limit import QueueLimit
from tokenmill.engine.replica import Replica
from tokenmill.engine.replicas import Replicas
from tokenmill.engine.serve_options import ServeOptions
from tokenmill.engine.served_operations import ServedOperations
from tokenmill.engine.served_requests import ServedRequest, ServedRequests
from tokenmill.engine.supervisor import CoreSupervisor, make_supervisors
from tokenmill.errors import (
    EngineDeadError,
    EngineDrainingError,
    InvalidRequestError,
    QueueFullError,
)
from tokenmill.lora_request import LoRARequest
from tokenmill.outputs import RequestOutput
from tokenmill.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from tokenmill.checkpoint.checkpoint import Checkpoint
    from tokenmill.config.engine_args import EngineArgs
    from tokenmill.config.engine_config import EngineConfig
    from tokenmill.engine.build import FrontEnd, Progress
    from tokenmill.features.multimodal.images import Images
    from tokenmill.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")

_NUM_TOKENIZING_THREADS = 2
_ABORTED = "The request was aborted."
_POOLS_IN_QUEUE = 8
"""The prompts of all requests may have so many times the tokens that the KV cache holds."""


@dataclass(eq=False, slots=True)
class _Arrival:
    """A request whose prompt is being processed."""

    request_id: str
    is_aborted: bool = False


class AsyncLLM:
    """Takes requests, gives streams; a core in a process of its own computes, or several do
    (`data_parallel_size`).

        llm = await AsyncLLM.start(EngineArgs(model="smollm2-135m"))
        async for output in llm.generate("Once", SamplingParams(), request_id="0", delta=True):
            print(output.outputs[0].text, end="")
        await llm.shutdown()

    A core that dies is replaced, and every stream goes on with the tokens that it would have had.
    All methods are called from the one event loop that `start` ran in, and that loop's thread must
    live as long as the engine.
    """

    def __init__(
        self, front_end: FrontEnd, supervisors: Sequence[CoreSupervisor], options: ServeOptions
    ) -> None:
        """Use `start`."""
        self.config: EngineConfig = front_end.config
        self.tokenizer: Tokenizer | None = front_end.tokenizer
        self.default_params: SamplingParams = front_end.default_params
        self._input_processor = front_end.input_processor
        max_num_seqs = self.config.scheduler.max_num_seqs
        replicas = [Replica(rank, each, max_num_seqs) for rank, each in enumerate(supervisors)]
        self._replicas = Replicas(replicas, self.config.cache)
        self._requests = ServedRequests(
            front_end.output_processor,
            self._replicas,
            on_end=self._request_ended,
            on_death=self._died,
        )
        self.operations = ServedOperations(self.config, self._replicas, self._requests)
        num_slots = len(replicas) * self.config.cache.num_blocks * self.config.cache.block_size
        self._queue = QueueLimit(
            max_running=len(replicas) * max_num_seqs,
            max_queue=options.max_queue,
            max_tokens=options.max_queue_tokens or _POOLS_IN_QUEUE * num_slots,
        )
        self._keys = itertools.count()
        self.adapters = AdapterRegistry(is_enabled=self.config.lora is not None)
        """Those that requests may run with."""
        self._arriving: set[_Arrival] = set()
        self._tokenizing = ThreadPoolExecutor(
            _NUM_TOKENIZING_THREADS, thread_name_prefix="tokenmill-tokenizer"
        )
        self._refusal: EngineDrainingError | EngineDeadError | None = None
        """Why no request is taken any more."""
        self._death: EngineDeadError | None = None
        self._death_callbacks: list[Callable[[], None]] = []
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    async def start(
        cls,
        args: EngineArgs,
        *,
        options: ServeOptions | None = None,
        on_progress: Progress | None = None,
        core_factory: str = DEFAULT_FACTORY,
    ) -> AsyncLLM:
        """Find the model, start the cores' processes, and wait until all take requests.

        `on_progress(stage, done, total)` is called with bytes, from any thread. `core_factory` is
        `module:function` of what builds the core in its process, as `build.build_core` does.

        Raises `ModelNotFoundError`, `CheckpointError` or `ConfigError`, or `EngineDeadError` if the
        core cannot be started for another reason.
        """
        options = options or ServeOptions()
        progress = on_progress or build.silent
        checkpoint = await in_daemon_thread(build.open_model, args, progress, without_torch=True)
        config = await in_daemon_thread(build.settle_config, args, checkpoint)
        supervisors = make_supervisors(
            args, config, options, on_progress=progress, factory=core_factory
        )
        try:
            for supervisor in supervisors:
                supervisor.spawn()
            front_end = await in_daemon_thread(_build_front_end, args, checkpoint, config)
            llm = cls(front_end, supervisors, options)
            await asyncio.gather(*(each.supervisor.start(each) for each in llm._replicas))
        except BaseException:
            await asyncio.gather(*(supervisor.stop() for supervisor in supervisors))
            raise
        return llm

    # ---- requests ---------------------------------------------------------------------------

    async def generate(
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
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one prompt; the last one has `finished`.

        With `stream` an item comes whenever a sequence has news, with all it has so far, or with
        `delta` only what is new (text, ids, log-probabilities; `finish_reason` in its last).
        Whoever is slow gets several steps' news as one item. Without `stream` there is one item.
        `params.output_kind` is not looked at. With `PoolingParams`, for a model that pools, one
        item comes, whose `pooled` is the result. `request_id` need not be unique. `deadline` is in
        seconds from now. `data_parallel_rank` is the replica that is to compute it; without one the
        engine chooses by the prompt's prefix and by load, and if that one dies another may go on.

        Leaving the iterator, however it is left, ends the request at once.

        A request that fails while it runs ends with `finish_reason` `error`, and one whose deadline
        passes with `abort`; in both cases the sequence's `error` says why.

        Raises, before the first item: `InvalidRequestError`, `QueueFullError`,
        `EngineDrainingError`; at any time: `EngineDeadError`, and `GenerationError` if the front
        end itself fails on the request.
        """
        expires = None if deadline is None else asyncio.get_running_loop().time() + deadline
        params = _with_output_kind(params, stream=stream, delta=delta)
        self._replicas.check_rank(data_parallel_rank)
        arrival = _Arrival(request_id)
        self._arriving.add(arrival)
        try:
            source = await self._admit(with_salt(prompt, cache_salt), params, priority, adapter)
        finally:
            self._arriving.discard(arrival)
        request = self._requests.add(source, request_id, expires=expires, rank=data_parallel_rank)
        if arrival.is_aborted:
            self._requests.abort(request, _ABORTED)
        try:
            while True:
                output = await request.stream.get()
                yield output
                if output.finished:
                    return
        finally:
            self._requests.forget(request)

    async def abort(self, request_id: str) -> None:
        """End all requests with this id: their streams end with `finish_reason` `abort`."""
        for arrival in self._arriving:
            arrival.is_aborted |= arrival.request_id == request_id
        for request in self._requests.with_id(request_id):
            self._requests.abort(request, _ABORTED)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; a long one is tokenized in another thread.

        Raises `InvalidRequestError` if the text is not valid Unicode, or there is no tokenizer.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise InvalidRequestError(
                "the engine has no tokenizer (skip_tokenizer_init); give token ids.",
                parameter="prompt",
            )

        def encode() -> list[int]:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)

        return await self._run(encode, elsewhere=is_long(text))

    async def reset_prefix_cache(self) -> bool:
        """Have all cores forget all cached prefixes; False if requests are running, then nothing
        changes.

        Raises `EngineDeadError` if a core dies over it, or all are dead.
        """
        if self._death is not None:
            raise self._death
        if len(self._replicas) > 1 and self._requests.num_unfinished:
            return False  # before any of them does it
        return await self._replicas.reset_prefix_caches()

    async def load_adapter(self, request: LoRARequest) -> KnownAdapter:
        """Have an adapter read and checked; its name means it from then on. Raises `AdapterError`,
        and `EngineDeadError` while there is no core to ask.

        Every core reads it; one that is being started again does so when it is needed.
        """
        loading = await self._run(lambda: self.adapters.begin(request), elsewhere=True)
        if loading.known is None:
            self.adapters.finish(loading, await self._replicas.read_adapter(loading.path))
        return self.adapters.get(request.name)

    # ---- the engine as a whole --------------------------------------------------------------

    async def stats(self) -> EngineStats:
        """The engine in numbers, from the core's latest message: asks nobody."""
        return self._requests.snapshot()

    @property
    def images(self) -> Images | None:
        """What the model makes of images; None for one that takes none."""
        return self._input_processor.images

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a text of this model."""
        return self._input_processor.end_token_ids

    @property
    def core_pid(self) -> int | None:
        """The first core's process; None while there is none."""
        return self.core_pids[0]

    @property
    def core_pids(self) -> list[int | None]:
        """Each core's process; None while there is none."""
        clients = [replica.supervisor.client for replica in self._replicas]
        return [None if client is None else client.pid for client in clients]

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken and computed now."""
        return self._refusal is None and self.is_healthy and not self.operations.is_paused

    @property
    def is_healthy(self) -> bool:
        """Whether a core lives, shows it, and gets on."""
        return any(replica.supervisor.is_healthy for replica in self._replicas)

    def on_death(self, callback: Callable[[], None]) -> None:
        """Call back, in the event loop, once the core has failed too often to be started again."""
        if self._death is not None:
            asyncio.get_running_loop().call_soon(callback)
        self._death_callbacks.append(callback)

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no new request, and wait until all have ended; False if `timeout` seconds were not
        enough.
        """
        self._refuse(EngineDrainingError("The server is shutting down and takes no new requests."))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)
        return self._idle.is_set()

    async def shutdown(self) -> None:
        """Abort what still runs and end the core; may be called twice."""
        self._refuse(EngineDeadError("The engine was shut down."))
        self._requests.abort_all("The server was shut down.")
        await asyncio.gather(*(replica.supervisor.stop() for replica in self._replicas))
        self._tokenizing.shutdown(wait=False, cancel_futures=True)

    # ---- inside -----------------------------------------------------------------------------

    async def _admit(
        self, prompt: Prompt, params: RequestParams, priority: int, adapter: AdapterRef | None
    ) -> ProcessedInput:
        """Process a prompt for which there is room; the room is taken."""
        self._check_open()
        num_sequences = params.n if isinstance(params, SamplingParams) else 1
        try:
            self._queue.enter(num_sequences)
        except QueueFullError:
            self._requests.num_refused += 1
            raise
        self._idle.clear()
        try:
            source = await self._process(prompt, params, priority, adapter)
            self._check_open()
            self._queue.enter_tokens(len(source.prompt_token_ids) * num_sequences)
        except BaseException as error:
            self._requests.num_refused += isinstance(error, QueueFullError)
            self._leave_queue(num_sequences, 0)
            raise
        return source

    async def _process(
        self, prompt: Prompt, params: RequestParams, priority: int, adapter: AdapterRef | None
    ) -> ProcessedInput:
        key = str(next(self._keys))

        def process() -> ProcessedInput:
            return self._input_processor.process(
                key, prompt, params, priority=priority, adapter=adapter
            )

        return await self._run(process, elsewhere=is_long(prompt))

    async def _run(self, call: Callable[[], T], *, elsewhere: bool) -> T:
        """What `call` returns; `elsewhere` keeps it from holding up the event loop."""
        if elsewhere:
            return await asyncio.get_running_loop().run_in_executor(self._tokenizing, call)
        return call()

    def _check_open(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def _refuse(self, error: EngineDrainingError | EngineDeadError) -> None:
        """Take no request from now on; a dead engine stays dead."""
        if not isinstance(self._refusal, EngineDeadError):
            self._refusal = error

    def _request_ended(self, request: ServedRequest) -> None:
        self._leave_queue(request.num_sequences, request.num_prompt_tokens)
        self._queue.record_end(request.num_sequences)

    def _leave_queue(self, num_sequences: int, num_tokens: int) -> None:
        self._queue.leave(num_sequences, num_tokens)
        if self._queue.is_empty:
            self._idle.set()

    def _died(self, error: EngineDeadError) -> None:
        self._refuse(error)
        self._death = error
        for callback in self._death_callbacks:
            callback()


def _build_front_end(args: EngineArgs, checkpoint: Checkpoint, config: EngineConfig) -> FrontEnd:
    tokenizer = build.read_tokenizer(args, checkpoint)
    front_end = build.build_front_end(args, checkpoint, config, tokenizer)
    checkpoint.close()
    return front_end


def _with_output_kind(params: RequestParams, *, stream: bool, delta: bool) -> RequestParams:
    if not isinstance(params, SamplingParams):  # there is one result, at the end
        return params
    kind = RequestOutputKind.FINAL_ONLY
    if stream:
        kind = RequestOutputKind.DELTA if delta else RequestOutputKind.CUMULATIVE
    return params if params.output_kind is kind else params.replace(output_kind=kind)
