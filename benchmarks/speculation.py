"""What speculation saves, or costs: the same requests with drafts and without, in one run.

    repeating   greedy answers that repeat a given text: a file of code with a change, a summary
    chat        first questions of ShareGPT (`sharegpt.py`), sampled at temperature 0.7

For 1 request at a time and for 8 at once, with each method in turn, round after round; medians of
the rounds. Answers must be the same with every method. On SmolLM2-135M unless `--model` says
otherwise; `--draft-model` adds a model that drafts, `--eagle` and `--eagle3` a head, `--always` the
methods without adapting. What `suffix` has learned is there from round to round. Prints JSON with
`--json`.

    python benchmarks/speculation.py --sharegpt FILE
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sharegpt import conversations, default_path, messages

SIZES = (1, 8)
CODE = '''\
class Account:
    """Money of one customer."""

    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("amount is more than the balance")
        self.balance -= amount
        return self.balance
'''
REPORT = """\
The town council met on Tuesday to decide about the old bridge over the river. The bridge was \
built in 1911 and carries 4,000 cars a day. The engineer said that two of the five pillars have \
cracks and that repairs would take nine months and cost 3.2 million. The shop owners of the market \
street asked the council to keep one lane open. The council voted 14 to 9 for the repairs, with \
one lane open from six in the morning to eight in the evening."""
EDITS = [
    f"Rename `balance` to `total` in this class and print the whole class:\n\n{CODE}",
    f"Add a docstring to each method of this class and print the whole class:\n\n{CODE}",
    f"Print this class again without any change:\n\n{CODE}",
    f"Correct the spelling of this text and print all of it:\n\n{REPORT}",
    f"Summarise this report with quotations from it:\n\n{REPORT}",
    f"Print every sentence of this text as an item of a list:\n\n{REPORT}",
    f"Which numbers are in this text? Quote each sentence that has one:\n\n{REPORT}",
    f"Translate the comments of this code into French and keep the code:\n\n{CODE}",
]


@dataclass(frozen=True)
class Figure:
    """One method with one load."""

    load: str
    num_requests: int
    method: str
    tokens_per_second: float
    ratio: float
    """Of these to the ones without drafts; more is faster."""
    share_held: float
    """Of the drafts that were checked."""
    tokens_per_step: float
    """That a request has brought in a step, with or without drafts."""
    drafts_per_token: float


@dataclass(frozen=True)
class Run:
    """All requests of a load, in groups."""

    seconds: float
    num_tokens: int
    answers: list[list[int]]
    num_draft_tokens: int
    num_accepted_tokens: int


def loads(options: argparse.Namespace) -> dict[str, list[tuple[list[dict[str, str]], Any]]]:
    """Chats and their parameters."""
    from tokenmill import SamplingParams

    path = Path(options.sharegpt) if options.sharegpt else default_path()
    questions = []
    for conversation in conversations(path):
        turns = messages(conversation)
        if turns and turns[0]["role"] == "user" and 20 < len(turns[0]["content"]) < 600:
            questions.append(turns[:1])
        if len(questions) == len(EDITS):
            break
    common = {"max_tokens": options.tokens, "ignore_eos": True}
    return {
        "repeating": [
            ([{"role": "user", "content": text}], SamplingParams(temperature=0, **common))
            for text in EDITS
        ],
        "chat": [
            (question, SamplingParams(temperature=0.7, seed=seed, **common))
            for seed, question in enumerate(questions)
        ],
    }


def run(llm: Any, requests: list[tuple[list[dict[str, str]], Any]], size: int) -> Run:
    """Answer all requests, `size` at a time."""
    llm.reset_prefix_cache()
    seconds, outputs = 0.0, []
    for first in range(0, len(requests), size):
        chats, params = zip(*requests[first : first + size], strict=True)
        begin = time.perf_counter()
        outputs += llm.chat(list(chats), list(params), use_tqdm=False)
        seconds += time.perf_counter() - begin
    answers = [output.outputs[0].token_ids for output in outputs]
    return Run(
        seconds,
        sum(map(len, answers)),
        answers,
        sum(output.metrics.num_draft_tokens for output in outputs),
        sum(output.metrics.num_accepted_tokens for output in outputs),
    )


def methods(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Name to `speculative_config`."""
    found: dict[str, dict[str, Any]] = {"none": {}, "ngram": {"method": "ngram"}}
    found["suffix"] = {"method": "suffix"}
    if options.draft_model:
        found["draft_model"] = {"model": options.draft_model}
    for head in ("eagle", "eagle3"):
        if model := getattr(options, head):
            found[head] = {"method": head, "model": model}
    if options.always:
        found |= {
            f"{name}, always": config | {"adaptive": False}
            for name, config in found.items()
            if config
        }
    return found


def measure(options: argparse.Namespace) -> list[Figure]:
    """All methods in turn, on engines that are there together."""
    from tokenmill import LLM

    settings = {"max_num_seqs": max(SIZES), "kv_cache_memory_bytes": 1 << 29, "max_model_len": 1024}
    engines = {
        name: LLM(options.model, speculative_config=config, **settings)
        for name, config in methods(options).items()
    }
    figures = []
    for load, requests in loads(options).items():
        for size in SIZES:
            runs: dict[str, list[Run]] = {name: [] for name in engines}
            for llm in engines.values():
                run(llm, requests[:size], size)
            for _ in range(options.rounds):
                for name, llm in engines.items():
                    runs[name].append(run(llm, requests, size))
            figures += [figure(load, size, name, runs) for name in engines]
    for llm in engines.values():
        llm.close()
    return figures


def figure(load: str, size: int, name: str, runs: dict[str, list[Run]]) -> Figure:
    """Medians of one method; the answers must be those of the first run without drafts."""
    plain, own = runs["none"], runs[name]
    assert all(each.answers == plain[0].answers for each in own), f"{name} changes answers"
    last = own[-1]
    seconds = statistics.median(each.seconds for each in own)
    return Figure(
        load,
        size,
        name,
        tokens_per_second=last.num_tokens / seconds,
        ratio=statistics.median(each.seconds for each in plain) / seconds,
        share_held=last.num_accepted_tokens / max(last.num_draft_tokens, 1),
        tokens_per_step=last.num_tokens / (last.num_tokens - last.num_accepted_tokens),
        drafts_per_token=last.num_draft_tokens / last.num_tokens,
    )


def show(figures: list[Figure]) -> None:
    head = (
        "load",
        "requests",
        "method",
        "tokens/s",
        "ratio",
        "held",
        "tokens/step",
        "drafts/token",
    )
    print("| " + " | ".join(head) + " |")
    print("|---|---:|---|" + "---:|" * 5)
    for each in figures:
        print(
            f"| {each.load} | {each.num_requests} | {each.method} | {each.tokens_per_second:.0f}"
            f" | {each.ratio:.2f} | {each.share_held:.0%} | {each.tokens_per_step:.2f}"
            f" | {each.drafts_per_token:.2f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft-model", help="a model of the same vocabulary that drafts")
    parser.add_argument("--eagle", help="a head of the first kind for the model")
    parser.add_argument("--eagle3", help="a head of EAGLE-3 for the model")
    parser.add_argument("--always", action="store_true", help="also with as many drafts as can be")
    parser.add_argument("--sharegpt", help="JSON file of conversations; the package's by default")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = measure(options)
    if options.json:
        print(json.dumps([asdict(each) for each in figures]))
    else:
        show(figures)


if __name__ == "__main__":
    main()
