"""Compilation in threads: shared, bounded in time, and never anybody else's problem."""

from __future__ import annotations

import threading
import time

import pytest

from tokenmill.errors import ConfigError, InvalidRequestError
from tokenmill.structured_output.compiler import GrammarCompiler
from tokenmill.structured_outputs import StructuredOutputsParams


class SlowBackend:
    """Compiles when it is let."""

    name = "slow"
    eos_token_ids = ()

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.gates: dict[str, threading.Event] = {}

    def compile(self, params):
        source = params.source
        if source in self.gates:
            assert self.gates[source].wait(20)
        if source == "bad":
            raise InvalidRequestError("no", parameter="structured_outputs.regex")
        if source == "broken":
            raise ZeroDivisionError
        self.compiled.append(source)
        return f"grammar of {source}"


def form(source: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=source)


def compiler_of(backend, timeout: float = 5.0) -> GrammarCompiler:
    return GrammarCompiler(lambda: backend, timeout=timeout)


def submit(compiler: GrammarCompiler, source: str):
    return compiler.submit(lambda backend: compiler.compile(backend, form(source)))


def test_what_is_compiled_is_kept():
    backend = SlowBackend()
    compiler = compiler_of(backend)
    jobs = [submit(compiler, source) for source in ("a", "b", "a", "a", "b")]
    assert all(job.wait(60) for job in jobs)
    assert [job.result() for job in jobs][:2] == ["grammar of a", "grammar of b"]
    assert sorted(backend.compiled) == ["a", "b"]


def test_options_make_another_grammar():
    backend = SlowBackend()
    compiler = compiler_of(backend)
    for more in ({}, {"disable_any_whitespace": True}, {"whitespace_pattern": " "}):
        params = StructuredOutputsParams(json={}, **more)
        compiler.submit(lambda backend, p=params: compiler.compile(backend, p)).wait(60)
    assert len(backend.compiled) == 3


def test_only_so_many_are_kept():
    backend = SlowBackend()
    compiler = compiler_of(backend)
    for number in [*range(130), 0]:
        assert submit(compiler, f"a{number}").wait(60)
    assert backend.compiled.count("a0") == 2


def test_a_slow_one_does_not_hold_up_the_next():
    backend = SlowBackend()
    backend.gates["slow"] = threading.Event()
    compiler = compiler_of(backend)
    slow, quick = submit(compiler, "slow"), submit(compiler, "quick")
    assert quick.wait(60)
    assert not slow.is_done
    backend.gates["slow"].set()
    assert slow.wait(60)


def test_an_overdue_job_is_given_up_and_another_thread_takes_its_place():
    backend = SlowBackend()
    compiler = compiler_of(backend, timeout=0.05)
    slow = []
    for number in range(4):
        backend.gates[f"slow{number}"] = threading.Event()
        slow.append(submit(compiler, f"slow{number}"))
    began = time.monotonic()
    for job in slow:
        while not job.wait(0.005):
            for each in slow:
                compiler.give_up_if_overdue(each)
            assert time.monotonic() - began < 60
        with pytest.raises(InvalidRequestError, match=r"takes longer than 0\.05 s"):
            job.result()
    assert submit(compiler, "quick").wait(60)
    for gate in backend.gates.values():
        gate.set()
    # What ends late is told to nobody, and its thread is not counted twice.
    deadline = time.monotonic() + 60
    while compiler._num_lost and time.monotonic() < deadline:
        time.sleep(0.01)
    assert compiler._num_lost == 0
    assert all(submit(compiler, f"again{i}").wait(60) for i in range(4))


def test_whatever_a_backend_raises_is_one_requests_problem(caplog):
    compiler = compiler_of(SlowBackend())
    bad, broken, good = (submit(compiler, source) for source in ("bad", "broken", "good"))
    assert all(job.wait(60) for job in (bad, broken, good))
    with pytest.raises(InvalidRequestError, match=r"^no$"):
        bad.result()
    with pytest.raises(InvalidRequestError, match="ZeroDivisionError"):
        broken.result()
    assert good.result() == "grammar of good"


def test_a_backend_that_cannot_be_built_is_told_to_each():
    def make():
        raise ConfigError("no library")

    compiler = GrammarCompiler(make, timeout=1)
    for _ in range(2):
        job = submit(compiler, "a")
        assert job.wait(60)
        with pytest.raises(InvalidRequestError, match="no library") as caught:
            job.result()
        assert caught.value.parameter == "structured_outputs"


def test_threads_end_with_the_compiler():
    before = threading.active_count()
    compiler = compiler_of(SlowBackend())
    assert all(job.wait(60) for job in [submit(compiler, "a"), submit(compiler, "b")])
    assert threading.active_count() > before
    compiler.shutdown()
    compiler.shutdown()
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before
