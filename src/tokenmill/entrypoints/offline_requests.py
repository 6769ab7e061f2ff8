"""Requests of an `LLM`: queued, and stepped until they have finished."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tokenmill.engine.input_processor import RequestParams
from tokenmill.engine.llm_engine import LLMEngine
from tokenmill.engine.prompts import Prompt
from tokenmill.entrypoints.offline_metrics import OfflineMetrics
from tokenmill.entrypoints.per_prompt import final_only
from tokenmill.entrypoints.progress import request_progress
from tokenmill.lora_request import LoRARequest
from tokenmill.outputs import RequestOutput


class RequestRunner:
    """Called by one thread at a time."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self.metrics = OfflineMetrics(engine.config)
        self._ids = itertools.count()
        self._params: dict[str, RequestParams] = {}
        """Of the requests that have not finished."""
        self._enqueued: dict[str, RequestOutput | None] = {}
        """Those that `wait` is to give, in their order, with the outputs that there are."""

    def run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[RequestParams],
        *,
        use_tqdm: bool,
        priorities: Sequence[int] | None = None,
        adapters: Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Queue all, step until all are done. Whatever happens, none of them stays behind."""
        self._engine.check_awake()
        request_ids = self._add(prompts, params, priorities, adapters)
        finished: dict[str, RequestOutput] = {}
        try:
            with request_progress(len(request_ids), shown=use_tqdm) as advance:
                while len(finished) < len(request_ids):
                    for output in self._step():
                        if output.request_id not in self._enqueued:
                            finished[output.request_id] = output
                            advance(output)
        finally:
            self._end([each for each in request_ids if each not in finished])
        return [finished[request_id] for request_id in request_ids]

    def enqueue(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[RequestParams],
        *,
        priorities: Sequence[int] | None = None,
        adapters: Sequence[LoRARequest | None] | None = None,
    ) -> list[str]:
        """Queue all, for `wait` to give; their ids."""
        request_ids = self._add(prompts, params, priorities, adapters)
        self._enqueued |= dict.fromkeys(request_ids)
        return request_ids

    def wait(self, *, use_tqdm: bool) -> list[RequestOutput]:
        """Step until all that were enqueued are done; they are given once, in their order.

        What interrupts it leaves them queued: it may be called again.
        """
        unfinished = sum(output is None for output in self._enqueued.values())
        with request_progress(unfinished, shown=use_tqdm) as advance:
            while None in self._enqueued.values():
                for output in self._step():
                    advance(output)
        outputs, self._enqueued = list(self._enqueued.values()), {}
        return [output for output in outputs if output is not None]

    def _add(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[RequestParams],
        priorities: Sequence[int] | None,
        adapters: Sequence[LoRARequest | None] | None,
    ) -> list[str]:
        """Queue all or none."""
        request_ids: list[str] = []
        priorities = priorities or [0] * len(prompts)
        adapters = adapters or [None] * len(prompts)
        try:
            for each in zip(prompts, params, priorities, adapters, strict=True):
                prompt, own_params, priority, adapter = each
                request_ids.append(f"generate-{next(self._ids)}")
                self._params[request_ids[-1]] = own_params
                self._engine.add_request(
                    request_ids[-1],
                    prompt,
                    final_only(own_params),
                    priority=priority,
                    lora_request=adapter,
                )
        except BaseException:
            self._end(request_ids)
            raise
        return request_ids

    def _step(self) -> list[RequestOutput]:
        """Last outputs of our requests that a step has brought; `llm_engine` may have others."""
        outputs = [each for each in self._engine.step() if each.request_id in self._params]
        for output in outputs:
            self.metrics.note(output, self._params.pop(output.request_id))
            if output.request_id in self._enqueued:
                self._enqueued[output.request_id] = output
        return outputs

    def _end(self, request_ids: list[str]) -> None:
        """Abort what has not finished."""
        self._engine.abort_request(request_ids)
        for request_id in request_ids:
            self._params.pop(request_id, None)
