"""llama.cpp: python run_llama_cpp.py BATCHED_BENCH MODEL THREADS WORKLOADS REPEATS

Its own tool measures prompts and decoding apart, in one process for each workload.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from statistics import median

from workloads import Figures, Workload, chosen, report


def main(tool: str, model: str, threads: str, workloads: str, repeats: str) -> None:
    begin = time.perf_counter()
    run(tool, model, threads, Workload(1, 1, 1))
    start_seconds = time.perf_counter() - begin
    found = {}
    for name, workload in chosen(workloads).items():
        lines = [run(tool, model, threads, workload) for _ in range(int(repeats))]
        found[name] = Figures(
            whole=workload.num_requests * workload.output_len / median(line["t"] for line in lines),
            prompts=median(line["speed_pp"] for line in lines),
            decode=median(line["speed_tg"] for line in lines) if workload.output_len > 1 else None,
        )
    report("llama.cpp", start_seconds, found)


def run(tool: str, model: str, threads: str, workload: Workload) -> dict[str, float]:
    """One workload; the figures that the tool prints."""
    num_tokens = workload.num_requests * (workload.input_len + workload.output_len)
    command = [
        *(tool, "-m", model, "-t", threads, "--output-format", "jsonl", "-b", "2048"),
        *("-c", str(num_tokens + 256), "-npl", str(workload.num_requests)),
        *("-npp", str(workload.input_len), "-ntg", str(workload.output_len)),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"{tool} failed with exit code {done.returncode}: {done.stderr[-500:]}")
    return json.loads(lines[-1])


if __name__ == "__main__":
    main(*sys.argv[1:])
