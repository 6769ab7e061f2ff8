"""The executor of several processes, with threads in their place that say what a test wants."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from msgspec.structs import replace as replace_struct

from helpers.core import create_request
from helpers.tiny import tiny_llama
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.engine_config import EngineConfig
from tokenmill.config.parallel import ParallelConfig
from tokenmill.contracts.encoding import describe
from tokenmill.contracts.kv_cache import KVCacheSpec
from tokenmill.contracts.plan import GrammarOutput, NewRequestData, SchedulerOutput
from tokenmill.contracts.request import AdapterInfo
from tokenmill.contracts.result import ModelRunnerOutput, SampledTokens
from tokenmill.engine.build import open_model, settle_config
from tokenmill.errors import AdapterError, ConfigError, EngineDeadError
from tokenmill.executor import messages
from tokenmill.executor.launch import LocalRank
from tokenmill.executor.multiproc import MultiprocExecutor

ARGS = EngineArgs(model=str(tiny_llama()), device="cpu", num_kv_blocks=9, max_model_len=64)
BUILT = messages.Built(9, 16, [(("layer",), KVCacheSpec(1, 16, "float32"))], "1.0 on avx2")
FromRank = Callable[["Rank"], None]


@dataclass
class Rank:
    """A rank's end of the stream."""

    number: int
    stream: socket.socket

    def receive(self) -> messages.ToRank:
        return messages.receive_to_rank(self.stream)

    def send(self, message: messages.FromRank) -> None:
        self.stream.sendall(messages.frame(message))

    def build(self) -> messages.RankSetup:
        setup = self.receive()
        if isinstance(setup, messages.Stop):  # another one could not be built
            raise EOFError
        assert isinstance(setup, messages.RankSetup)
        assert setup.rank == self.number
        if setup.store_address == "":
            self.send(messages.StoreAddress("host:7"))
        self.send(BUILT)
        return setup


def settled(**sizes: Any) -> EngineConfig:
    checkpoint = open_model(ARGS, lambda *_: None)
    config = settle_config(ARGS, checkpoint)
    checkpoint.close()
    return replace(config, parallel=ParallelConfig(**sizes))


def be(rank: Rank, behave: FromRank) -> None:
    with contextlib.suppress(EOFError, OSError), rank.stream:
        behave(rank)


@contextlib.contextmanager
def executor(
    behave: FromRank, *, remote: FromRank | None = None, on_death: Any = None, **sizes: Any
) -> Iterator[MultiprocExecutor]:
    """With threads that behave like this; a process that does nothing stands for each."""

    threads: list[threading.Thread] = []

    def start(parallel: ParallelConfig, node: int, address_of: Any) -> list[LocalRank]:
        ranks = []
        for number in parallel.ranks_of_node(node):
            rank = Rank(number, address_of(number))
            threads.append(threading.Thread(target=be, args=(rank, behave), daemon=True))
            threads[-1].start()
            ranks.append(LocalRank(number, subprocess.Popen(["true"], stdin=subprocess.PIPE)))
        return ranks

    made = MultiprocExecutor(ARGS, settled(**sizes), start=start, on_death=on_death)
    try:
        yield made
    finally:
        processes = [each.process for each in made._local]
        made.shutdown()
        made.shutdown()
        for thread in threads:
            thread.join(60)
        assert all(process.poll() is not None for process in processes)


def plan(step_id: int, size: int = 1) -> SchedulerOutput:
    """Of one request, whose prompt has so many tokens."""
    request = create_request([7] * size, request_id="a")
    new = NewRequestData.from_request(
        request, row=0, token_ids=[7] * size, num_computed_tokens=0, block_ids=([1],)
    )
    return SchedulerOutput(step_id, ["a"], [0], [size], [1], [True], scheduled_new_reqs=[new])


def output(step_id: int, token_id: int = 5) -> ModelRunnerOutput:
    return ModelRunnerOutput(step_id, ["a"], [[token_id]])


def steps(rank: Rank) -> None:
    """Does what it is told; the first rank has a result for each step."""
    rank.build()
    executed: list[int] = []
    while not isinstance(message := rank.receive(), messages.Stop):
        if isinstance(message, messages.Execute):
            executed.append(message.plan.step_id)
        if isinstance(message, messages.Sample) and rank.number == 0:
            rank.send(messages.StepResult(output(executed.pop(0))))


def test_results_come_in_the_order_of_the_steps() -> None:
    with executor(steps, tensor_parallel_size=2) as ranks:
        assert ranks.kv_cache_config.num_blocks == 9
        futures = []
        for step_id in range(3):
            ranks.execute_model(plan(step_id))
            futures.append(ranks.sample_tokens(None))
        assert [future.result().step_id for future in futures] == [0, 1, 2]
    with pytest.raises(EngineDeadError, match="was shut down"):
        ranks.execute_model(plan(3))


def test_a_plan_arrives_as_it_was_sent() -> None:
    seen: list[Any] = []

    def keep(rank: Rank) -> None:
        rank.build()
        seen.extend([rank.receive(), rank.receive()])
        rank.send(messages.StepResult(output(4)))
        rank.receive()

    sent, masks = plan(4, 300), GrammarOutput(["a"], b"\x01\x02\x03\x04")
    with executor(keep) as ranks:
        ranks.execute_model(sent)
        assert ranks.sample_tokens(masks).result() == output(4)
    assert seen == [messages.Execute(sent), messages.Sample(masks)]


def test_stages_that_do_not_sample_are_told_the_tokens_with_the_next_plan() -> None:
    told: list[list[SampledTokens]] = []

    def behave(rank: Rank) -> None:
        setup = rank.build()
        assert setup.store_address == ("" if rank.number == 0 else "host:7")
        for step_id in range(3):
            execute = rank.receive()
            assert isinstance(execute, messages.Execute)
            if rank.number == 0:
                told.append(execute.sampled)
                continue
            assert execute.sampled == []
            assert isinstance(rank.receive(), messages.Sample)
            rank.send(messages.StepResult(output(step_id, 40 + step_id)))
        rank.receive()

    with executor(behave, pipeline_parallel_size=2) as ranks:
        futures = []
        for step_id in range(3):
            ranks.execute_model(plan(step_id))
            futures.append(ranks.sample_tokens(None))
            if step_id == 1:
                futures[0].result()
                futures[1].result()
        futures[2].result()
    assert told == [
        [],
        [],
        [SampledTokens(["a"], [0], [[40]]), SampledTokens(["a"], [0], [[41]])],
    ]


def test_large_messages_in_both_directions_do_not_wait_for_each_other() -> None:
    """A rank that is stuck with a result takes no plan."""

    def behave(rank: Rank) -> None:
        rank.build()
        rank.receive(), rank.receive()
        rank.send(messages.StepResult(output(0, 1 << 30)))
        rank.send(messages.LogRecord("tokenmill", 10, "x" * (4 << 20), 0.0))
        rank.receive(), rank.receive()
        rank.send(messages.StepResult(output(1)))
        rank.receive()

    with executor(behave) as ranks:
        ranks.execute_model(plan(0))
        first = ranks.sample_tokens(None)
        time.sleep(0.2)  # until the rank is in the middle of its answer
        ranks.execute_model(plan(1, 1_000_000))
        second = ranks.sample_tokens(None)
        assert first.result().step_id == 0
        assert second.result().step_id == 1


def test_the_rank_that_has_failed_is_named_not_the_one_that_has_noticed() -> None:
    def behave(rank: Rank) -> None:
        rank.build()
        rank.receive()
        if rank.number == 0:
            rank.send(messages.Failed(describe(RuntimeError("another one")), is_consequence=True))
        else:
            time.sleep(0.2)
            rank.send(messages.Failed(describe(ZeroDivisionError("by zero"))))
        rank.receive()

    with executor(behave, tensor_parallel_size=2) as ranks:
        ranks.execute_model(plan(0))
        step = ranks.sample_tokens(None)
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="Rank 1 failed: ZeroDivisionError: by zero"):
                step.result()


def test_a_rank_that_goes_without_a_word() -> None:
    def behave(rank: Rank) -> None:
        rank.build()
        if rank.number == 1:
            assert all_are_there.wait(60)
            return
        rank.receive()

    all_are_there = threading.Event()
    deaths: list[int] = []
    with executor(behave, tensor_parallel_size=2, on_death=lambda: deaths.append(1)) as ranks:
        all_are_there.set()
        end = time.monotonic() + 30
        while not deaths:  # nobody has asked for anything
            assert time.monotonic() < end
            time.sleep(0.01)
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="Rank 1 exited with status 0"):
                ranks.take_result(0)


def test_what_building_a_rank_raises_is_raised() -> None:
    def behave(rank: Rank) -> None:
        rank.receive()
        if rank.number == 1:
            rank.send(messages.Failed(describe(ConfigError("attention_backend='x' is none."))))
        rank.receive()

    with (
        pytest.raises(ConfigError, match="attention_backend='x' is none"),
        executor(behave, tensor_parallel_size=2),
    ):
        pass


def test_ranks_of_another_version_or_instruction_set_are_refused() -> None:
    """They would draw other tokens, each for itself."""

    def behave(rank: Rank) -> None:
        rank.receive()
        rank.send(replace_struct(BUILT, arithmetic=f"1.{rank.number} on avx2"))
        rank.receive()

    with (
        pytest.raises(ConfigError, match=r"Rank 1 runs 1\.1 on avx2, but rank 0 1\.0 on avx2"),
        executor(behave, tensor_parallel_size=2),
    ):
        pass


@pytest.mark.parametrize("fails", [False, True])
def test_an_adapter_is_there_when_all_ranks_have_it(fails: bool) -> None:
    may_answer = threading.Event()

    def behave(rank: Rank) -> None:
        rank.build()
        load = rank.receive()
        assert isinstance(load, messages.LoadAdapter)
        assert load.directory == "/adapters/a"
        if rank.number == 1:
            assert may_answer.wait(60)
        error = describe(AdapterError("no good")) if fails and rank.number == 1 else None
        info = None if error else AdapterInfo("id", 8, 14)
        rank.send(messages.AdapterLoaded(load.number, info, error))
        rank.receive()

    with executor(behave, tensor_parallel_size=2) as ranks:
        loading = ranks.load_adapter("/adapters/a")
        time.sleep(0.05)
        assert not loading.done()
        may_answer.set()
        if fails:
            with pytest.raises(AdapterError, match="no good"):
                loading.result()
        else:
            assert loading.result() == AdapterInfo("id", 8, 14)
        assert loading.done()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_ranks_of_another_machine_come_over_tcp() -> None:
    port = free_port()
    sent_away: list[bytes] = []

    def come(number: int, greeting: bytes | None = None) -> None:
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                stream = socket.create_connection(("127.0.0.1", port))
                break
            time.sleep(0.01)
        if greeting is not None:
            with stream, contextlib.suppress(ConnectionResetError):
                stream.settimeout(4)
                stream.sendall(greeting)
                assert stream.recv(1) == b""
            sent_away.append(greeting)
            return
        rank = Rank(number, stream)
        rank.send(messages.Hello(number))
        be(rank, steps)

    threads = [
        threading.Thread(target=come, args=arguments, daemon=True)
        for arguments in [
            (0, b"GET / HTTP/1.1\r\n\r\n"),
            (0, (1 << 30).to_bytes(8, "little")),  # a gigabyte, as it says
            (1,),
        ]
    ]

    def one_after_the_other() -> None:
        for thread in threads[:-1]:
            thread.start()
            thread.join()
        threads[-1].start()

    threading.Thread(target=one_after_the_other, daemon=True).start()
    sizes = {"tensor_parallel_size": 2, "num_nodes": 2, "master_port": port}
    with executor(steps, **sizes) as ranks:
        assert len(ranks.rank_pids) == 1
        ranks.execute_model(plan(0))
        assert ranks.sample_tokens(None).result().step_id == 0
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert len(sent_away) == 2


def test_a_port_that_is_taken_is_refused() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match=r"master_addr='127\.0\.0\.1' and master_port="),
        executor(steps, pipeline_parallel_size=2, num_nodes=2, master_port=taken.getsockname()[1]),
    ):
        pass


class Places:
    """Ranks that somebody else has started: threads, of which the last one goes after a step."""

    parallel = ParallelConfig(tensor_parallel_size=2, master_addr="there")

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.ends: list[float] = []

    def accept(self, check_others: Callable[[], None]) -> Iterator[tuple[int, socket.socket]]:
        for number in range(2):
            check_others()
            ours, theirs = socket.socketpair()
            rank = Rank(number, theirs)
            threading.Thread(target=be, args=(rank, self.behave), daemon=True).start()
            yield number, ours

    def behave(self, rank: Rank) -> None:
        self.addresses.append(rank.build().config.parallel.master_addr)
        while not isinstance(message := rank.receive(), messages.Stop):
            if isinstance(message, messages.Sample):
                if rank.number == 1:
                    return
                rank.send(messages.StepResult(output(0)))

    def how_it_ended(self, rank: int) -> str:
        return f"went, of {rank + 1}"

    def end(self, *, grace: float = 1.0) -> None:
        self.ends.append(grace)


def test_ranks_that_somebody_else_has_placed() -> None:
    places = Places()
    ranks = MultiprocExecutor(ARGS, settled(tensor_parallel_size=2), places=places)
    assert not ranks.rank_pids
    ranks.execute_model(plan(0))
    assert ranks.sample_tokens(None).result().step_id == 0
    with pytest.raises(EngineDeadError, match="Rank 1 went, of 2"):
        ranks.take_result(1)
    assert places.addresses == ["there", "there"]
    assert places.ends[0] == 0.0, "nobody is waited for"
