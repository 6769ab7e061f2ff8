"""The engine in the caller's process, one step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenmill.config.memory import summary
from tokenmill.contracts.operations import (
    EngineState,
    Operation,
    Tensors,
    WakeUp,
    check_operation,
)
from tokenmill.contracts.request import AdapterRef, SchedulerStats
from tokenmill.engine.adapters import AdapterRegistry
from tokenmill.engine.client import EngineCoreClient
from tokenmill.engine.input_processor import RequestParams
from tokenmill.engine.interrupts import interrupts_deferred
from tokenmill.errors import EngineDeadError, InvalidRequestError
from tokenmill.lora_request import LoRARequest
from tokenmill.outputs import RequestOutput
from tokenmill.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tokenmill.config.engine_args import EngineArgs
    from tokenmill.config.engine_config import EngineConfig
    from tokenmill.engine.build import FrontEnd, Progress
    from tokenmill.features.multimodal.images import Images
    from tokenmill.tokenizer.tokenizer import Tokenizer


class LLMEngine:
    """Takes requests, makes steps, gives outputs.

        engine = LLMEngine.from_args(EngineArgs(model="smollm2-135m"))
        engine.add_request("0", "Once upon a time", SamplingParams(max_tokens=20))
        while engine.has_unfinished_requests():
            for output in engine.step():
                ...

    Not thread-safe: one caller steps it. `build.py` makes one from settings.
    """

    def __init__(self, front_end: FrontEnd, client: EngineCoreClient) -> None:
        """Use `from_args`."""
        self.config: EngineConfig = front_end.config
        self.tokenizer: Tokenizer | None = front_end.tokenizer
        self.default_params: SamplingParams = front_end.default_params
        self._input_processor = front_end.input_processor
        self._client = client
        self._output_processor = front_end.output_processor
        self._adapters = AdapterRegistry(is_enabled=self.config.lora is not None)
        self._undelivered: list[RequestOutput] = []
        self._closed = False

    @classmethod
    def from_args(cls, args: EngineArgs, on_progress: Progress | None = None) -> LLMEngine:
        """Build an engine. Raises `ModelNotFoundError`, `CheckpointError` or `ConfigError`."""
        from tokenmill.engine.build import build_engine

        return build_engine(args, on_progress)

    def add_request(
        self,
        request_id: str,
        prompt: object,
        params: RequestParams | None = None,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Queue a request; the same id may be used more than once.

        `prompt` has one of the forms of `prompts.py`. Without `params` the model's defaults apply.
        An adapter that is not known yet, or whose files have changed, is read first. Raises
        `InvalidRequestError` before anything is queued.
        """
        self._check_open()
        adapter = None if lora_request is None else self.load_adapter(lora_request)
        source = self._input_processor.process(
            request_id,
            prompt,
            self.default_params if params is None else params,
            priority=priority,
            arrival_time=arrival_time,
            adapter=adapter,
        )
        with interrupts_deferred():
            self._client.add_requests(source.children)
            self._output_processor.add_request(source)

    def load_adapter(self, request: LoRARequest) -> AdapterRef:
        """Read an adapter, unless it is known and its files are the same, and wait for that.

        Raises `AdapterError` for one that is not good; requests under way go on.
        """
        self._check_open()
        loading = self._adapters.begin(request)
        if loading.known is not None:
            return loading.known
        return self._adapters.finish(loading, self._client.load_adapter(loading.path).result())

    def step(self) -> list[RequestOutput]:
        """Compute one step and return what it brought. Ctrl-C takes effect after it."""
        self._check_open()
        if self._output_processor.num_unfinished or not self._undelivered:
            self.check_awake()
            self._make_step()
        delivered, self._undelivered = self._undelivered, []
        return delivered

    def abort_request(self, request_ids: str | Sequence[str]) -> list[RequestOutput]:
        """End these requests now; their last outputs, with reason `abort`. Unknown ids are fine.

        Outputs that Ctrl-C kept `step` from returning come with them, so none comes later.
        """
        ids = {request_ids} if isinstance(request_ids, str) else set(request_ids)
        with interrupts_deferred():
            outputs, core_ids = self._output_processor.abort(ids)
            self._client.abort_requests(core_ids)
            kept = self._undelivered
            self._undelivered = [output for output in kept if output.request_id not in ids]
        return [*(output for output in kept if output.request_id in ids), *outputs]

    @property
    def images(self) -> Images | None:
        """What the model makes of images; None for one that takes none."""
        return self._input_processor.images

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a text of this model."""
        return self._input_processor.end_token_ids

    @property
    def summary(self) -> str:
        """One line on the model, its kernels and its memory."""
        return summary(self.config)

    def has_unfinished_requests(self) -> bool:
        return bool(self._undelivered) or self._output_processor.num_unfinished > 0

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False if requests are running, then nothing changes."""
        return self._client.reset_prefix_cache().result()

    def stats(self) -> list[SchedulerStats]:
        """The state of each core, and its counters since the start."""
        self._check_open()
        return self._client.stats()

    # ---- operations -------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """What of the engine is asleep, and which weights it has."""
        return self._client.state

    def operate(self, operation: Operation, tensors: Tensors | None = None) -> None:
        """Sleep, wake up, or replace the weights, and wait for that. `tensors` are the weights,
        where they are not in files.

        Steps are made meanwhile for requests that are waited for; what they bring, and the ends of
        requests that are aborted, are what the next `step` returns. Raises `InvalidRequestError`
        before anything is changed, and `CheckpointError` for weights that cannot be read.
        """
        self._check_open()
        check_operation(operation, self.config)
        if not isinstance(operation, WakeUp) and operation.mode == "abort":
            self._undelivered += self.abort_request(self._output_processor.request_ids)
        with interrupts_deferred():
            done = self._client.operate(operation, tensors)
        while not done.done():
            self._make_step()
        done.result()

    def close(self) -> None:
        """End the engine and free what it holds; may be called twice."""
        if not self._closed:
            self._closed = True
            self._client.shutdown()

    def _make_step(self) -> None:
        with interrupts_deferred():
            outputs, stopped = self._output_processor.process_outputs(self._client.get_outputs())
            self._client.abort_requests(stopped)
            self._undelivered += outputs

    def check_awake(self) -> None:
        """Raise `InvalidRequestError` if no step can be made."""
        if self.state.is_sleeping:
            asleep = ", ".join(self.state.asleep)
            raise InvalidRequestError(f"the engine is asleep ({asleep}); call wake_up first.")

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDeadError("This engine was closed; build a new one.")
