"""tokenmill beside vLLM, llama.cpp and OpenVINO GenAI: the same work, one engine after the other.

    python benchmarks/peers/compare.py --peers DIRECTORY [--quick] [--rounds 2] [--json]

Each engine runs in a process, and the peers in environments, of their own (see README.md). Figures
of one run may be compared with one another, and with nothing else. The bars are ratios of tokens
per second: decoding with decoding, whole calls with whole calls, prompts with prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from convert import convert
from rich.console import Console
from rich.table import Table

from tokenmill.checkpoint.names import resolve_model
from tokenmill.config.machine import read_machine

HERE = Path(__file__).parent
MODEL = "smollm2-135m"
ALLOCATORS = ("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4",)

OURS = {
    "tokenmill Q4_1": (MODEL, "bfloat16"),
    "tokenmill Q4_1, int8 KV": (MODEL, "int8"),
    "tokenmill bf16": ("bf16", "bfloat16"),
    "tokenmill bf16, int8 KV": ("bf16", "int8"),
}
OPENVINO = {
    "OpenVINO int4": ("ov-int4", "default"),
    "OpenVINO int8": ("ov-int8", "default"),
    "OpenVINO fp16, bf16 KV": ("ov-fp16", "bf16"),
}
LLAMA_CPP, VLLM = "llama.cpp Q4_1", "vLLM bf16"
BF16_KV = ("tokenmill Q4_1", "tokenmill bf16")
INT8_KV = ("tokenmill Q4_1, int8 KV", "tokenmill bf16, int8 KV")


@dataclass(frozen=True)
class Engine:
    """One engine with one setting."""

    name: str
    command: list[str]
    """Without the last two arguments, the set of workloads and the repeats."""
    needs: list[Path]
    environment: dict[str, str] = field(default_factory=dict)

    def missing(self) -> list[Path]:
        return [path for path in self.needs if not path.exists()]


@dataclass(frozen=True)
class Bar:
    """A ratio to be shown: the best of ours to the best of theirs."""

    what: str
    workload: str
    figure: str
    """`decode`, `whole` or `prompts`."""
    ours: Sequence[str]
    theirs: Sequence[str]
    bar: float
    stretch: float | None = None


BARS = [
    Bar("1 request, decode", "one", "decode", ["tokenmill Q4_1"], [LLAMA_CPP], 1.8),
    Bar("1 request, decode", "one", "decode", ["tokenmill Q4_1"], ["OpenVINO int4"], 2.5),
    Bar("1 request, decode", "one", "decode", ["tokenmill Q4_1"], [VLLM], 4.0),
    Bar("1 request, decode", "one", "decode", ["tokenmill bf16"], [VLLM], 2.0),
    Bar("many requests, whole call", "many", "whole", BF16_KV, [VLLM], 3.0, 4.0),
    Bar("many requests, whole call", "many", "whole", INT8_KV, [VLLM], 3.6, 5.0),
    Bar("many requests, whole call", "many", "whole", BF16_KV, [*OPENVINO], 3.0, 4.0),
    Bar("many requests, whole call", "many", "whole", INT8_KV, [*OPENVINO], 3.6, 5.0),
    Bar("many requests, decode", "many", "decode", BF16_KV, [LLAMA_CPP], 8.0),
    Bar("long prompt", "prompt", "prompts", BF16_KV, [*OPENVINO], 2.5),
    Bar("long prompt", "prompt", "prompts", BF16_KV, [VLLM], 2.5),
    Bar("long prompt", "prompt", "prompts", BF16_KV, [LLAMA_CPP], 12.0),
]

SHOWN = [
    ("one", "decode"), ("one", "whole"), ("many", "decode"), ("many", "whole"),
    ("prompt", "prompts"),
]  # fmt: skip
"""Workloads and their figures, in columns."""

Figures = dict[str, dict[str, dict[str, float]]]
"""Engine to workload to figure to tokens per second."""


def engines(options: argparse.Namespace, num_threads: int) -> list[Engine]:
    """All of them, at their best settings."""
    peers, here = options.peers, sys.executable
    bf16 = convert(MODEL, peers / "hf-bf16")
    gguf = resolve_model(MODEL)
    vllm, openvino = options.vllm_python, options.openvino_python
    preloaded = [*map(Path, ALLOCATORS), vllm.parent.parent / "lib" / "libiomp5.so"]
    last = num_threads - 1
    return [
        *(
            Engine(
                name,
                [here, "run_tokenmill.py", str(bf16 if model == "bf16" else model), kv_dtype],
                [],
            )
            for name, (model, kv_dtype) in OURS.items()
        ),
        Engine(
            LLAMA_CPP,
            [here, "run_llama_cpp.py", str(options.llama_cpp), str(gguf), str(num_threads)],
            [options.llama_cpp],
        ),
        *(
            Engine(
                name,
                [str(openvino), "run_openvino.py", str(peers / model), kv_dtype],
                [openvino, peers / model],
            )
            for name, (model, kv_dtype) in OPENVINO.items()
        ),
        Engine(
            VLLM,
            [str(vllm), "run_vllm.py", str(bf16)],
            [vllm, *preloaded],
            {
                "LD_PRELOAD": ":".join(map(str, preloaded)),
                "VLLM_CPU_OMP_THREADS_BIND": f"0-{last}",
                "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
                "VLLM_CPU_KVCACHE_SPACE": "2",
            },
        ),
    ]


def run(engine: Engine, workloads: str, repeats: int, console: Console) -> dict | None:
    """One engine's report, or None where it is missing or fails, which is said."""
    missing = engine.missing()
    if missing:
        console.print(f"{engine.name}: missing, there is no {missing[0]}")
        return None
    console.print(f"{engine.name} ...", style="dim")
    done = subprocess.run(
        [*engine.command, workloads, str(repeats)],
        cwd=HERE,
        env={**os.environ, **engine.environment},
        capture_output=True,
        text=True,
    )
    reports = [line for line in done.stdout.splitlines() if line.startswith('{"engine"')]
    if not reports:
        lines = (done.stderr or done.stdout).strip().splitlines()[-3:]
        console.print(f"{engine.name}: failed, {' / '.join(lines)}")
        return None
    return json.loads(reports[-1])


def merged(rounds: list[Figures]) -> Figures:
    """Medians over the rounds."""
    found: Figures = {}
    for name in dict.fromkeys(name for each in rounds for name in each):
        mine = [each[name] for each in rounds if name in each]
        found[name] = {
            workload: {
                figure: median(each[workload][figure] for each in mine)
                for figure, value in figures.items()
                if value is not None
            }
            for workload, figures in mine[0].items()
        }
    return found


def ratios(found: Figures) -> Iterator[dict]:
    """Each bar with the figures that it compares; those of missing engines are None."""
    for bar in BARS:
        ours, theirs = best(found, bar.ours, bar), best(found, bar.theirs, bar)
        ratio = ours[1] / theirs[1] if ours and theirs else None
        yield {**asdict(bar), "best_of_ours": ours, "best_of_theirs": theirs, "ratio": ratio}


def best(found: Figures, names: Sequence[str], bar: Bar) -> tuple[str, float] | None:
    figures = [
        (name, found[name][bar.workload][bar.figure])
        for name in names
        if bar.figure in found.get(name, {}).get(bar.workload, {})
    ]
    return max(figures, key=lambda each: each[1]) if figures else None


def show(console: Console, found: Figures) -> None:
    table = Table(title="tokens per second", title_justify="left")
    table.add_column("engine", no_wrap=True)
    for workload, figure in SHOWN:
        table.add_column(f"{workload}: {figure}", justify="right")
    for name, figures in found.items():
        cells = [figures.get(workload, {}).get(figure) for workload, figure in SHOWN]
        table.add_row(name, *("" if cell is None else f"{cell:,.1f}" for cell in cells))
    console.print(table)
    bars = Table(title="ratios", title_justify="left")
    for heading in ("what", "ours", "theirs", "ratio", "bar", "stretch"):
        is_text = heading in ("what", "ours", "theirs")
        bars.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    for row in ratios(found):
        ours, theirs = row["best_of_ours"], row["best_of_theirs"]
        bars.add_row(
            row["what"],
            ours[0] if ours else "missing",
            theirs[0] if theirs else f"missing: {' or '.join(row['theirs'])}",
            "" if row["ratio"] is None else f"{row['ratio']:.2f}",
            f"{row['bar']}",
            "" if row["stretch"] is None else f"{row['stretch']}",
        )
    console.print(bars)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    directory = Path(os.environ.get("PEERS", ".peers"))
    parser.add_argument("--peers", type=Path, default=directory, help="default: $PEERS or .peers")
    parser.add_argument("--vllm-python", type=Path, help="default: PEERS/vllm/bin/python")
    parser.add_argument("--openvino-python", type=Path, help="default: PEERS/openvino/bin/python")
    parser.add_argument(
        "--llama-cpp", type=Path, help="default: PEERS/llama.cpp/llama-batched-bench"
    )
    parser.add_argument("--only", help="names of engines, with semicolons; default: all")
    parser.add_argument(
        "--rounds", type=int, default=1, help="how often all engines are run in turn"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="of each workload in an engine's turn"
    )
    parser.add_argument("--quick", action="store_true", help="small work, to see that all is there")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args()
    options.peers = options.peers.absolute()
    options.vllm_python = options.vllm_python or options.peers / "vllm/bin/python"
    options.openvino_python = options.openvino_python or options.peers / "openvino/bin/python"
    options.llama_cpp = options.llama_cpp or options.peers / "llama.cpp/llama-batched-bench"
    return options


def main() -> None:
    options = parse()
    messages = Console(stderr=True, highlight=False)
    chosen = engines(options, read_machine().num_cpus)
    if options.only:
        wanted = options.only.split(";")
        unknown = set(wanted) - {engine.name for engine in chosen}
        if unknown:
            raise SystemExit(
                f"--only: no {min(unknown)!r}; there are: {'; '.join(e.name for e in chosen)}"
            )
        chosen = [engine for engine in chosen if engine.name in wanted]
    workloads, repeats = ("quick", 1) if options.quick else ("full", options.repeats)
    reports = [
        {engine.name: run(engine, workloads, repeats, messages) for engine in chosen}
        for _ in range(options.rounds)
    ]
    found = merged(
        [{name: r["figures"] for name, r in each.items() if r is not None} for each in reports]
    )
    if options.json:
        print(json.dumps({"rounds": reports, "figures": found, "ratios": [*ratios(found)]}))
    else:
        width = None if sys.stdout.isatty() else 140
        show(Console(highlight=False, width=width), found)


if __name__ == "__main__":
    main()
