"""Writes `models.md` from the table that the tests run over: `python docs/generate_models.py`."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TARGET = Path(__file__).with_name("models.md")

HEAD = """\
# Models

Made by `make docs` from `tests/helpers/families.py`; do not edit.

Every family below is native: a file in `src/tokenmill/models/`, on our own layers. `tests/models/test_contract.py` runs over all of them, on small random weights that transformers has saved:

- logits in float32 are within 1e-4 of transformers', on the native kernels and on torch's;
- greedy tokens are transformers', in a batch, with prompts cut into pieces, and with prefixes from the cache;
- a request has the same bits alone, in a batch, in pieces, from the cache and after preemption, in float32 and bfloat16.

| family | models | architecture | weights tested | GGUF | on a GPU | steps | not supported |
|---|---|---|---|---|---|---|---|
"""

TAIL = """
*Steps* are **recorded** (one native call without the interpreter, see [architecture](architecture.md)) where every layer has a native kernel; a **direct** step computes what has none in torch. On a GPU, layers that have no kernel there are refused when the model is loaded.

Weights are read from safetensors (one file or several) in float32, float16 or bfloat16 (gpt-oss: MXFP4, too), and from GGUF files with the types F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS and MXFP4 ([formats.md](formats.md)). `--load-format dummy` draws random weights for any of these architectures from a config.json alone. `tokenmill inspect MODEL` says what a model is and whether it fits the machine.

RoPE scaling: `default`, `linear`, `dynamic`, `llama3`, `yarn`, `longrope`. What depends on a length depends on `max_model_len`, so that a cached key stays right while its text grows.

Not here yet: state-space layers, models through transformers' own code. To add a family, see [add a model](add-a-model.md).
"""


POOLING = """
## Models that pool

Every family above also embeds (`--runner pooling`), with its head or saved without, and scores as `...ForSequenceClassification` where transformers has that class: `tests/models/test_pooling_decoders.py` compares with it. Encoders, which attend in both directions, are made by `tests/helpers/pooling_families.py`; `tests/models/test_pooling_encoders.py` runs over them: vectors and scores within 1e-4 of transformers', and the same bits alone and in a batch. They run on a CPU. [pooling.md](pooling.md) says how to use them.

| family | models | embeddings | scores | weights tested | not supported |
|---|---|---|---|---|---|
"""


def render() -> str:
    """The whole page."""
    encoders = _listed("pooling_families.py", "ENCODER_FAMILIES")
    return (
        HEAD
        + "".join(map(row, _listed("families.py", "FAMILIES")))
        + TAIL
        + POOLING
        + "".join(map(encoder_row, encoders))
    )


def _listed(file: str, name: str) -> list[Any]:
    found: list[Any] = runpy.run_path(str(ROOT / "tests" / "helpers" / file))[name]
    return found


def encoder_row(family: Any) -> str:
    """One line of the second table."""
    weights = f"real ({family.real_weights}), random" if family.real_weights else "random"
    columns = [
        family.name,
        family.models,
        f"`{family.body}`",
        f"`{family.classifier}`",
        weights,
        family.not_supported,
    ]
    return f"| {' | '.join(columns)} |\n"


def row(family: Any) -> str:
    """One line of the table."""
    weights = f"real (`{family.real_weights}`), random" if family.real_weights else "random"
    columns = [
        family.name,
        family.models,
        f"`{family.architecture}`",
        weights,
        f"`{family.gguf}`" if family.gguf else "",
        "yes" if family.runs_on_gpu else "refused",
        "recorded" if family.is_recorded else "direct",
        family.not_supported,
    ]
    return f"| {' | '.join(columns)} |\n"


if __name__ == "__main__":
    TARGET.write_text(render())
