"""Every request that a server has taken, from its admission to its end, whatever the cores do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tokenmill.contracts.request import EngineCoreOutput, EngineCoreRequest, FinishReason
from tokenmill.engine.engine_stats import EngineStats, total
from tokenmill.engine.input_processor import ProcessedInput
from tokenmill.engine.output_processor import OutputProcessor
from tokenmill.engine.replica import Replica
from tokenmill.engine.replicas import Replicas
from tokenmill.engine.streams import OutputStream
from tokenmill.errors import EngineDeadError, GenerationError, TokenmillError
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

    `on_end` is called with each request that has ended, in whatever way, and `on_death` when there
    is no core any more and will not be.
    """

    def __init__(
        self,
        output_processor: OutputProcessor,
        replicas: Replicas,
        *,
        on_end: Callable[[ServedRequest], None],
        on_death: Callable[[EngineDeadError], None],
    ) -> None:
        self._output_processor = output_processor
        self._replicas = replicas
        for replica in replicas:
            replica.serve(self)
        self._on_end = on_end
        self._on_death = on_death
        self._requests: dict[str, ServedRequest] = {}
        """By the id of their source."""
        self._owners: dict[str, ServedRequest] = {}
        """By the id of each unfinished sequence."""
        self._homes: dict[str, Replica] = {}
        """Who computes each unfinished sequence."""
        self.num_refused = 0
        """Requests refused because the queue was full."""

    @property
    def num_unfinished(self) -> int:
        """Sequences that have not ended."""
        return len(self._owners)

    def snapshot(self) -> EngineStats:
        """The engine in numbers."""
        stats = total([replica.snapshot() for replica in self._replicas])
        stats.num_refused = self.num_refused
        stats.running_adapters, stats.waiting_adapters = self._output_processor.adapters()
        return stats

    # ---- requests come and go ---------------------------------------------------------------

    def add(
        self,
        source: ProcessedInput,
        request_id: str,
        *,
        expires: float | None,
        rank: int | None = None,
    ) -> ServedRequest:
        """Take a request; `expires` is in the event loop's time, and `rank` the replica that is to
        have it, if that matters.
        """
        delta = source.params.output_kind is RequestOutputKind.DELTA
        request = ServedRequest(request_id, source, OutputStream(delta=delta))
        if expires is not None:
            request.deadline = asyncio.get_running_loop().call_at(
                expires, self.abort, request, "The request's deadline has passed."
            )
        self._requests[source.request_id] = request
        self._output_processor.add_request(source)
        among = None if rank is None else [self._replicas[rank]]
        replica = self._replicas.choose(source.children[0], among)
        for child in source.children:  # together, since they share a prompt
            self._owners[child.request_id] = request
            self._homes[child.request_id] = replica
            replica.roster.add(child)
        replica.submit_due()
        return request

    def with_id(self, request_id: str) -> list[ServedRequest]:
        """The unfinished requests that clients call so."""
        return [each for each in self._requests.values() if each.request_id == request_id]

    def abort(self, request: ServedRequest, why: str) -> None:
        """End a request, if it has not ended; its last outputs say why."""
        results, ids = self._output_processor.abort([request.source.request_id])
        concerned = self._withdraw(ids, aborted=True)
        for result in results:
            for sequence in result.outputs:
                if sequence.finish_reason == str(FinishReason.ABORT):
                    sequence.error = why
            self._deliver(result)
        for replica in concerned:
            replica.submit_due()

    def abort_all(self, why: str) -> None:
        """End all requests."""
        for request in list(self._requests.values()):
            self.abort(request, why)

    def forget(self, request: ServedRequest) -> None:
        """End a request that nobody waits for any more, if it has not ended."""
        self._drop(request, aborted=True)

    def fail(self, request: ServedRequest, error: TokenmillError) -> None:
        """End a request so that its stream raises an error."""
        request.stream.fail(error)
        self._drop(request, aborted=False)

    # ---- what the cores say -----------------------------------------------------------------

    def on_output(self, replica: Replica, output: EngineCoreOutput) -> str | None:
        """One sequence's output, on to whoever waits; its id in the core, if it is to leave it."""
        request_id = output.request_id
        try:
            result, has_stopped = self._output_processor.process_output(output)
        except Exception:  # one request's text must not take the others' from them
            logger.exception("An output could not be processed.")
            error = GenerationError("The output of this request could not be processed.")
            self.fail_sequence(request_id, error)
            return None
        if output.finished or has_stopped:
            submission_id = self._end_sequence(request_id)
            leaves = submission_id if has_stopped else None
        else:
            leaves = replica.roster.took_tokens(request_id, len(output.new_token_ids))
        if result is not None:
            result.data_parallel_rank = replica.rank
            self._deliver(result)
        return leaves

    def fail_sequence(self, request_id: str, error: TokenmillError) -> None:
        """End the request of a sequence so that its stream raises an error."""
        self.fail(self._owners[request_id], error)

    def taken_up(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """A sequence as it goes on after the tokens that it has."""
        return self._output_processor.take_up(request)

    def on_replica_ended(self, replica: Replica) -> None:
        """A core has died: whoever was not in the step that failed goes on in another one."""
        self._replicas.forget_prefixes(replica)
        others = [each for each in self._replicas.alive if each.client is not None]
        if others:
            self._move(replica, replica.roster.innocents, others)

    def on_replica_gone(self, replica: Replica, error: EngineDeadError) -> None:
        """There will be no other core in its place: all of its requests go on elsewhere."""
        others = self._replicas.alive
        if others:
            self._move(replica, replica.roster.held_back, others)
            return
        for request in list(self._requests.values()):
            self.fail(request, error)
        self._on_death(error)

    # ---- inside -----------------------------------------------------------------------------

    def _move(self, source: Replica, request_ids: list[str], targets: Sequence[Replica]) -> None:
        """Have sequences that are in no core go on in others: they bring the same there."""
        for entry in source.roster.take_out(request_ids):
            target = self._replicas.choose(entry.request, targets)
            target.roster.put_in(entry)
            self._homes[entry.request.request_id] = target
        for target in targets:
            target.submit_due()

    def _deliver(self, result: RequestOutput) -> None:
        request = self._requests[result.request_id]
        if result.finished:
            self._end(request)
        result.request_id = request.request_id
        request.stream.put(result)

    def _drop(self, request: ServedRequest, *, aborted: bool) -> None:
        """End a request without an output, if it has not ended."""
        if request.source.request_id not in self._requests:
            return
        ids = self._output_processor.forget(request.source.request_id)
        concerned = self._withdraw(ids, aborted=aborted)
        self._end(request)
        for replica in concerned:
            replica.submit_due()

    def _end(self, request: ServedRequest) -> None:
        del self._requests[request.source.request_id]
        if request.deadline is not None:
            request.deadline.cancel()
        self._on_end(request)

    def _withdraw(self, request_ids: Iterable[str], *, aborted: bool) -> list[Replica]:
        """Take sequences out of their cores, and off the rosters; whose they were."""
        found: dict[Replica, list[str]] = {}
        for request_id in request_ids:
            replica = self._homes[request_id]
            submission_id = self._end_sequence(request_id)
            replica.stats.num_aborted += aborted
            found.setdefault(replica, []).extend([submission_id] if submission_id else [])
        for replica, submission_ids in found.items():
            replica.abort(submission_ids)
        return list(found)

    def _end_sequence(self, request_id: str) -> str | None:
        """Strike a sequence off; its id in the core, if it is there."""
        del self._owners[request_id]
        return self._homes.pop(request_id).roster.remove(request_id)
