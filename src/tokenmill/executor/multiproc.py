"""The ranks of a model in processes of their own, on this machine and on others.

    engine core                rank 0     rank 1     ...
        Execute, Sample   ------>|---------->|
                              layers <---> layers          parallel/: sums, logits
        StepResult        <------|                         of the output rank only

Messages go over a stream to each rank, which is the sign of life as well: a stream that ends is a
rank that has died. Then nothing can be computed any more. The executor ends the others, and whoever
waits for a step gets `EngineDeadError`; a server starts another core, with other ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import NoReturn

from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.engine_config import EngineConfig
from tokenmill.config.parallel import ParallelConfig
from tokenmill.contracts.encoding import LogRecord, rebuild
from tokenmill.contracts.kv_cache import KVCacheConfig
from tokenmill.contracts.plan import GrammarOutput, SchedulerOutput
from tokenmill.contracts.request import AdapterInfo
from tokenmill.contracts.result import ModelRunnerOutput, SampledTokens
from tokenmill.errors import ConfigError, EngineDeadError, TokenmillError
from tokenmill.executor import messages
from tokenmill.executor.launch import LocalRank, end_ranks, start_ranks
from tokenmill.executor.remote import RankPlaces, accept_ranks
from tokenmill.kernels import native

_CAUSE_PATIENCE = 2.0
"""Seconds to wait for the rank that has failed, where another one tells that it has noticed."""
_DEATH_PATIENCE = 1.0
"""Seconds for whoever uses the ranks to find out by itself that one has died."""

Progress = Callable[[int, int], None]
StartRanks = Callable[[ParallelConfig, int, Callable[[int], socket.socket]], list[LocalRank]]
"""Starts the ranks of a machine, each with the end of a stream."""


class MultiprocExecutor:
    """Sends plans to all ranks, and reads what they answer whenever somebody waits for it.

    An `Executor`. To be used by one thread, which lives as long as the ranks: on Linux those that
    the main thread has started die with it.
    """

    kv_cache_config: KVCacheConfig
    """Of every rank, with the layers of all of them."""

    def __init__(
        self,
        args: EngineArgs,
        config: EngineConfig,
        on_progress: Progress = lambda done, total: None,
        *,
        on_death: Callable[[], None] | None = None,
        start: StartRanks = start_ranks,
        places: RankPlaces | None = None,
    ) -> None:
        """Start the ranks of this machine with `start`, unless all are at `places`, which end with
        this executor, and wait until all are built.

        `on_death` is called, in a thread of its own, when a rank has died and nobody has asked for
        anything for a second: where nobody may ask for a long time.

        Raises what building one raised, and `EngineDeadError` for one that died.
        """
        self._parallel = config.parallel
        self._on_progress = on_progress
        self._selector = selectors.DefaultSelector()
        self._streams: dict[int, socket.socket] = {}
        """By rank."""
        self._local: list[LocalRank] = []
        self._places = places
        self._death: TokenmillError | None = None
        self._setup_answers: dict[int, messages.Built] = {}
        self._store_address: str | None = None
        self._numbers = itertools.count()
        self._num_results = 0
        self._results: dict[int, ModelRunnerOutput] = {}
        """Of steps whose result nobody has asked for yet, by their number."""
        self._learners = range(self._parallel.output_rank)
        """Ranks that do not see what is sampled."""
        self._samplers = range(self._parallel.output_rank, self._parallel.world_size)
        self._rows: dict[int, list[int]] = {}
        """Of the plans in flight, by step id; of stages, which are told what was sampled."""
        self._unlearnt: list[SampledTokens] = []
        self._adapters: dict[int, _LoadingAdapter] = {}
        try:
            self._start(messages.RankSetup(args, config, 0, None, _log_level()), start)
        except BaseException:
            self.shutdown()
            raise
        if on_death is not None:
            streams = list(self._streams.values())
            watch = threading.Thread(
                target=self._watch, args=(streams, on_death), name="tokenmill-ranks", daemon=True
            )
            watch.start()

    @property
    def rank_pids(self) -> list[int]:
        """Processes on this machine, in the order of ranks."""
        return [each.process.pid for each in self._local]

    # ---- the executor interface -------------------------------------------------------------

    def execute_model(self, plan: SchedulerOutput) -> None:
        if self._learners:
            self._rows[plan.step_id] = plan.rows
            sampled, self._unlearnt = self._unlearnt, []
            self._send(messages.Execute(plan, sampled), self._learners)
        self._send(messages.Execute(plan), self._samplers)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> RankStep:
        self._send(messages.Sample(grammar_output), self._samplers)
        return RankStep(self, next(self._numbers))

    def load_adapter(self, directory: str) -> Future[AdapterInfo]:
        number = len(self._adapters)
        loading = _LoadingAdapter(self, len(self._streams))
        self._adapters[number] = loading
        self._send(messages.LoadAdapter(number, directory), self._streams)
        return loading

    def shutdown(self) -> None:
        """End the ranks; steps under way are lost. May be called twice."""
        if self._death is None:
            self._death = EngineDeadError("The engine was shut down; build a new one.")
        for stream in self._streams.values():
            self._say_goodbye(stream)
        end_ranks(self._local)
        if self._places is not None:
            self._places.end()
        self._streams.clear()
        self._local.clear()
        self._selector.close()

    def take_result(self, number: int) -> ModelRunnerOutput:
        """Wait for the result of a step; each is taken once. Raises `EngineDeadError`."""
        while number not in self._results:
            self.take_messages()
        return self._results.pop(number)

    # ---- messages ---------------------------------------------------------------------------

    def take_messages(self, timeout: float | None = None) -> None:
        """Handle what ranks have sent; wait for something, at most `timeout` seconds.

        Raises `EngineDeadError`, and what building a rank raised.
        """
        if self._death is not None:
            raise self._death
        for key, _ in self._selector.select(timeout):
            rank: int = key.data
            try:
                message = messages.receive_from_rank(self._streams[rank])
            except EOFError:
                self._die(EngineDeadError(f"Rank {rank} {self._how_it_ended(rank)}."))
            except EngineDeadError as error:  # what it has sent is no message
                self._die(error)
            self._handle(rank, message)

    def _handle(self, rank: int, message: messages.FromRank) -> None:
        match message:
            case messages.StepResult(output):
                self._take_output(output)
            case LogRecord():
                message.hand_on()
            case messages.LoadProgress(done, total):
                if rank == 0:
                    self._on_progress(done, total)
            case messages.StoreAddress(address):
                self._store_address = address
            case messages.Built():
                self._setup_answers[rank] = message
            case messages.AdapterLoaded(number, info, error):
                self._adapters[number].take(info, None if error is None else rebuild(error))
            case messages.Failed(error, is_consequence):
                if is_consequence:
                    self._find_cause(rank)
                raised = rebuild(error)
                is_ours = not isinstance(raised, EngineDeadError)  # what building a rank raised
                self._die(raised if is_ours else EngineDeadError(f"Rank {rank} failed: {raised}"))
            case _:
                raise AssertionError(f"{type(message).__name__} comes at another time")

    def _take_output(self, output: ModelRunnerOutput) -> None:
        self._results[self._num_results] = output
        self._num_results += 1
        if self._learners:
            rows = self._rows.pop(output.step_id)
            self._unlearnt.append(SampledTokens(output.req_ids, rows, output.sampled_token_ids))

    def _send(self, message: messages.ToRank, ranks: Iterable[int]) -> None:
        """Send to each of these, and read meanwhile: a rank that waits until its answer is taken
        takes nothing.
        """
        if self._death is not None:
            raise self._death
        data = memoryview(messages.frame(message))
        for rank in ranks:
            rest = data
            while rest:
                try:
                    rest = rest[self._streams[rank].send(rest, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    self.take_messages(timeout=0.001)
                except ConnectionError:
                    self._die(EngineDeadError(f"Rank {rank} {self._how_it_ended(rank)}."))

    # ---- life and death ---------------------------------------------------------------------

    def _start(self, setup: messages.RankSetup, start: StartRanks) -> None:
        if self._places is None:
            self._start_here(start)
            others = accept_ranks(self._parallel, self._raise_if_one_ended)
        else:
            setup.config = replace(setup.config, parallel=self._places.parallel)
            others = self._places.accept(self._raise_if_one_ended)
        for rank, stream in others:
            self._listen(rank, stream)
        if self._parallel.uses_process_group(native.is_available()):
            setup.store_address = ""  # rank 0 opens the place where they meet
            self._send(setup, [0])
            while self._store_address is None:
                self.take_messages()
            setup.store_address = self._store_address
        for rank in range(0 if setup.store_address is None else 1, self._parallel.world_size):
            setup.rank = rank
            self._send(setup, [rank])
        while len(self._setup_answers) < self._parallel.world_size:
            self.take_messages()
        first = self._setup_answers[0]
        self.kv_cache_config = first.kv_cache_config
        for rank, built in self._setup_answers.items():
            if built.arithmetic != first.arithmetic:  # ranks would draw different tokens
                raise ConfigError(
                    f"Rank {rank} runs {built.arithmetic}, but rank 0 {first.arithmetic}. Install"
                    f" the same version on all machines of nnodes={self._parallel.num_nodes}, and"
                    f" set TOKENMILL_ISA to what all of them have."
                )
            assert built.kv_cache_config == self.kv_cache_config

    def _start_here(self, start: StartRanks) -> None:
        ends: dict[int, socket.socket] = {}

        def address_of(rank: int) -> socket.socket:
            ends[rank], other = socket.socketpair()
            return other

        self._local = start(self._parallel, 0, address_of)
        for rank, stream in ends.items():
            self._listen(rank, stream)

    def _listen(self, rank: int, stream: socket.socket) -> None:
        self._streams[rank] = stream
        self._selector.register(stream, selectors.EVENT_READ, rank)

    def _raise_if_one_ended(self) -> None:
        """While others are waited for."""
        if self._selector.get_map():
            self.take_messages(timeout=0)

    def _watch(self, streams: list[socket.socket], on_death: Callable[[], None]) -> None:
        """Wait for the end of a stream, without taking anything from it."""
        poll = select.poll()
        for stream in streams:
            poll.register(stream, select.POLLRDHUP)
        poll.poll()
        time.sleep(_DEATH_PATIENCE)  # whoever waits for a step has been told by now
        if self._death is None:
            on_death()

    def _find_cause(self, rank: int) -> None:
        """A rank has noticed that another one failed: let that one tell, and raise it."""
        self._selector.unregister(self._streams[rank])
        end = time.monotonic() + _CAUSE_PATIENCE
        while self._selector.get_map() and time.monotonic() < end:
            self.take_messages(timeout=_CAUSE_PATIENCE)

    def _die(self, error: TokenmillError) -> NoReturn:
        """Nothing works any more: raise why, now and whenever somebody asks again."""
        self._death = self._death or error
        end_ranks(self._local, grace=0.0)  # they may wait for one that will not come
        if self._places is not None:
            self._places.end(grace=0.0)
        self.shutdown()
        raise self._death

    def _how_it_ended(self, rank: int) -> str:
        for each in self._local:
            if each.rank == rank:
                end_ranks([each], grace=0.5)
                return each.how_it_ended()
        if self._places is not None:
            return self._places.how_it_ended(rank)
        return f"on another machine (of nnodes={self._parallel.num_nodes}) has gone"

    @staticmethod
    def _say_goodbye(stream: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it has gone, or takes nothing: it is ended otherwise
            stream.send(messages.frame(messages.Stop()), socket.MSG_DONTWAIT)
        stream.close()


class RankStep:
    """A step that the ranks have been told to make."""

    def __init__(self, executor: MultiprocExecutor, number: int) -> None:
        self._executor = executor
        self._number = number

    def result(self) -> ModelRunnerOutput:
        """Wait for it; to be called once. Raises `EngineDeadError`."""
        return self._executor.take_result(self._number)


class _LoadingAdapter(Future[AdapterInfo]):
    """Is done when all ranks have answered, whose messages are read by whoever asks."""

    def __init__(self, executor: MultiprocExecutor, num_ranks: int) -> None:
        super().__init__()
        self._executor = executor
        self._num_missing = num_ranks
        self._error: TokenmillError | None = None

    def take(self, info: AdapterInfo | None, error: TokenmillError | None) -> None:
        """The answer of one rank."""
        self._num_missing -= 1
        self._error = self._error or error
        if self._num_missing:
            return
        if self._error is not None:
            self.set_exception(self._error)
        else:
            assert info is not None
            self.set_result(info)

    def done(self) -> bool:
        if not super().done():
            self._executor.take_messages(timeout=0)
        return super().done()

    def result(self, timeout: float | None = None) -> AdapterInfo:
        end = None if timeout is None else time.monotonic() + timeout
        while not super().done() and (end is None or time.monotonic() < end):
            self._executor.take_messages(timeout)
        return super().result(0)


def _log_level() -> int:
    return logging.getLogger("tokenmill").getEffectiveLevel()
