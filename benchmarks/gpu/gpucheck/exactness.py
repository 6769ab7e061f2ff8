"""Results beside a float32 reference, and the same bits however a request is computed."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpucheck.driving import graph_stats
from gpucheck.models import SMALLER, Shape, engine, prompt, write_draft
from gpucheck.report import Budget, Row

NUM_LAYERS = 2
"""Of the models compared: enough for every kernel to feed every other."""
REFERENCE_LENS = (2, 17, 64, 129, 257)
SMALL_STEP = 96
"""Tokens of a step that cuts most prompts into pieces."""
TOLERANCE = 0.02
"""Of log-probabilities: the norm of the error over that of their spread. Rounding to bfloat16 makes
about half of it; a RoPE base that is off by 2%, as much again."""
TOLERANCE_OF_EXPERTS = 0.06
"""Rounding has some tokens choose another of two experts that are nearly as good."""

Requests = Mapping[str, tuple[list[int], Any]]
"""Prompt and parameters by name."""
Outcomes = Mapping[str, tuple[Any, ...]]
"""Of each request, by name: token ids, and log-probabilities to the bit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What is compared."""

    prompt_lens: tuple[int, ...]
    max_tokens: int
    """Enough for most requests to need another block, which is what preempts others."""

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(*self.prompt_lens, *REFERENCE_LENS) + self.max_tokens


def load(shape: Shape, *, quick: bool) -> Load:
    if shape.name.startswith("tiny"):
        return Load((1, 30, 60, 129), 24)
    lens = (1, 3, 17, 32, 64, 100, 129, 200, 257, 300, 411, 640)
    return Load(lens[::2] if quick else lens, 72)


def run(shape: Shape, device: str, budget: Budget, *, quick: bool) -> Iterator[Row]:
    what = load(shape, quick=quick)
    small = dataclasses.replace(shape, num_layers=min(NUM_LAYERS, shape.num_layers))
    yield from _beside_reference(small, device, budget, _settings(what))
    if device == "cuda" or not shape.changes:  # elsewhere one model shows that this works
        yield from _same_bits(small, device, budget, what)


def _settings(what: Load) -> dict[str, Any]:
    return {
        "max_num_seqs": 16,
        "max_model_len": what.longest,
        "max_num_batched_tokens": 2_048,
        "async_scheduling": True,
    }


# Beside the reference


def _beside_reference(
    shape: Shape, device: str, budget: Budget, settings: dict[str, Any]
) -> Iterator[Row]:
    """Log-probabilities of prompts: torch in float32 on the CPU, then the device."""
    with engine(shape, "cpu", **(settings | {"dtype": "float32"})) as llm:
        expected = _prompt_logprobs(llm)
    allowed = TOLERANCE_OF_EXPERTS if shape.changes else TOLERANCE
    ways: list[tuple[str, dict[str, Any], float]] = [
        ("", {"exact": False}, allowed),
        (", exact mode", {"exact": True}, allowed),
    ]
    if device == "cuda" and not shape.changes:
        ways += [(f", {s.name}", s.settings, s.tolerance) for s in SMALLER]
        adapted = {"quantization": "fp8", "enable_lora": True}
        ways.append((", fp8 beside adapters", adapted, 0.12))
    for name, changed, tolerance in ways:
        budget.check(5.0)
        with engine(shape, device, **(settings | changed)) as llm:
            found = _prompt_logprobs(llm)
        error = _relative_error(found, expected)
        yield Row(
            "exact",
            f"{_named(shape)}, beside float32{name}",
            ok=math.isfinite(error) and error < tolerance,
            figures={
                "error": error,
                "allowed": tolerance,
                "worst": max(abs(a - b) for a, b in zip(found, expected, strict=True)),
                "values": len(found),
            },
        )


def _prompt_logprobs(llm: Any) -> list[float]:
    """Of every prompt token but the first, one prompt after another."""
    from tokenmill import SamplingParams

    vocab_size = llm.llm_engine.config.model.vocab_size
    prompts = [prompt(i, length, vocab_size) for i, length in enumerate(REFERENCE_LENS)]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    values = []
    for ids, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        _check(output)
        entries = output.prompt_logprobs[1:]
        values += [entry[token].logprob for token, entry in zip(ids[1:], entries, strict=True)]
    return values


def _relative_error(found: Sequence[float], expected: Sequence[float]) -> float:
    mean = sum(expected) / len(expected)
    error = sum((a - b) ** 2 for a, b in zip(found, expected, strict=True))
    return math.sqrt(error / sum((b - mean) ** 2 for b in expected))


# The same bits


def _same_bits(shape: Shape, device: str, budget: Budget, what: Load) -> Iterator[Row]:
    """In exact mode a request's result depends on nothing but the request."""
    requests, settings = _requests(shape, what), _settings(what)
    with engine(shape, device, **settings, exact=True) as llm:
        alone = {}
        for name, request in requests.items():
            alone |= _run(llm, {name: request})[0]
            llm.reset_prefix_cache()
        yield _row(shape, "in a batch", alone, *_run(llm, requests))
        yield _row(shape, "from the prefix cache", alone, *_run(llm, requests), cause="cached")
        llm.reset_prefix_cache()
        backwards = dict(reversed(requests.items()))
        yield _row(shape, "in a batch, last one first", alone, *_run(llm, backwards))
        block_size = llm.llm_engine.config.cache.block_size
        replayed = graph_stats(llm).num_replayed
    if device == "cuda":
        figures = {"replayed": replayed}
        yield Row("exact", f"{_named(shape)}, steps replayed", ok=replayed > 0, figures=figures)
    for way, changed, cause in _variants(what, block_size):
        budget.check(5.0)
        with engine(shape, device, **(settings | changed), exact=True) as llm:
            yield _row(shape, way, alone, *_run(llm, requests), cause=cause)
    budget.check(5.0)
    with engine(shape, device, **settings, exact=False) as llm:
        yield _row(shape, "not in exact mode", alone, *_run(llm, requests), is_promised=False)
    with tempfile.TemporaryDirectory(prefix="gpucheck-") as directory:
        budget.check(5.0)
        write_draft(Path(directory), shape.vocab_size)
        drafting = {"model": directory, "num_speculative_tokens": 3, "adaptive": False}
        with engine(shape, device, **settings, exact=True, speculative_config=drafting) as llm:
            yield _row(shape, "drafted for", alone, *_run(llm, requests), cause="drafted")


def _variants(what: Load, block_size: int) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    """Other ways to the same result: a name, settings, and what must happen on the way."""
    # Room for all prompts, or for the longest request, and not for what follows them.
    prompts = sum(-(-length // block_size) for length in what.prompt_lens)
    few_blocks = {"num_kv_blocks": max(prompts, -(-what.longest // block_size))}
    yield "in pieces", {"max_num_batched_tokens": SMALL_STEP}, None
    yield "preempted", few_blocks, "preempted"
    yield "kernel by kernel", {"enforce_eager": True}, None
    yield "one step in flight", {"async_scheduling": False}, None


def _requests(shape: Shape, what: Load) -> Requests:
    """Greedy and random ones, with and without log-probabilities of the prompt."""
    from tokenmill import SamplingParams

    manners: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 5},
        {"temperature": 1.0, "logprobs": 0},
        {"temperature": 0.7, "top_p": 0.9, "logprobs": 2},
        {"temperature": 1.2, "top_k": 40, "min_p": 0.01, "logprobs": 5},
        {"temperature": 0.0, "prompt_logprobs": 1},
    ]
    requests = {}
    for i, length in enumerate(what.prompt_lens):
        manner = manners[i % len(manners)]
        params = SamplingParams(**manner, seed=i, max_tokens=what.max_tokens, ignore_eos=True)
        requests[f"{length} tokens"] = (prompt(100 + i, length, shape.vocab_size), params)
    return requests


def _run(llm: Any, requests: Requests) -> tuple[dict[str, tuple[Any, ...]], dict[str, int]]:
    """Everything at once: outcomes, and what happened on the way to how many requests."""
    prompts = [ids for ids, _ in requests.values()]
    outputs = llm.generate(prompts, [params for _, params in requests.values()], use_tqdm=False)
    counts = {
        "cached": sum(output.num_cached_tokens > 0 for output in outputs),
        "preempted": sum(output.metrics.num_preemptions > 0 for output in outputs),
        "drafted": sum(output.metrics.num_draft_tokens > 0 for output in outputs),
    }
    return {name: _outcome(o) for name, o in zip(requests, outputs, strict=True)}, counts


def _outcome(output: Any) -> tuple[Any, ...]:
    _check(output)
    (completion,) = output.outputs
    values = [*(output.prompt_logprobs or []), *(completion.logprobs or [])]
    return (
        tuple(completion.token_ids),
        tuple(
            (token, entry.logprob, entry.rank)
            for position in values
            for token, entry in (position or {}).items()
        ),
    )


def _check(output: Any) -> None:
    (completion,) = output.outputs
    if completion.finish_reason != "length":
        raise RuntimeError(
            f"a request ended with {completion.finish_reason!r}: {completion.error or 'too early'}"
        )


def _row(
    shape: Shape,
    way: str,
    alone: Outcomes,
    found: Outcomes,
    counts: Mapping[str, int],
    *,
    cause: str | None = None,
    is_promised: bool = True,
) -> Row:
    """Compare with the requests run alone; `cause` must have happened to one request at least."""
    different = [name for name in alone if found[name] != alone[name]]
    other_tokens = [name for name in different if found[name][0] != alone[name][0]]
    happened = cause is None or counts[cause] > 0
    figures: dict[str, Any] = {
        "requests": len(alone),
        "other bits": len(different),
        "other tokens": len(other_tokens),
    }
    if cause is not None:
        figures[cause] = counts[cause]
    if different:
        figures["which"] = "; ".join(different)
    return Row(
        "exact",
        f"{_named(shape)}, {way}",
        ok=not different and happened if is_promised else None,
        figures=figures,
    )


def _named(shape: Shape) -> str:
    return f"{shape.name} ({shape.num_layers} layers)"
