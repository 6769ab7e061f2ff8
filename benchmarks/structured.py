"""What structured output costs, and what forced tokens save.

    compile      seconds for each of the schemas of the tests, one after the other
    masks        of a step of many requests: filling them (in threads, beside the forward pass),
                 waiting for them, applying them, moving the grammars on
    overhead     seconds of a decoding step with a form for every request, beside those of the same
                 step without any; both in turn, the median of several rounds
    forced       steps and seconds of records with `enable_forced_tokens` on and off

On SmolLM2-135M in bfloat16 unless `--model` says otherwise. Prints JSON with `--json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

NEW_TOKENS = 64
PROMPT = "Some data about a person, a place and the weather, as JSON:\n"
NOTES = {
    "type": "object",
    "properties": {
        "notes": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "title": {"type": "string", "maxLength": 40},
                    "text": {"type": "string"},
                    "tags": {"type": "array", "items": {"type": "string"}, "minItems": 2},
                    "score": {"type": "number", "minimum": 0, "maximum": 10},
                },
                "required": ["title", "text", "tags", "score"],
                "additionalProperties": False,
            },
            "minItems": 100,
        }
    },
    "required": ["notes"],
    "additionalProperties": False,
}
"""Never complete within the tokens of a round, so that all requests go on to the end."""
RECORD = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 20},
        "last_name": {"type": "string", "maxLength": 20},
        "date_of_birth": {"type": "string", "format": "date"},
        "is_a_customer": {"type": "boolean"},
        "favourite_colour": {"enum": ["red", "green", "blue"]},
        "number_of_orders": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "additionalProperties": False,
}
RECORD["required"] = list(RECORD["properties"])


class Timer:
    """Seconds spent in a method, and how often it was called."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds, self.calls = 0.0, 0
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begin
                self.calls += 1

        setattr(owner, name, timed)

    def reset(self) -> None:
        self.seconds, self.calls = 0.0, 0


def engine(options: argparse.Namespace, **config: Any) -> Any:
    from tokenmill import LLM

    settings: dict[str, Any] = {} if options.model is None else {"model": options.model}
    settings["structured_outputs_config"] = {"backend": options.backend, **config}
    return LLM(kv_cache_memory_bytes=1 << 30, max_num_seqs=options.requests, **settings)


def run(llm: Any, params: Any, count: int) -> tuple[float, int]:
    """(seconds, steps) of one call."""
    core = llm.llm_engine._client.core
    prompts = [f"{number}. {PROMPT}" for number in range(count)]
    steps, begin = core.num_settled_steps, time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begin, core.num_settled_steps - steps


def compile_times(llm: Any) -> dict[str, float]:
    from helpers.schemas import all_cases
    from tokenmill.errors import InvalidRequestError
    from tokenmill.structured_outputs import StructuredOutputsParams

    manager = llm.llm_engine._client.core._grammars
    backend = manager._backend
    seconds, num_refused = [], 0
    for case in all_cases():
        params = StructuredOutputsParams(json=case.schema)
        begin = time.perf_counter()
        try:
            backend.compile(params)
        except InvalidRequestError:
            num_refused += 1
            continue
        seconds.append(time.perf_counter() - begin)
    seconds.sort()
    return {
        "schemas": len(seconds),
        "refused": num_refused,
        "p50_ms": 1e3 * seconds[len(seconds) // 2],
        "p95_ms": 1e3 * seconds[len(seconds) * 95 // 100],
        "max_ms": 1e3 * seconds[-1],
    }


def overhead(options: argparse.Namespace) -> dict[str, float]:
    """A step with forms beside one without; forced tokens are off, so that steps are alike."""
    from tokenmill import SamplingParams
    from tokenmill.sampling.grammar_mask import GrammarMask

    llm = engine(options, enable_forced_tokens=False)
    manager = llm.llm_engine._client.core._grammars
    timers = {
        "fill": Timer(manager, "_fill"),
        "wait": Timer(manager, "get_grammar_bitmask"),
        "advance": Timer(manager, "advance"),
        "apply": Timer(GrammarMask, "apply"),
    }
    common = {"max_tokens": NEW_TOKENS, "min_tokens": NEW_TOKENS, "ignore_eos": True, "seed": 1}
    free = SamplingParams(**common)
    formed = SamplingParams(structured_outputs={"json": NOTES}, **common)
    ratios, free_steps, formed_steps = [], [], []
    stages: dict[str, list[float]] = {name: [] for name in timers}
    for number in range(options.rounds + 1):
        seconds, steps = run(llm, free, options.requests)
        for timer in timers.values():
            timer.reset()
        with_form, form_steps = run(llm, formed, options.requests)
        if number == 0:
            continue  # the first round warms up
        free_steps.append(seconds / steps)
        formed_steps.append(with_form / form_steps)
        ratios.append(formed_steps[-1] / free_steps[-1] - 1)
        for name, timer in timers.items():
            stages[name].append(timer.seconds / form_steps)
    figures = {f"{name}_ms": 1e3 * statistics.median(each) for name, each in stages.items()}
    return {
        "requests": options.requests,
        "step_ms": 1e3 * statistics.median(free_steps),
        "step_with_forms_ms": 1e3 * statistics.median(formed_steps),
        "overhead": statistics.median(ratios),
        **figures,
        "fill_us_a_row": 1e3 * figures["fill_ms"] / options.requests,
        **{f"compile_{name}": value for name, value in compile_times(llm).items()},
    }


def forced(options: argparse.Namespace) -> dict[str, float]:
    """The same records twice: the same text, in fewer steps."""
    from tokenmill import SamplingParams

    params = SamplingParams(structured_outputs={"json": RECORD}, max_tokens=200, seed=1)
    figures: dict[str, float] = {}
    for name, enabled in (("sampled", False), ("forced", True)):
        llm = engine(options, enable_forced_tokens=enabled)
        run(llm, params, options.requests)
        results = [run(llm, params, options.requests) for _ in range(options.rounds)]
        figures[f"{name}_seconds"] = statistics.median(seconds for seconds, _ in results)
        figures[f"{name}_steps"] = results[0][1]
        llm.close()
    figures["steps_saved"] = 1 - figures["forced_steps"] / figures["sampled_steps"]
    figures["speedup"] = figures["sampled_seconds"] / figures["forced_seconds"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", help="a directory, GGUF file, hub id or alias")
    parser.add_argument("--backend", default="llguidance")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    figures = {"masks": overhead(options), "forced tokens": forced(options)}
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    for title, values in figures.items():
        print(title)
        for name, value in values.items():
            print(f"  {name:24} {value:10.3f}")


if __name__ == "__main__":
    main()
