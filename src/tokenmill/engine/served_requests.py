"""Every request that a server has taken, from its admission to its end, whatever the core does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from tokenmill.contracts.request import EngineCoreOutput, EngineCoreOutputs, FinishReason
from tokenmill.engine.engine_stats import EngineStats, StatsKeeper
from tokenmill.engine.input_processor import ProcessedInput
from tokenmill.engine.output_processor import OutputProcessor
from tokenmill.engine.recovery import Roster, Submission
from tokenmill.engine.streams import OutputStream
from tokenmill.engine.supervisor import CoreSupervisor
from tokenmill.errors import EngineDeadError, GenerationError, InvalidRequestError, TokenmillError
from tokenmill.outputs import RequestOutput
from tokenmill.sampling_params import RequestOutputKind

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class ServedRequest:
    """A request that has been taken."""

    request_id: str
    """The client's, for its outputs; `source` has one of our own."""
    source: ProcessedInput
    stream: OutputStream
    deadline: asyncio.TimerHandle | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.source.children)

    @property
    def num_prompt_tokens(self) -> int:
        """Of all sequences: in the core each has its own copy."""
        return len(self.source.prompt_token_ids) * len(self.source.children)


class ServedRequests:
    """The front end's side of every request: text, streams, and what a new core must be told.

    A `CoreListener`. `on_end` is called with each request that has ended, in whatever way, and
    `on_death` when there is no core any more and will not be.
    """

    def __init__(
        self,
        output_processor: OutputProcessor,
        supervisor: CoreSupervisor,
        *,
        on_end: Callable[[ServedRequest], None],
        on_death: Callable[[EngineDeadError], None],
    ) -> None:
        self._output_processor = output_processor
        self._supervisor = supervisor
        self._on_end = on_end
        self._on_death = on_death
        self._roster = Roster()
        self._requests: dict[str, ServedRequest] = {}
        """By the id of their source."""
        self._owners: dict[str, ServedRequest] = {}
        """By the id of each unfinished sequence."""
        self.stats = StatsKeeper()

    @property
    def num_unfinished(self) -> int:
        """Sequences that have not ended."""
        return len(self._roster)

    def snapshot(self) -> EngineStats:
        """The engine in numbers."""
        stats = self.stats.snapshot(self.num_unfinished)
        stats.running_adapters, stats.waiting_adapters = self._output_processor.adapters()
        return stats

    # ---- requests come and go ---------------------------------------------------------------

    def add(
        self, source: ProcessedInput, request_id: str, *, expires: float | None
    ) -> ServedRequest:
        """Take a request; `expires` is in the event loop's time."""
        delta = source.params.output_kind is RequestOutputKind.DELTA
        request = ServedRequest(request_id, source, OutputStream(delta=delta))
        if expires is not None:
            request.deadline = asyncio.get_running_loop().call_at(
                expires, self.abort, request, "The request's deadline has passed."
            )
        self._requests[source.request_id] = request
        self._output_processor.add_request(source)
        for child in source.children:
            self._owners[child.request_id] = request
            self._roster.add(child)
        self._submit_due()
        return request

    def with_id(self, request_id: str) -> list[ServedRequest]:
        """The unfinished requests that clients call so."""
        return [each for each in self._requests.values() if each.request_id == request_id]

    def abort(self, request: ServedRequest, why: str) -> None:
        """End a request, if it has not ended; its last outputs say why."""
        results, ids = self._output_processor.abort([request.source.request_id])
        self._withdraw(ids)
        self.stats.num_aborted += len(ids)
        for result in results:
            for sequence in result.outputs:
                if sequence.finish_reason == str(FinishReason.ABORT):
                    sequence.error = why
            self._deliver(result)
        self._submit_due()

    def abort_all(self, why: str) -> None:
        """End all requests."""
        for request in list(self._requests.values()):
            self.abort(request, why)

    def forget(self, request: ServedRequest) -> None:
        """End a request that nobody waits for any more, if it has not ended."""
        self.stats.num_aborted += self._drop(request)

    def fail(self, request: ServedRequest, error: TokenmillError) -> None:
        """End a request so that its stream raises an error."""
        request.stream.fail(error)
        self._drop(request)

    # ---- what the core says -----------------------------------------------------------------

    @property
    def expects_progress(self) -> bool:
        """Whether the core has anything to do."""
        return self._roster.num_submitted > 0

    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """A step has brought this: tell all who wait for it."""
        if outputs.stats is not None:
            self.stats.update(outputs.stats)
        to_abort: list[str] = []
        for output in outputs.outputs:
            request_id = self._roster.request_id(output.request_id)
            if request_id is not None:  # else it was aborted meanwhile
                output.request_id = request_id
                self.stats.num_output_tokens += len(output.new_token_ids)
                self._take(output, to_abort)
        self._abort_in_core(to_abort)
        self._submit_due()

    def on_refusal(self, submission_id: str, error: TokenmillError) -> None:
        """The core cannot ever serve this request."""
        request_id = self._roster.request_id(submission_id)
        if request_id is not None:
            self.fail(self._owners[request_id], error)

    def on_core_ended(self, under_way: list[str], how: str) -> None:
        """The core has died: requests that have killed it often enough end with an error."""
        self.stats.core_ended()
        condemned = self._roster.core_died(under_way)
        logger.error(
            "The engine core %s. %d requests go on in another one; %d that were in the failed step"
            " go first, one by one.",
            how,
            len(self._roster) - len(condemned),
            self._roster.num_suspects,
        )
        for request_id in condemned:
            logger.error("A request ends: the core died twice with nothing else to do.")
            error = f"The engine core died twice while it computed this request alone; it {how}."
            self._take(
                EngineCoreOutput(request_id, finish_reason=FinishReason.ERROR, error=error), []
            )

    def on_core_ready(self) -> None:
        """Another core takes requests: all that are unfinished go on in it."""
        self.stats.num_restarts += 1
        self._submit_due()

    def on_give_up(self, error: EngineDeadError) -> None:
        """There will be no other core."""
        for request in list(self._requests.values()):
            self.fail(request, error)
        self._on_death(error)

    # ---- inside -----------------------------------------------------------------------------

    def _take(self, output: EngineCoreOutput, to_abort: list[str]) -> None:
        """One request's output, on to whoever waits; `to_abort` gets what is to leave the core."""
        request_id = output.request_id
        try:
            result, has_stopped = self._output_processor.process_output(output)
        except Exception:  # one request's text must not take the others' from them
            logger.exception("An output could not be processed.")
            error = GenerationError("The output of this request could not be processed.")
            self.fail(self._owners[request_id], error)
            return
        leaves = None
        if output.finished or has_stopped:
            submission_id = self._end_sequence(request_id)
            leaves = submission_id if has_stopped else None
        else:
            leaves = self._roster.took_tokens(request_id, len(output.new_token_ids))
        if leaves is not None:
            to_abort.append(leaves)
        if result is not None:
            self._deliver(result)

    def _deliver(self, result: RequestOutput) -> None:
        request = self._requests[result.request_id]
        if result.finished:
            self._end(request)
        result.request_id = request.request_id
        request.stream.put(result)

    def _drop(self, request: ServedRequest) -> int:
        """End a request without an output, if it has not ended; how many sequences that were."""
        if request.source.request_id not in self._requests:
            return 0
        ids = self._output_processor.forget(request.source.request_id)
        self._withdraw(ids)
        self._end(request)
        self._submit_due()
        return len(ids)

    def _end(self, request: ServedRequest) -> None:
        del self._requests[request.source.request_id]
        if request.deadline is not None:
            request.deadline.cancel()
        self._on_end(request)

    def _withdraw(self, request_ids: Iterable[str]) -> None:
        """Take sequences out of the core, and off the roster."""
        submission_ids = [self._end_sequence(request_id) for request_id in request_ids]
        self._abort_in_core([each for each in submission_ids if each is not None])

    def _end_sequence(self, request_id: str) -> str | None:
        """Strike a sequence off; its id in the core, if it is there."""
        del self._owners[request_id]
        return self._roster.remove(request_id)

    def _abort_in_core(self, submission_ids: list[str]) -> None:
        client = self._supervisor.client
        if submission_ids and client is not None:
            client.abort_requests(submission_ids)
            self._supervisor.after_send()

    def _submit_due(self) -> None:
        """Send the core what it is to have now."""
        if not self._supervisor.is_serving or self._supervisor.client is None:
            return
        while due := self._roster.take_due():
            for submission in due:
                self._submit(submission)
            self._supervisor.after_send()

    def _submit(self, submission: Submission) -> None:
        request, client = submission.request, self._supervisor.client
        assert client is not None
        if not submission.is_first:
            request = msgspec.structs.replace(
                self._output_processor.take_up(request), request_id=submission.submission_id
            )
        try:
            client.add_requests([request])
        except InvalidRequestError as error:
            self.fail(self._owners[submission.request.request_id], error)
