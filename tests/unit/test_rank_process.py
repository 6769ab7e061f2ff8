"""What the process of a rank does before it computes."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from helpers.served import process_exists
from tokenmill.config.parallel import ParallelConfig


def test_processors_are_shared_by_the_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenmill.executor.rank_process import _take_processors

    taken: list[list[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 6, 9, 11})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, processors: taken.append(processors))
    two = ParallelConfig(tensor_parallel_size=2)
    assert [_take_processors(two.place(rank)) for rank in range(2)] == [2, 2]
    assert taken == [[3, 5], [6, 9]]
    on_two_machines = ParallelConfig(tensor_parallel_size=2, num_nodes=2)
    assert _take_processors(on_two_machines.place(1)) == 5
    assert taken.pop() == [3, 5, 6, 9, 11]
    # Where there are more ranks than processors, each may run on all of them.
    crowd = ParallelConfig(tensor_parallel_size=8)
    assert _take_processors(crowd.place(7)) == 1
    assert len(taken) == 2


LIFELINE = """
import os, subprocess, sys, time
child = subprocess.Popen(
    [sys.executable, "-c", '''
import os, sys, time
from tokenmill.executor.lifeline import start_lifeline
start_lifeline(int(sys.argv[1]), dies_with_thread=False)
print("alive", flush=True)
time.sleep(600)
''', str(os.getpid())],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE,
)
child.stdout.readline()
print(child.pid, flush=True)
if sys.argv[1] == "stays":
    child.stdin.close()
    child.wait()
    print("ended", flush=True)
else:
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("parent", ["stays", "dies"])
def test_a_rank_ends_with_its_parent_or_the_pipe(parent: str) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", LIFELINE, parent]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.wait(60)
        end = time.monotonic() + 30
        while process_exists(pid):
            assert time.monotonic() < end, "it is an orphan"
            time.sleep(0.01)


WITHOUT_STREAMS = """
import os
for number in (0, 1, 2):
    os.close(number)
import sys
sys.stdin = sys.stdout = sys.stderr = None
from tokenmill.executor.lifeline import begin_child, leave
begin_child()
leave(7)
"""


def test_a_process_without_standard_streams_comes_and_goes() -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    assert (
        subprocess.run([sys.executable, "-c", WITHOUT_STREAMS], env=env, timeout=60).returncode == 7
    )
