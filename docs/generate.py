"""Writes `settings.md` from the classes that it describes: `python docs/generate.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path

import msgspec

from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.route_args import RouteArgs
from tokenmill.config.serve_args import ServeArgs
from tokenmill.engine.serve_options import ServeOptions
from tokenmill.entrypoints.bench.load_options import LoadOptions
from tokenmill.entrypoints.bench.options import (
    KernelOptions,
    LatencyOptions,
    StartupOptions,
    ThroughputOptions,
)
from tokenmill.entrypoints.cli.chat import NOT_IN_A_CHAT
from tokenmill.entrypoints.cli.flags import NOT_ON_THE_COMMAND_LINE, field_docs
from tokenmill.observe.environment import VARIABLES
from tokenmill.sampling_params import SamplingParams
from tokenmill.simulate.options import SimulateOptions

TARGET = Path(__file__).with_name("settings.md")

HEAD = """\
# Settings

Made by `make docs` from the code; do not edit.

## Engine

Keywords of `LLM(...)` and flags of the command line (`max_model_len` is `--max-model-len`). `None` means that the engine chooses. What it chose, why, and the memory ledger are logged at level info: `TOKENMILL_LOG_LEVEL=info` shows them on the command line, `logging.basicConfig(level="INFO")` in Python.

"""

SAMPLING_HEAD = """
## Sampling

Fields of `SamplingParams(...)`, and flags of `tokenmill generate` and `tokenmill chat` (a chat has no {not_in_a_chat}). On the command line `max_tokens` is unlimited unless it is given, and log-probabilities need `--json`.

"""

BENCH_HEAD = """
## Benchmarks

Flags of `tokenmill bench`, beside those of the engine (`serve` has none of these: it measures a server). `--json` prints one object; with `latency` and `throughput`, `--profile` shows the stages of a step, and `--step-times FILE` writes what each step computed and took.
"""

SIMULATE_HEAD = """
## Simulation

Flags of `tokenmill simulate`, besides the engine's; see [simulate](simulate.md).

"""

SERVE_HEAD = """
## Server

Flags of `tokenmill serve`, besides the engine's. Each may come from the environment (`TOKENMILL_SERVE_PORT` for `--port`) or from a file (`--config`) as well; see [serving](serving.md).

"""

RECOVERY_HEAD = """
### Queue and recovery

"""

ROUTER_HEAD = """
## Router

Flags of `tokenmill route`, which may come from the environment (`TOKENMILL_ROUTE_PORT`) or a file as well; see [several engines](data-parallel.md).

"""

ENVIRONMENT_HEAD = """
## Environment

| variable | meaning |
|---|---|
"""
LIBRARIES = "| `HF_HUB_OFFLINE`, `HF_HOME`, `HF_TOKEN` | As in huggingface_hub. |\n"


def environment() -> str:
    """Every variable that we read."""
    rows = [f"| `{name}` | {meaning} |\n" for name, meaning in VARIABLES.items()]
    return ENVIRONMENT_HEAD + "".join(rows) + LIBRARIES


def benchmarks() -> str:
    """Every command of `tokenmill bench`, with its options."""
    commands = {
        "latency": LatencyOptions,
        "throughput": ThroughputOptions,
        "kernels": KernelOptions,
        "startup": StartupOptions,
        "serve": LoadOptions,
    }
    return BENCH_HEAD + "".join(
        f"\n`tokenmill bench {name}`\n\n"
        + table(field_docs(owner), dataclasses.asdict(owner()), ())
        for name, owner in commands.items()
    )


def table(docs: dict[str, str], defaults: dict[str, object], no_flags: Collection[str]) -> str:
    """Name, default, text; one line a field."""
    rows = ["| name | default | meaning |", "|---|---|---|"]
    for name, default in defaults.items():
        mark = " (not a flag)" if name in no_flags else ""
        text = docs[name].replace("|", "\\|")
        rows.append(f"| `{name}` | `{default!r}` | {text}{mark} |")
    return "\n".join(rows) + "\n"


def render() -> str:
    """The whole page."""
    engine = {
        field.name: getattr(EngineArgs(), field.name) for field in dataclasses.fields(EngineArgs)
    }
    router = {field.name: field.default for field in dataclasses.fields(RouteArgs)}
    sampling = msgspec.structs.asdict(SamplingParams())
    sampling["output_kind"] = sampling["output_kind"].name
    return (
        HEAD
        + table(field_docs(EngineArgs), engine, NOT_ON_THE_COMMAND_LINE | {"seed"})
        + SAMPLING_HEAD.format(not_in_a_chat=", ".join(sorted(NOT_IN_A_CHAT)))
        + table(field_docs(SamplingParams), sampling, NOT_ON_THE_COMMAND_LINE)
        + benchmarks()
        + SIMULATE_HEAD
        + table(field_docs(SimulateOptions), dataclasses.asdict(SimulateOptions()), ())
        + SERVE_HEAD
        + table(field_docs(ServeArgs), dataclasses.asdict(ServeArgs()), ())
        + RECOVERY_HEAD
        + table(field_docs(ServeOptions), dataclasses.asdict(ServeOptions()), ())
        + ROUTER_HEAD
        + table(field_docs(RouteArgs), router, ())
        + environment()
    )


if __name__ == "__main__":
    TARGET.write_text(render())
