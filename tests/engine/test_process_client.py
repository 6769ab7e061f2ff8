"""A core in its own process, seen from the front end: one interface with a core in this one."""

from __future__ import annotations

import logging
import os
import signal
import stat
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.core import create_request
from helpers.served import FACTORIES, process_exists, prompt_of, serve_args
from helpers.served_core import READER_FILE, STEP_SECONDS, expected_ids, fake_core
from helpers.timing import in_time
from tokenmill.engine import build
from tokenmill.engine.client import InProcessClient
from tokenmill.engine.core_client import ProcessClient
from tokenmill.engine.llm_engine import LLMEngine
from tokenmill.errors import EngineDeadError, InvalidRequestError
from tokenmill.sampling_params import RequestOutputKind, SamplingParams

BOTH = pytest.mark.parametrize("kind", ["in this process", "in its own"])


@contextmanager
def client(kind="in its own", factory="fake_core", **settings):
    args = serve_args(**settings)
    checkpoint = build.open_model(args, lambda *_: None)
    config = build.settle_config(args, checkpoint)
    if kind == "in its own":
        made = ProcessClient(args, config, factory=f"{FACTORIES}:{factory}")
        made.wait_until_ready()
    else:
        made = InProcessClient(fake_core(args, config, lambda *_: None))
    front_end = build.build_front_end(args, checkpoint, config, None)
    engine = LLMEngine(front_end, made)
    try:
        yield engine, made
    finally:
        engine.close()
        checkpoint.close()


FINAL = SamplingParams(max_tokens=12, output_kind=RequestOutputKind.FINAL_ONLY)


@BOTH
def test_an_engine_works_with_either(kind):
    with client(kind) as (engine, made):
        for i in range(5):
            engine.add_request(str(i), prompt_of(i), FINAL)
        engine.add_request("gone", prompt_of(9), FINAL)
        engine.step()
        (gone,) = engine.abort_request("gone")
        assert gone.outputs[0].finish_reason == "abort"
        finished = {}
        while engine.has_unfinished_requests():
            finished |= {output.request_id: output for output in engine.step()}
        assert sorted(finished) == list("01234")
        for i in range(5):
            assert finished[str(i)].outputs[0].token_ids == expected_ids(prompt_of(i), 12)
        made.abort_requests([])
        done = made.reset_prefix_cache()
        if kind == "in its own":
            end = time.monotonic() + 60
            while not done.done():
                assert time.monotonic() < end
                made.receive()
        assert done.result()


@BOTH
def test_after_the_end_nothing_goes(kind):
    with client(kind) as (_, made):
        made.shutdown()
        made.shutdown()
        with pytest.raises(EngineDeadError):
            made.add_requests([create_request(4)])


def test_a_refusal_comes_with_the_outputs():
    with client(factory="small_core") as (_, made):
        made.add_requests([create_request(400, max_tokens=1)])
        with pytest.raises(InvalidRequestError, match="KV cache"):
            made.get_outputs()


def test_a_killed_core_is_told_of():
    with client() as (engine, made):
        engine.add_request("a", prompt_of(1), FINAL)
        os.kill(made.pid, signal.SIGKILL)
        reset = made.reset_prefix_cache()
        with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
            run_to_end(engine)
        assert not made.is_alive
        made.close()
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            reset.result(timeout=0)


@pytest.mark.parametrize("moment", ["before it listens", "when it is ready", "after its end"])
def test_nobody_waits_for_the_core_when_sending(moment):
    """A front end that did would stand still while its core starts, or for ever."""
    args = serve_args()
    checkpoint = build.open_model(args, lambda *_: None)
    config = build.settle_config(args, checkpoint)
    checkpoint.close()
    made = ProcessClient(args, config, factory=f"{FACTORIES}:fake_core")
    if moment != "before it listens":
        made.wait_until_ready()
    else:
        os.kill(made.pid, signal.SIGSTOP)
    if moment == "after its end":
        os.kill(made.pid, signal.SIGKILL)
        while made.is_alive:
            time.sleep(0.01)
        time.sleep(0.1)  # the socket has noticed as well
    requests = [create_request(1000) for _ in range(200)]
    sender = threading.Thread(target=made.add_requests, args=(requests,), daemon=True)
    sender.start()
    sender.join(timeout=60)
    assert not sender.is_alive()
    made.close()


def test_the_end_of_standard_input_is_the_end_of_the_core():
    """Where the kernel does not kill it when its front end dies."""
    with client() as (_, made):
        made._process.stdin.close()
        made._process.wait(timeout=60)
        assert made.how_it_ended() == "exited with status 1"


def test_the_socket_lies_in_a_private_place_and_only_until_the_two_are_connected(monkeypatch):
    # A directory of its own: other engines of this machine have theirs in the common one.
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        check_the_socket(Path(directory))


def check_the_socket(directory):
    args = serve_args()
    checkpoint = build.open_model(args, lambda *_: None)
    made = ProcessClient(
        args, build.settle_config(args, checkpoint), factory=f"{FACTORIES}:fake_core"
    )
    checkpoint.close()
    try:
        end = time.monotonic() + 60
        while not (new := list(directory.glob("tokenmill-*/core"))):
            assert time.monotonic() < end
        (socket,) = new
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
        made.wait_until_ready()
        assert not socket.parent.exists()
    finally:
        made.close()
    assert not process_exists(made.pid)


def test_logs_of_the_core_are_the_front_ends(caplog):
    caplog.set_level(logging.INFO, logger="tokenmill")
    with client(factory="talkative") as (_, made):
        made.reset_prefix_cache()
        while not any("from a thread" in record.getMessage() for record in caplog.records):
            made.receive()
    records = {record.getMessage().split("\n")[0]: record for record in caplog.records}
    said = records["built with 100% care"]
    assert (said.name, said.levelno) == ("tokenmill.test", logging.WARNING)
    assert abs(said.created - time.time()) < 60
    assert "ZeroDivisionError" in records["something failed"].getMessage()
    assert "not worth telling" not in records


def test_a_core_that_is_built_says_at_once_what_it_waits_for(monkeypatch, tmp_path):
    file = tmp_path / "read"
    monkeypatch.setenv(READER_FILE, str(file))

    class Reader(logging.Handler):
        def emit(self, record):
            if record.getMessage() == f"waiting for {file}":
                file.touch()

    reader, logger = Reader(), logging.getLogger("tokenmill.test")
    logger.addHandler(reader)
    try:
        with client(factory="waits_for_its_reader"):
            assert file.exists()
    finally:
        logger.removeHandler(reader)


def test_an_idle_core_sleeps():
    with client() as (_, made):
        in_time(lambda: time.sleep(1.0), 0.05, clock=lambda: cpu_seconds(made.pid), num_tries=3)


def test_a_core_with_work_does_not_spin_between_messages(monkeypatch):
    """While a step runs elsewhere (here: sleeps) the core's process uses next to nothing."""
    monkeypatch.setenv(STEP_SECONDS, "0.1")
    with client() as (engine, made):

        def work():
            engine.add_request("a", prompt_of(1), FINAL)
            run_to_end(engine)

        in_time(work, 0.25, clock=lambda: cpu_seconds(made.pid), num_tries=3)


def run_to_end(engine: LLMEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
