"""The pool runs every task once, however many threads there are and whoever calls it."""

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from tokenmill import _native


@pytest.fixture(autouse=True)
def _same_threads_afterwards() -> Iterator[None]:
    before = _native.num_threads()
    yield
    _native.set_num_threads(before)


def count(num_tasks: int, repeats: int) -> torch.Tensor:
    counts = torch.zeros(num_tasks, dtype=torch.int32)
    _native.count_tasks(counts, repeats)
    return counts


def run_python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        check=True,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
@pytest.mark.parametrize("num_tasks", [0, 1, 2, 7, 1000])
def test_each_task_runs_once_a_job(num_threads, num_tasks) -> None:
    _native.set_num_threads(num_threads)
    assert _native.num_threads() == num_threads
    assert count(num_tasks, 50).tolist() == [50] * num_tasks


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("num_tasks", [0, 1, 2, 7, 100])
def test_tasks_that_are_claimed_together_run_once(num_threads, num_tasks) -> None:
    _native.set_num_threads(num_threads)
    counts = torch.zeros(num_tasks, dtype=torch.int32)
    for most_at_once in (1, 3, 64):
        _native.count_tasks(counts, 20, most_at_once=most_at_once)
    assert counts.tolist() == [60] * num_tasks


@pytest.mark.parametrize("num_threads", [1, 2, 3, 64])
@pytest.mark.parametrize("num_tasks", [0, 1, 2, 30, 31, 1000])
def test_shares_are_neighbours_of_about_equal_size(num_threads, num_tasks) -> None:
    shares = [_native.share_of(num_tasks, thread, num_threads) for thread in range(num_threads)]
    borders = [0, *(end for _, end in shares)]
    assert shares == list(itertools.pairwise(borders))
    assert borders[-1] == num_tasks
    sizes = [end - begin for begin, end in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] == max(sizes), "the caller, which begins first, has no smaller share"


def test_idle_threads_sleep() -> None:
    program = """
import time, torch
from tokenmill import _native
_native.set_num_threads(4)
_native.count_tasks(torch.zeros(64, dtype=torch.int32), 20)
for _ in range(5):
    time.sleep(0.05)
    begin = time.process_time()
    time.sleep(0.5)
    seconds = time.process_time() - begin
    if seconds < 0.05:
        break
print(seconds)
"""
    assert float(run_python(program).stdout) < 0.05


def test_threads_may_change_between_jobs() -> None:
    for num_threads in [2, 1, 4, 2, 3]:
        _native.set_num_threads(num_threads)
        assert count(64, 10).tolist() == [10] * 64


def test_callers_take_turns() -> None:
    _native.set_num_threads(2)
    results: list[list[int]] = []
    callers = [
        threading.Thread(target=lambda: results.append(count(32, 200).tolist())) for _ in range(3)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert results == [[200] * 32] * 3


def test_a_forked_child_has_a_pool_of_its_own() -> None:
    program = """
import os, torch
from tokenmill import _native
def works():
    counts = torch.zeros(64, dtype=torch.int32)
    _native.count_tasks(counts, 20)
    return counts.tolist() == [20] * 64
_native.set_num_threads(3)
assert works()
child = os.fork()
if child == 0:
    os._exit(0 if works() and _native.num_threads() == 3 else 1)
assert os.waitpid(child, 0)[1] == 0
assert works()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("num_threads", [0, -1, 100_000])
def test_impossible_counts_are_refused(num_threads) -> None:
    with pytest.raises(ValueError, match="it takes 1 to 1024"):
        _native.set_num_threads(num_threads)


def test_affinity_is_the_default() -> None:
    one = min(os.sched_getaffinity(0))
    program = "from tokenmill import _native; print(_native.num_threads())"
    command = [
        sys.executable,
        "-c",
        f"import os; os.sched_setaffinity(0, {{{one}}}); {program}",
    ]
    assert subprocess.run(command, check=True, capture_output=True).stdout.split() == [b"1"]


@pytest.mark.parametrize("isa", ["amx2", "AVX", "scalar"])
def test_an_unknown_instruction_set_is_refused(isa) -> None:
    program = """
from tokenmill.errors import ConfigError
from tokenmill.kernels import native
try:
    native.active_isa()
except ConfigError as error:
    print(error)
"""
    result = run_python(program, TOKENMILL_ISA=isa)
    assert result.stdout.strip() == (
        f"TOKENMILL_ISA is {isa}; it takes {', '.join(_native.isas()[:0:-1])} or reference"
    )


def test_limits_are_positive() -> None:
    assert _native.measure_read_bandwidth(1 << 20, 2) > 1e8


def test_without_the_module_torch_runs_and_a_warning_says_so() -> None:
    program = """
import logging, sys
logging.basicConfig(format="%(message)s")
sys.modules["tokenmill._native"] = None
from tokenmill.kernels import native
print(native.active_isa(), native.is_available(), native.is_available())
"""
    result = run_python(program)
    assert result.stdout.split() == ["reference", "False", "False"]
    assert result.stderr.count("The native kernels are not installed") == 1
    assert "slower" in result.stderr


def test_reference_turns_the_kernels_off() -> None:
    program = """
from tokenmill.errors import ConfigError
from tokenmill.kernels import native
print(native.active_isa())
try:
    native.module()
except ConfigError as error:
    print(error)
"""
    result = run_python(program, TOKENMILL_ISA="reference")
    assert result.stdout.splitlines() == [
        "reference",
        "The native kernels cannot be used here; take the torch kernels instead.",
    ]
    assert result.stderr == ""
