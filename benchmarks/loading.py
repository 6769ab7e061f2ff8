"""How long loading takes beside reading the file's bytes, and how much memory beside the weights.

    python benchmarks/loading.py [--directory DIRECTORY] [--rounds 3] [--json]

A checkpoint of the shape of Llama 3.2 1B (bfloat16, random, 2.5 GB in shards) is written to
DIRECTORY, or to a temporary one. Each measurement runs in a process of its own:

    read   every byte of the shards into small buffers, with as many threads as the kernels have
    keep   the same into memory of the file's size, on huge pages, as packed weights have it
    load   from the opened checkpoint to packed weights, in bfloat16, int8 and int4

`cold` drops the files from the page cache first (posix_fadvise; a hypervisor may still hold them),
`warm` finds them there. The bars: a cold load takes at most 1.5 times as long as a cold read in the
same run, and the process grows by at most 1.2 times the packed weights while it loads. Memory is
the peak of resident pages, those of mapped files included. `keep` tells what the memory itself
costs: where a hypervisor hands out pages when they are first touched, that may be more than the
disk. `--small-pages` measures without huge pages, whose memory is handed out at once on such a
machine; kernels read from them more slowly.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from one_billion_shape import write_checkpoint

FORMATS = ("bf16", "int8", "int4")
TIME_BAR, MEMORY_BAR = 1.5, 1.2
CHUNK = 8 << 20


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def drop_from_cache(directory: Path) -> None:
    """Dirty pages cannot be dropped, so they are written first."""
    for path in shards(directory):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_all(directory: Path, num_threads: int, *, keep: bool = False) -> float:
    """Seconds."""
    parts = [
        (path, begin)
        for path in shards(directory)
        for begin in range(0, path.stat().st_size, CHUNK)
    ]

    kept = memory(len(parts) * CHUNK) if keep else None

    def read(number: int) -> None:
        buffer = memoryview(bytearray(CHUNK))
        for index, (path, begin) in list(enumerate(parts))[number::num_threads]:
            if kept is not None:
                buffer = kept[index * CHUNK : (index + 1) * CHUNK]
            with path.open("rb", buffering=0) as stream:
                os.preadv(stream.fileno(), [buffer], begin)

    begin = time.perf_counter()
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(read, range(num_threads)))
    return time.perf_counter() - begin


def memory(num_bytes: int) -> memoryview:
    """On huge pages where the system allows them; not touched yet."""
    from tokenmill.kernels.gemm import PackedBlocks

    return PackedBlocks.empty_buffer(num_bytes).numpy().data


def resident() -> tuple[int, int]:
    """(now, at most so far) bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
    return int(sizes["VmRSS"]) << 10, int(sizes["VmHWM"]) << 10


def load(directory: Path, format_: str, *, cold: bool) -> dict[str, float]:
    """One load in this process."""
    from tokenmill.config.engine_args import EngineArgs
    from tokenmill.engine.build import open_model, settle_config
    from tokenmill.kernels import native
    from tokenmill.layers.kernels import layer_kernels
    from tokenmill.models.loader import load_model

    import torch  # isort: skip

    quantization = None if format_ == "bf16" else format_
    args = EngineArgs(model=str(directory), device="cpu", quantization=quantization)
    checkpoint = open_model(args, lambda stage, done, total: None)
    config = settle_config(args, checkpoint)
    native.set_num_threads(config.num_threads)
    torch.set_num_threads(1)
    kernels = layer_kernels(torch.bfloat16, quantization)
    if cold:
        drop_from_cache(directory)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, _ = resident()
    begin, cpu_begin = time.perf_counter(), time.process_time()
    model = load_model(config.model, checkpoint, kernels=kernels)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    after, peak = resident()
    assert model is not None
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "weights": config.ledger.weights,
        "file": checkpoint.num_bytes,
        "grown": after - before,
        "peak": peak - before,
    }


def child(directory: Path, what: str, *, cold: bool, small_pages: bool) -> dict[str, Any]:
    """Run one measurement in a process of its own."""
    command = [sys.executable, __file__, "--directory", str(directory), "--child", what]
    command += ["--cold"] if cold else []
    command += ["--small-pages"] if small_pages else []
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def disable_huge_pages() -> None:
    """In this process (PR_SET_THP_DISABLE of Linux)."""
    if ctypes.CDLL(None).prctl(41, 1, 0, 0, 0) != 0:
        raise SystemExit("--small-pages: this system cannot turn huge pages off")


def run_child(options: argparse.Namespace) -> None:
    if options.small_pages:
        disable_huge_pages()
    if options.child in ("read", "keep"):
        if options.cold:
            drop_from_cache(options.directory)
        num_threads = len(os.sched_getaffinity(0))
        keep = options.child == "keep"
        print(json.dumps({"seconds": read_all(options.directory, num_threads, keep=keep)}))
    else:
        print(json.dumps(load(options.directory, options.child, cold=options.cold)))


def measure(directory: Path, rounds: int, *, small_pages: bool) -> list[dict[str, Any]]:
    """A row for each format and state of the cache; reads and loads alternate."""
    rows = []
    for cold in (True, False):
        run = functools.partial(child, directory, cold=cold, small_pages=small_pages)
        run("read")
        reads, keeps, loads = [], [], {name: [] for name in FORMATS}
        for _ in range(rounds):
            keeps.append(run("keep")["seconds"])
            for name in FORMATS:
                reads.append(run("read")["seconds"])
                loads[name].append(run(name))
        for name in FORMATS:
            seconds = median(each["seconds"] for each in loads[name])
            peak = max(each["peak"] for each in loads[name])
            first = loads[name][0]
            rows.append(
                {
                    "format": name,
                    "cache": "cold" if cold else "warm",
                    "read_seconds": median(reads),
                    "keep_seconds": median(keeps),
                    "load_seconds": seconds,
                    "load_bytes_per_second": first["file"] / seconds,
                    "time_ratio": seconds / median(reads),
                    "packed_bytes": first["weights"],
                    "peak_bytes": peak,
                    "memory_ratio": peak / first["weights"],
                }
            )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'':12}{'read s':>8}{'keep s':>8}{'load s':>8}{'GB/s':>7}{'ratio':>7}", end="")
    print(f"{'packed GB':>11}{'peak GB':>9}{'ratio':>7}")
    for row in rows:
        print(
            f"{row['format']:5}{row['cache']:7}{row['read_seconds']:8.2f}{row['keep_seconds']:8.2f}"
            f"{row['load_seconds']:8.2f}"
            f"{row['load_bytes_per_second'] / 1e9:7.2f}{row['time_ratio']:7.2f}"
            f"{row['packed_bytes'] / 1e9:11.2f}{row['peak_bytes'] / 1e9:9.2f}"
            f"{row['memory_ratio']:7.2f}"
        )
    print(f"bars: {TIME_BAR} for a cold load of bf16, {MEMORY_BAR} for memory")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, help="where the checkpoint is, or goes; kept")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--small-pages", action="store_true", help="turn huge pages off")
    parser.add_argument("--child", choices=["read", "keep", *FORMATS], help=argparse.SUPPRESS)
    parser.add_argument("--cold", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_child(options)
        return
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.directory or Path(temporary)
        write_checkpoint(directory)
        rows = measure(directory, options.rounds, small_pages=options.small_pages)
    if options.json:
        print(json.dumps({"bars": {"time": TIME_BAR, "memory": MEMORY_BAR}, "rows": rows}))
    else:
        show(rows)


if __name__ == "__main__":
    main()
