"""`tokenmill serve` in a process of its own, with a tiny model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time

from helpers.live_server import Client
from helpers.tiny import tiny_llama

READY = re.compile(r"is ready after .*?\n.*address +(\S+)", re.DOTALL)


class ServeProcess:
    """Runs until the end of the `with` block, where it is killed if it has not ended before."""

    def __init__(self, *arguments, model=None, max_num_seqs=16, num_kv_blocks=64, **environment):
        command = [
            sys.executable,
            "-c",
            "from tokenmill.entrypoints.cli.main import main; main()",
            "serve",
            str(model or tiny_llama()),
            "--port",
            "0",
            "--dtype",
            "float32",
            "--num-kv-blocks",
            str(num_kv_blocks),
            "--max-num-seqs",
            str(max_num_seqs),
            "--num-threads",
            "1",
            *arguments,
        ]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        os.set_blocking(self.process.stderr.fileno(), False)
        self._stderr = b""

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()

    @property
    def stderr(self):
        while piece := self.process.stderr.read():
            self._stderr += piece
        return self._stderr.decode()

    def wait_until_ready(self, seconds=90.0):
        """The address that the banner names."""
        end = time.monotonic() + seconds
        while (match := READY.search(self.stderr.replace("\\n", "\n"))) is None:
            assert self.process.poll() is None, self.stderr
            assert time.monotonic() < end, self.stderr
            time.sleep(0.02)
        return match[1]

    def client(self):
        return Client(int(self.wait_until_ready().rpartition(":")[2]))

    def signal(self, number):
        self.process.send_signal(number)

    def wait(self, seconds=30.0):
        """The exit code."""
        return self.process.wait(seconds)

    def children(self):
        """Process ids of the children, whatever they are."""
        pid = self.process.pid
        found = []
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += [int(child) for child in file.read().split()]
        return found

    def core(self):
        """Process id of the engine core."""
        cores = [pid for pid in self.children() if _threads(pid) > 1]
        assert len(cores) == 1, cores
        return cores[0]

    def json_lines(self):
        return [json.loads(line) for line in self.stderr.splitlines()]


def _threads(pid):
    return len(os.listdir(f"/proc/{pid}/task"))
