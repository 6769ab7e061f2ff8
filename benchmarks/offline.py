"""Offline generation beside transformers, in one run: `make bench`.

Each line is one call of 128 prompt tokens and 128 new ones per request, greedy, ends ignored, on
SmolLM2-135M in bfloat16; the ratio is ours to transformers' output tokens per second. Both engines
run in this process, in turn, with the same number of threads.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

PROMPT_TOKENS = NEW_TOKENS = 128


def seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def prompts(count: int) -> list[list[int]]:
    return [
        [(i * 977 + j * 131) % 40_000 + 1_000 for j in range(PROMPT_TOKENS)] for i in range(count)
    ]


def start() -> tuple[Any, dict[str, float]]:
    """The engine, and the seconds of each stage of its start."""
    figures = {"import torch": seconds(lambda: __import__("torch"))}
    from tokenmill import LLM, SamplingParams

    begin = time.perf_counter()
    llm = LLM(kv_cache_memory_bytes=1 << 30, enable_prefix_caching=False)
    figures["build"] = time.perf_counter() - begin
    llm.generate("Hello", SamplingParams(temperature=0, max_tokens=1))
    figures["torch imported to first token"] = time.perf_counter() - begin
    return llm, figures


def ours(llm: Any, count: int) -> None:
    from tokenmill import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    llm.generate(prompts(count), params, use_tqdm=False)


def theirs(model: Any, count: int) -> None:
    import torch

    ids = torch.tensor(prompts(count))
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()

    llm, figures = start()
    import torch

    from helpers.reference import reference_model

    model = reference_model().to(torch.bfloat16)
    rows = []
    for count in options.requests:
        tokens = count * NEW_TOKENS
        mine = tokens / seconds(lambda count=count: ours(llm, count))
        other = tokens / seconds(lambda count=count: theirs(model, count))
        rows.append({"requests": count, "ours": mine, "transformers": other, "ratio": mine / other})
    if options.json:
        print(json.dumps({"start": figures, "throughput": rows}))
        return
    for stage, took in figures.items():
        print(f"{stage:32}{took:8.2f} s")
    print(f"{'requests':>10}{'tokenmill tok/s':>18}{'transformers tok/s':>20}{'ratio':>8}")
    for row in rows:
        print("{requests:>10}{ours:>18.1f}{transformers:>20.1f}{ratio:>8.2f}".format(**row))


if __name__ == "__main__":
    main()
