"""The work that every engine does, and how it is measured; no imports, so that each engine's own
interpreter can run it.

A workload is run with its full output length and again with one token. The second is the prompts'
part; the difference is the decoding of the other tokens. Prompts are the same random ids for all.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], int]
"""Continue all prompts at once by so many tokens, greedily, whatever end tokens come; returns the
number of new tokens."""


@dataclass(frozen=True)
class Workload:
    """Requests that come at the same time."""

    num_requests: int
    input_len: int
    output_len: int

    def prompts(self) -> Prompts:
        """Ids that every tokenizer of the default model knows as ordinary tokens."""
        return [
            [(i * 977 + j * 131) % 40_000 + 1_000 for j in range(self.input_len)]
            for i in range(self.num_requests)
        ]


FULL = {
    "one": Workload(1, 128, 128),
    "many": Workload(64, 128, 128),
    "prompt": Workload(1, 1024, 1),
}
QUICK = {
    "one": Workload(1, 32, 16),
    "many": Workload(8, 32, 16),
    "prompt": Workload(1, 256, 1),
}
"""Only shows that everything runs."""
LARGE = {
    "one": Workload(1, 32, 33),
    "sixteen": Workload(16, 32, 33),
    "prompt": Workload(1, 1024, 1),
}
"""For a model of a billion parameters: decoding, nearly without prompts, and a prompt."""


@dataclass(frozen=True)
class Figures:
    """Of one workload on one engine; tokens per second."""

    whole: float
    """New tokens over the whole call."""
    prompts: float
    """Prompt tokens until the first token of all requests."""
    decode: float | None
    """New tokens behind the first ones; None where there are none."""


def figures(workload: Workload, whole_seconds: float, first_seconds: float) -> Figures:
    """From the time of the full call and of one with a single token."""
    requests, length = workload.num_requests, workload.output_len
    decoding = whole_seconds - first_seconds
    return Figures(
        whole=requests * length / whole_seconds,
        prompts=requests * workload.input_len / first_seconds,
        decode=requests * (length - 1) / decoding if length > 1 and decoding > 0 else None,
    )


def measure(generate: Generate, workloads: dict[str, Workload], repeats: int) -> dict[str, Figures]:
    """Run every workload, once to warm up and `repeats` times; medians count."""
    found = {}
    for name, workload in workloads.items():
        prompts = workload.prompts()
        generate(prompts, min(workload.output_len, 8))
        first = median(_seconds(generate, prompts, 1) for _ in range(repeats))
        whole = first
        if workload.output_len > 1:
            whole = median(_seconds(generate, prompts, workload.output_len) for _ in range(repeats))
        found[name] = figures(workload, whole, first)
    return found


def _seconds(generate: Generate, prompts: Prompts, output_len: int) -> float:
    begin = time.perf_counter()
    num_tokens = generate(prompts, output_len)
    seconds = time.perf_counter() - begin
    assert num_tokens == len(prompts) * output_len, f"{num_tokens} new tokens"
    return seconds


def chosen(name: str) -> dict[str, Workload]:
    """`full`, `quick` or `large`."""
    return {"full": FULL, "quick": QUICK, "large": LARGE}[name]


def report(engine: str, start_seconds: float, found: dict[str, Figures]) -> None:
    """Print what `compare.py` reads: the last line of the output."""
    figures_by_name = {name: asdict(each) for name, each in found.items()}
    print(
        "\n"
        + json.dumps({"engine": engine, "start_seconds": start_seconds, "figures": figures_by_name})
    )
