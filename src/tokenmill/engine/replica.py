"""One of a served engine's cores: who is in it, and what it says."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from tokenmill.contracts.request import EngineCoreOutput, EngineCoreOutputs, FinishReason
from tokenmill.engine.engine_stats import EngineStats, StatsKeeper
from tokenmill.engine.prefix_index import WAITING_WEIGHT
from tokenmill.engine.recovery import Roster, Submission
from tokenmill.errors import EngineDeadError, InvalidRequestError, TokenmillError

if TYPE_CHECKING:
    from tokenmill.engine.core_client import ProcessClient
    from tokenmill.engine.served_requests import ServedRequests
    from tokenmill.engine.supervisor import CoreSupervisor

logger = logging.getLogger(__name__)


class Replica:
    """Between the supervisor of a core and the keeper of all requests."""

    def __init__(self, rank: int, supervisor: CoreSupervisor, max_running: int) -> None:
        """`rank` is its number among the engine's replicas, `max_running` its `max_num_seqs`."""
        self.rank = rank
        self.supervisor = supervisor
        self.roster = Roster()
        self.stats = StatsKeeper()
        self._max_running = max_running
        self._holds_requests = False
        self.on_ready: Callable[[Replica], None] = lambda replica: None
        """Called when another core takes requests, before it gets any."""
        self._keeper: ServedRequests

    def serve(self, keeper: ServedRequests) -> None:
        """Tell `keeper` from now on; comes before the core's first message."""
        self._keeper = keeper

    @property
    def client(self) -> ProcessClient | None:
        """The core's process, while it takes requests."""
        return self.supervisor.client if self.supervisor.is_serving else None

    @property
    def load(self) -> float:
        """How much there is before a request that comes now."""
        unfinished = len(self.roster)
        waiting = max(self.stats.num_waiting, unfinished - self._max_running)
        waiting = min(waiting, unfinished)
        return WAITING_WEIGHT * waiting + (unfinished - waiting)

    def snapshot(self) -> EngineStats:
        """The core in numbers."""
        stats = self.stats.snapshot(len(self.roster))
        stats.is_healthy = self.supervisor.is_healthy
        return stats

    def submit_due(self) -> None:
        """Send the core what it is to have now."""
        if self.client is None or self._holds_requests:
            return
        while due := self.roster.take_due():
            for submission in due:
                if self.roster.request_id(submission.submission_id) is not None:
                    self._submit(submission)  # else a sequence beside it has ended its request
            self.supervisor.after_send()

    def hold_requests(self, is_held: bool) -> None:
        """Whether requests are kept from a core that is not yet what it is to be."""
        self._holds_requests = is_held
        self.submit_due()

    def abort(self, submission_ids: list[str]) -> None:
        """Take these out of the core."""
        client = self.supervisor.client
        if submission_ids and client is not None:
            client.abort_requests(submission_ids)
            self.supervisor.after_send()

    # ---- what the core says -----------------------------------------------------------------

    @property
    def expects_progress(self) -> bool:
        """Whether the core has anything to do."""
        return self.roster.num_submitted > 0

    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """A step has brought this: tell all who wait for it."""
        if outputs.stats is not None:
            self.stats.update(outputs.stats)
        to_abort: list[str] = []
        for output in outputs.outputs:
            request_id = self.roster.request_id(output.request_id)
            if request_id is None:  # it was aborted meanwhile
                continue
            output.request_id = request_id
            self.stats.num_output_tokens += len(output.new_token_ids)
            leaves = self._keeper.on_output(self, output)
            if leaves is not None:
                to_abort.append(leaves)
        self.abort(to_abort)
        self.submit_due()

    def on_refusal(self, submission_id: str, error: TokenmillError) -> None:
        """The core cannot ever serve this request."""
        request_id = self.roster.request_id(submission_id)
        if request_id is not None:
            self._keeper.fail_sequence(request_id, error)

    def on_core_ended(self, under_way: list[str], how: str) -> None:
        """The core has died: requests that have killed it often enough end with an error."""
        self.stats.core_ended()
        condemned = self.roster.core_died(under_way)
        logger.error(
            "The engine core %s. %d requests go on in another one; %d that were in the failed step"
            " go first, one by one.",
            how,
            len(self.roster) - len(condemned),
            len(self.roster.suspects),
        )
        for request_id in condemned:
            logger.error("A request ends: the core died twice with nothing else to do.")
            error = f"The engine core died twice while it computed this request alone; it {how}."
            self._keeper.on_output(
                self, EngineCoreOutput(request_id, finish_reason=FinishReason.ERROR, error=error)
            )
        self._keeper.on_replica_ended(self)

    def on_core_ready(self) -> None:
        """Another core takes requests: all that are unfinished go on in it."""
        self.stats.num_restarts += 1
        self.on_ready(self)
        self.submit_due()

    def on_give_up(self, error: EngineDeadError) -> None:
        """There will be no other core."""
        self._keeper.on_replica_gone(self, error)

    def _submit(self, submission: Submission) -> None:
        request, client = submission.request, self.client
        assert client is not None
        if not submission.is_first:
            request = msgspec.structs.replace(
                self._keeper.taken_up(request), request_id=submission.submission_id
            )
        try:
            client.add_requests([request])
        except InvalidRequestError as error:
            self._keeper.fail_sequence(submission.request.request_id, error)
