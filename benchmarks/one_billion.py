"""A model of a billion parameters beside what the machine allows, and beside vLLM.

    python benchmarks/one_billion.py [--peers DIRECTORY] [--repeats 2] [--json]

The shape is that of Llama 3.2 1B, the weights are random (`load_format=dummy`, for vLLM as well):
decoding of 1 and of 16 requests with hardly a prompt, and a prompt of 1,024 tokens. Each engine
runs in a process of its own, one after the other. The limits are measured in the same run: a token
takes at least as long as its step's bytes (all weights once, each request's keys and values) take
to be read, and a prompt as long as its operations take at the processor's peak.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent / "peers"))

from compare import ALLOCATORS, Engine, merged, run
from one_billion_shape import CONFIG, write_config
from rich.console import Console
from rich.table import Table
from workloads import LARGE

from tokenmill.config.machine import read_machine

FORMATS = {"bf16": None, "int8": "int8", "int4": "int4"}
VLLM = "vLLM bf16"
DUMMY = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 2048}
SHOWN = {"one": "decode", "sixteen": "decode", "prompt": "prompts"}
"""Workload to figure."""


@dataclass(frozen=True)
class Limits:
    """What the machine can do with weights of one format."""

    weight_bytes: int
    bytes_per_second: float
    flops: float

    def of(self, workload: str) -> float:
        """Most tokens per second."""
        work = LARGE[workload]
        if workload == "prompt":
            return self.flops / (2 * _layer_parameters() + _attention_flops(work.input_len))
        keys = work.input_len + work.output_len / 2
        step = self.weight_bytes + work.num_requests * keys * _kv_bytes_per_token()
        return work.num_requests * self.bytes_per_second / step


def _layer_parameters() -> int:
    """Without the vocabulary: of a prompt, one row of logits is computed."""
    hidden, heads = CONFIG["hidden_size"], CONFIG["num_attention_heads"]
    attention = 2 * hidden * CONFIG["head_dim"] * (heads + CONFIG["num_key_value_heads"])
    return CONFIG["num_hidden_layers"] * (attention + 3 * hidden * CONFIG["intermediate_size"])


def _attention_flops(length: int) -> float:
    """Of a prompt's average token."""
    size = CONFIG["num_attention_heads"] * CONFIG["head_dim"]
    return CONFIG["num_hidden_layers"] * 4.0 * size * length / 2


def _kv_bytes_per_token() -> int:
    """In bfloat16."""
    size = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    return CONFIG["num_hidden_layers"] * 2 * size * 2


def engines(directory: Path, peers: Path) -> list[Engine]:
    ours = [
        Engine(
            f"tokenmill {name}",
            [
                sys.executable,
                "run_tokenmill.py",
                str(directory),
                "bfloat16",
                json.dumps({**DUMMY, "quantization": quantization, "max_num_seqs": 16}),
            ],
            [],
        )
        for name, quantization in FORMATS.items()
    ]
    vllm = peers / "vllm/bin/python"
    preloaded = [*map(Path, ALLOCATORS), peers / "vllm/lib/libiomp5.so"]
    settings = {key: DUMMY[key] for key in ("load_format", "skip_tokenizer_init")}
    return [
        *ours,
        Engine(
            VLLM,
            [str(vllm), "run_vllm.py", str(directory), json.dumps(settings)],
            [vllm, *preloaded],
            {
                "LD_PRELOAD": ":".join(map(str, preloaded)),
                "VLLM_CPU_OMP_THREADS_BIND": f"0-{read_machine().num_cpus - 1}",
                "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
                "VLLM_CPU_KVCACHE_SPACE": "2",
            },
        ),
    ]


def measured_limits(directory: Path) -> dict[str, Limits]:
    """By engine."""
    from tokenmill.config.engine_args import EngineArgs
    from tokenmill.engine.build import open_model, settle_config
    from tokenmill.entrypoints.bench.limits import NativeLimits
    from tokenmill.kernels import native

    native.set_num_threads(read_machine().num_cpus)
    machine = NativeLimits("bfloat16")
    found = {}
    for name, quantization in FORMATS.items():
        args = EngineArgs(model=str(directory), device="cpu", quantization=quantization, **DUMMY)
        checkpoint = open_model(args, lambda stage, done, total: None)
        num_bytes = settle_config(args, checkpoint).ledger.weights
        peak = machine.peak(blocks=quantization is not None).flops
        found[f"tokenmill {name}"] = Limits(num_bytes, machine.read_bandwidth(num_bytes), peak)
    return {**found, VLLM: found["tokenmill bf16"]}


def rows(found: dict[str, Any], limits: dict[str, Limits]) -> list[dict[str, Any]]:
    """Tokens per second of each engine and workload, beside the limit and vLLM."""
    made = []
    for name, figures in found.items():
        for workload, figure in SHOWN.items():
            speed = figures[workload][figure]
            most = limits[name].of(workload)
            theirs = found.get(VLLM, {}).get(workload, {}).get(figure)
            made.append(
                {
                    "engine": name,
                    "workload": workload,
                    "tokens_per_second": speed,
                    "limit": most,
                    "of_limit": speed / most,
                    "of_vllm": speed / theirs if theirs else None,
                }
            )
    return made


def show(console: Console, made: list[dict[str, Any]], limits: dict[str, Limits]) -> None:
    table = Table(title="tokens per second, the shape of Llama 3.2 1B", title_justify="left")
    for heading in ("engine", "work", "tok/s", "limit", "of limit", "of vLLM bf16"):
        is_text = heading in ("engine", "work")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    for row in made:
        ratio = row["of_vllm"]
        table.add_row(
            row["engine"],
            f"{row['workload']}: {SHOWN[row['workload']]}",
            f"{row['tokens_per_second']:,.1f}",
            f"{row['limit']:,.1f}",
            f"{row['of_limit']:.2f}",
            "" if ratio is None else f"{ratio:.2f}",
        )
    console.print(table)
    for name, each in limits.items():
        console.print(
            f"{name}: {each.weight_bytes / 1e9:.2f} GB of weights,"
            f" {each.bytes_per_second / 1e9:.1f} GB/s read, {each.flops / 1e12:.2f} Tflop/s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    directory = Path(os.environ.get("PEERS", ".peers"))
    parser.add_argument("--peers", type=Path, default=directory, help="default: $PEERS or .peers")
    parser.add_argument("--only", help="names of engines, with semicolons; default: all")
    parser.add_argument("--repeats", type=int, default=2, help="of each workload")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    messages = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary)
        write_config(model)
        wanted = options.only.split(";") if options.only else None
        reports = {
            engine.name: run(engine, "large", options.repeats, messages)
            for engine in engines(model, options.peers.absolute())
            if wanted is None or engine.name in wanted
        }
        limits = measured_limits(model)
    found = merged([{name: each["figures"] for name, each in reports.items() if each is not None}])
    made = rows(found, limits)
    if options.json:
        print(json.dumps({"reports": reports, "rows": made}))
    else:
        width = None if sys.stdout.isatty() else 140
        show(Console(highlight=False, width=width), made, limits)


if __name__ == "__main__":
    main()
