"""Writes `settings.md` from the classes that it describes: `python docs/generate.py`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec

from tokenmill.config.engine_args import EngineArgs
from tokenmill.entrypoints.cli.flags import NOT_ON_THE_COMMAND_LINE, field_docs
from tokenmill.sampling_params import SamplingParams

TARGET = Path(__file__).with_name("settings.md")

HEAD = """\
# Settings

Made by `make docs` from the code; do not edit.

## Engine

Keywords of `LLM(...)` and flags of the command line (`max_model_len` is `--max-model-len`). `None` means that the engine chooses; `TOKENMILL_LOG_LEVEL=info` shows what it chose, and why.

"""

SAMPLING_HEAD = """
## Sampling

Fields of `SamplingParams(...)`, and flags of `tokenmill generate` and `tokenmill chat`.

"""

ENVIRONMENT = """
## Environment

| variable | meaning |
|---|---|
| `TOKENMILL_CACHE` | where fetched models are kept; `$XDG_CACHE_HOME/tokenmill` or `~/.cache/tokenmill` otherwise |
| `TOKENMILL_LOG_LEVEL` | `debug`, `info`, `warning` (default) or `error` |
| `HF_HUB_OFFLINE`, `HF_HOME`, `HF_TOKEN` | as in huggingface_hub |
"""


def table(docs: dict[str, str], defaults: dict[str, object]) -> str:
    """Name, default, text; one line a field."""
    rows = ["| name | default | meaning |", "|---|---|---|"]
    for name, default in defaults.items():
        mark = "" if name not in NOT_ON_THE_COMMAND_LINE else " (not a flag)"
        text = docs[name].replace("|", "\\|")
        rows.append(f"| `{name}` | `{default!r}` | {text}{mark} |")
    return "\n".join(rows) + "\n"


def render() -> str:
    """The whole page."""
    engine = {
        field.name: getattr(EngineArgs(), field.name) for field in dataclasses.fields(EngineArgs)
    }
    sampling = msgspec.structs.asdict(SamplingParams())
    sampling["output_kind"] = sampling["output_kind"].name
    return (
        HEAD
        + table(field_docs(EngineArgs), engine)
        + SAMPLING_HEAD
        + table(field_docs(SamplingParams), sampling)
        + ENVIRONMENT
    )


if __name__ == "__main__":
    TARGET.write_text(render())
