"""Keeps a core process running: starts it, watches it, starts another one when it has died."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from typing import TYPE_CHECKING

from tokenmill.contracts.encoding import rebuild
from tokenmill.engine import wire
from tokenmill.engine.build import Progress, silent
from tokenmill.engine.core_client import DEFAULT_FACTORY, ProcessClient
from tokenmill.engine.placement import ANYWHERE, Placement, placements
from tokenmill.engine.recovery import RestartPolicy
from tokenmill.engine.serve_options import ServeOptions
from tokenmill.errors import EngineDeadError, TokenmillError

if TYPE_CHECKING:
    from tokenmill.config.engine_args import EngineArgs
    from tokenmill.config.engine_config import EngineConfig
    from tokenmill.engine.replica import Replica

logger = logging.getLogger(__name__)

_WATCH_INTERVAL = 0.5
"""Seconds between two looks at the core, and between two signs of our own life."""
_STOP_GRACE = 2.0
"""Seconds that a core may take to end by itself."""


class CoreState(enum.Enum):
    """What the supervisor is doing."""

    STARTING = enum.auto()
    SERVING = enum.auto()
    RESTARTING = enum.auto()
    STOPPED = enum.auto()


class CoreSupervisor:
    """One core process at a time, and the event loop's ear on it."""

    def __init__(
        self,
        args: EngineArgs,
        config: EngineConfig,
        options: ServeOptions,
        *,
        on_progress: Progress,
        factory: str = DEFAULT_FACTORY,
        placement: Placement = ANYWHERE,
    ) -> None:
        self._args = args
        self._config = config
        self._options = options
        self._on_progress = on_progress
        self._factory = factory
        self._placement = placement
        self._policy = RestartPolicy(options)
        self._interval = min(_WATCH_INTERVAL, options.heartbeat_timeout / 4)
        self._replica: Replica
        self.state = CoreState.STARTING
        self.client: ProcessClient | None = None
        """The core's process; None while there is none."""
        self._ready: asyncio.Future[None]
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_serving(self) -> bool:
        """Whether there is a core that takes requests."""
        return self.state is CoreState.SERVING

    @property
    def has_given_up(self) -> bool:
        """Whether there is no core, and will be none."""
        return self.state is CoreState.STOPPED

    @property
    def is_healthy(self) -> bool:
        """Whether there is a core, and it shows that it lives."""
        client = self.client
        return (
            self.is_serving
            and client is not None
            and client.page.core_silence() <= self._options.heartbeat_timeout
        )

    def spawn(self) -> None:
        """Start a process, which builds its core while nobody listens yet."""
        self.client = ProcessClient(
            self._args, self._config, factory=self._factory, placement=self._placement
        )

    async def start(self, replica: Replica) -> None:
        """Listen to the process that `spawn` has started, and wait until its core is ready; all
        that it says is for `replica`.

        Raises what building the core raised.
        """
        self._replica = replica
        self._in_background(self._watch())
        await self._listen()

    async def stop(self) -> None:
        """End the core, by force if it takes its time or is not ready; may be called twice."""
        grace = _STOP_GRACE if self.is_serving else 0.0
        self.state = CoreState.STOPPED
        for task in self._tasks:
            task.cancel()
        client = self._detach()
        if client is None:
            return
        client.send(wire.Stop())
        end = time.monotonic() + grace
        while client.is_alive and time.monotonic() < end:
            await asyncio.sleep(0.01)
        client.close()

    # ---- the core's process -----------------------------------------------------------------

    async def _listen(self) -> None:
        """Wait for the new process's core. Raises `TokenmillError` if it cannot be built."""
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        client = self.client
        assert client is not None
        loop.add_reader(client.fileno(), self._take_messages)
        if client.exit_fd is not None:
            loop.add_reader(client.exit_fd, self._look_whether_it_lives)
        # What was there before the loop listened makes no event.
        loop.call_soon(self._take_messages)
        await self._ready

    def _detach(self) -> ProcessClient | None:
        """Stop listening to the process."""
        client, self.client = self.client, None
        if client is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(client.fileno())
            if client.exit_fd is not None:
                loop.remove_reader(client.exit_fd)
        return client

    def after_send(self) -> None:
        """To be called after messages were sent: reading them may have hidden others that came."""
        if self.client is not None and self.client.has_messages:
            asyncio.get_running_loop().call_soon(self._take_messages)

    def _take_messages(self) -> None:
        """Handle a message, and come back for more after those whom it concerns have run."""
        if self.client is None:
            return
        message = self.client.receive()
        if message is not None:
            asyncio.get_running_loop().call_soon(self._take_messages)
            self._handle(message)

    def _handle(self, message: wire.FromCore) -> None:
        match message:
            case wire.StepOutputs(outputs):
                self._replica.on_outputs(outputs)
            case wire.Refusal(submission_id, error):
                self._replica.on_refusal(submission_id, rebuild(error))
            case wire.LoadProgress(stage, done, total):
                if self.state is CoreState.STARTING:
                    self._on_progress(stage, done, total)
            case wire.Ready():
                was_before = self.state is CoreState.RESTARTING
                self.state = CoreState.SERVING
                if not self._ready.done():
                    self._ready.set_result(None)
                if was_before:
                    self._replica.on_core_ready()
            case wire.StartupFailure(error):
                if not self._ready.done():
                    self._ready.set_exception(rebuild(error))

    # ---- watching ---------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Show that we live, and see that the core does.

        Time is counted only while this loop runs as well: if the whole machine was asleep, or this
        process stopped, nobody is to blame.
        """
        patience = _Patience()
        while True:
            before = time.monotonic()
            await asyncio.sleep(self._interval)
            client = self.client
            if client is None:
                continue
            client.page.beat_front_end()
            self._look_whether_it_lives()
            if self.client is not client:
                continue
            elapsed = min(time.monotonic() - before, 2 * self._interval)
            is_busy = self.is_serving and self._replica.expects_progress
            complaint = patience.complaint(client, elapsed, self._options, is_busy=is_busy)
            if complaint is not None:
                logger.error("The engine core %s. It is killed.", complaint)
                client.kill()

    def _look_whether_it_lives(self) -> None:
        if self.client is None or self.client.is_alive:
            return
        client = self._detach()
        assert client is not None
        while (message := client.receive()) is not None:
            self._handle(message)  # what it said last still counts
        how = client.how_it_ended()
        under_way = client.page.under_way()
        client.close()
        if not self._ready.done():  # whoever waits for it decides
            self._ready.set_exception(EngineDeadError(f"The engine core {how} while it started."))
            return
        if not self.is_serving:  # it has told why it could not start
            return
        self.state = CoreState.RESTARTING
        self._replica.on_core_ended(under_way, how)
        self._in_background(self._restart(how))

    async def _restart(self, how: str) -> None:
        """Start another core, again if that one dies before it is ready, until it is too much."""
        while (pause := self._policy.next_pause()) is not None:
            logger.info("Starting another engine core in %.1f s.", pause)
            await asyncio.sleep(pause)
            try:
                self.spawn()
                await self._listen()
                return
            except (TokenmillError, OSError) as failure:
                how = f"could not be started again ({failure})"
                logger.error("The engine core %s.", how)
                if (client := self._detach()) is not None:
                    client.close()
        self.state = CoreState.STOPPED
        options = self._options
        error = EngineDeadError(
            f"The engine core {how}; it was started {options.max_restarts} times within"
            f" {options.restart_window:g} s, and is not started again (max_restarts)."
        )
        logger.critical("%s", error)
        self._replica.on_give_up(error)

    def _in_background(self, coroutine: asyncio._CoroutineLike[None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def make_supervisors(
    args: EngineArgs,
    config: EngineConfig,
    options: ServeOptions,
    *,
    on_progress: Progress,
    factory: str = DEFAULT_FACTORY,
) -> list[CoreSupervisor]:
    """One for each replica. All load the same: the first one's progress is told.

    Raises `ConfigError` if there is no place for so many.
    """
    return [
        CoreSupervisor(
            args,
            config,
            options,
            on_progress=silent if rank else on_progress,
            factory=factory,
            placement=placement,
        )
        for rank, placement in enumerate(placements(config))
    ]


class _Patience:
    """For how long a core has shown no sign of life, or made no turn though it had work."""

    def __init__(self) -> None:
        self._client: ProcessClient | None = None
        self._silence = 0.0
        self._standstill = 0.0
        self._last_turn = -1
        self._last_beat = -1

    def complaint(
        self, client: ProcessClient, elapsed: float, options: ServeOptions, *, is_busy: bool
    ) -> str | None:
        """Why this core must be given up, if it must, `elapsed` seconds after the last look."""
        if client is not self._client:
            self._client, self._silence, self._standstill = client, 0.0, 0.0
        page = client.page
        beat, turn = page.core_beat, page.num_turns
        self._silence = self._silence + elapsed if beat == self._last_beat else 0.0
        stands = is_busy and turn == self._last_turn
        self._standstill = self._standstill + elapsed if stands else 0.0
        self._last_beat, self._last_turn = beat, turn
        if self._silence > options.freeze_timeout:
            return f"has shown no sign of life for {self._silence:.0f} s"
        if self._standstill > options.step_timeout:
            return f"has made no progress for {self._standstill:.0f} s"
        return None
