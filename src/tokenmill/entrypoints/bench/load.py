"""A load on a server: requests at a rate or in a crowd, and what each of them met."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tokenmill.entrypoints.bench.http_stream import HttpFailureError, Target, events, request
from tokenmill.entrypoints.bench.load_options import LoadOptions
from tokenmill.entrypoints.bench.load_prompts import CHARS_PER_TOKEN, LoadPrompt, load_prompts
from tokenmill.errors import ConfigError, GenerationError
from tokenmill.observe.spread import Spread, spread

_SAMPLE = 64
"""Answers whose tokens are counted to learn how many characters a token has."""
_MAX_ERRORS = 5


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


@dataclass(slots=True)
class Outcome:
    """One request. Seconds are on one clock."""

    sent: float
    first: float | None = None
    """When the first text came."""
    ended: float = 0.0
    gaps: list[float] = field(default_factory=list)
    """Between pieces of text."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Seconds to the first text; a request without any has its whole length."""
        return (self.ended if self.first is None else self.first) - self.sent

    @property
    def e2el(self) -> float:
        """Seconds in all."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float:
        """Seconds for each token after the first; 0 if there is none."""
        later = self.num_output_tokens - 1
        return (self.e2el - self.ttft) / later if later > 0 else 0.0

    def keeps(self, goals: Mapping[str, float]) -> bool:
        """Whether it meets the limits, which are in milliseconds."""
        return all(1e3 * getattr(self, name) <= limit for name, limit in goals.items())


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What `tokenmill bench serve` says."""

    model: str
    num_completed: int
    num_failed: int
    seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    max_concurrency: int
    """Most requests that were under way at the same time."""
    ttft: Spread
    """To the first text."""
    tpot: Spread
    """For each token after the first, of each request."""
    itl: Spread
    """Between two pieces of text, over all requests."""
    e2el: Spread
    """Whole requests."""
    goodput: float | None
    """Requests a second that kept the limits; None without limits."""
    share_good: float | None
    errors: list[str]
    """The first few."""


async def measure_load(options: LoadOptions, api_key: str | None) -> LoadReport:
    """Raises `ConfigError`, `HttpFailureError` if there is no server, `GenerationError` if no
    request was answered.
    """
    target = Target.of(options.base_url, api_key)
    model = options.model or await _first_model(target)
    prompts = load_prompts(options, await _chars_per_token(target, options))
    load = _Load(target, model, options)
    for prompt in prompts[: options.num_warmup]:
        await load.ask(prompt)
    load.max_concurrency = 0
    begin = time.perf_counter()
    outcomes = await load.run(prompts)
    return report_of(model, outcomes, time.perf_counter() - begin, options, load.max_concurrency)


class _Load:
    def __init__(self, target: Target, model: str, options: LoadOptions) -> None:
        self.max_concurrency = 0
        self._target = target
        self._model = model
        self._options = options
        self._num_running = 0

    async def run(self, prompts: Sequence[LoadPrompt]) -> list[Outcome]:
        """All requests, each at its time."""
        options = self._options
        draw = random.Random(options.seed + 1)
        places = asyncio.Semaphore(options.concurrency or len(prompts))
        tasks = []

        async def in_place(prompt: LoadPrompt) -> Outcome:
            async with places:
                return await self.ask(prompt)

        for prompt in prompts:
            tasks.append(asyncio.create_task(in_place(prompt)))
            if math.isfinite(options.request_rate):
                await asyncio.sleep(draw.expovariate(options.request_rate))
        return list(await asyncio.gather(*tasks))

    async def ask(self, prompt: LoadPrompt) -> Outcome:
        """One request; whatever goes wrong is in its outcome."""
        outcome = Outcome(sent=time.perf_counter())
        self._num_running += 1
        self.max_concurrency = max(self.max_concurrency, self._num_running)
        try:
            async with asyncio.timeout(self._options.timeout):
                await self._stream(prompt, outcome)
        except TimeoutError:
            outcome.error = f"not done within {self._options.timeout:g} s"
        except (HttpFailureError, msgspec.DecodeError) as error:
            outcome.error = str(error)
        finally:
            self._num_running -= 1
        outcome.ended = outcome.ended or time.perf_counter()
        return outcome

    async def _stream(self, prompt: LoadPrompt, outcome: Outcome) -> None:
        path, body = self._request(prompt)
        num_pieces, last = 0, 0.0
        async with request(self._target, "POST", path, body) as answer:
            if answer.status != 200:
                text = (await answer.body()).decode(errors="replace")
                outcome.error = f"status {answer.status}: {text[:200]}"
                return
            async for clock, data in events(answer):
                if data == b"[DONE]":
                    break
                chunk = msgspec.json.decode(data, type=_Chunk)
                if chunk.error is not None:
                    outcome.error = str(chunk.error)[:200]
                    return
                if chunk.usage is not None:
                    outcome.num_prompt_tokens = chunk.usage.prompt_tokens
                    outcome.num_output_tokens = chunk.usage.completion_tokens
                if _has_text(chunk):
                    num_pieces += 1
                    if outcome.first is None:
                        outcome.first = clock
                    else:
                        outcome.gaps.append(clock - last)
                    last = outcome.ended = clock
        outcome.num_output_tokens = outcome.num_output_tokens or num_pieces

    def _request(self, prompt: LoadPrompt) -> tuple[str, bytes]:
        options = self._options
        fields: dict[str, Any] = {
            "model": self._model,
            "max_tokens": prompt.output_len,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not options.stop_early:
            fields["ignore_eos"] = True
        if options.endpoint == "chat":
            path = "/v1/chat/completions"
            fields["messages"] = [{"role": "user", "content": prompt.text}]
        else:
            path = "/v1/completions"
            fields["prompt"] = prompt.text
        return path, msgspec.json.encode({**fields, **options.extra_body})


def _has_text(chunk: _Chunk) -> bool:
    for choice in chunk.choices:
        delta = choice.delta
        if choice.text or (delta is not None and (delta.content or delta.reasoning_content)):
            return True
    return False


def report_of(
    model: str,
    outcomes: Sequence[Outcome],
    seconds: float,
    options: LoadOptions,
    max_concurrency: int,
) -> LoadReport:
    """Figures over all requests. Raises `GenerationError` if none was answered."""
    done = [outcome for outcome in outcomes if outcome.error is None]
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if not done:
        raise GenerationError(f"no request was answered; the first: {errors[0]}")
    goals, percents = options.goals(), options.percents()
    num_good = sum(outcome.keeps(goals) for outcome in done)
    num_prompt = sum(outcome.num_prompt_tokens for outcome in done)
    num_output = sum(outcome.num_output_tokens for outcome in done)
    return LoadReport(
        model=model,
        num_completed=len(done),
        num_failed=len(errors),
        seconds=seconds,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        requests_per_second=len(done) / seconds,
        output_tokens_per_second=num_output / seconds,
        total_tokens_per_second=(num_prompt + num_output) / seconds,
        max_concurrency=max_concurrency,
        ttft=spread([outcome.ttft for outcome in done], percents),
        tpot=spread([o.tpot for o in done if o.num_output_tokens > 1], percents),
        itl=spread([gap for outcome in done for gap in outcome.gaps], percents),
        e2el=spread([outcome.e2el for outcome in done], percents),
        goodput=num_good / seconds if goals else None,
        share_good=num_good / len(outcomes) if goals else None,
        errors=errors[:_MAX_ERRORS],
    )


async def _first_model(target: Target) -> str:
    async with request(target, "GET", "/v1/models") as answer:
        body = await answer.body()
        if answer.status != 200:
            raise HttpFailureError(
                f"the server answers /v1/models with {answer.status}; give --model and, if it"
                f" needs one, a key in OPENAI_API_KEY."
            )
    try:
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except (msgspec.DecodeError, LookupError, TypeError) as error:
        raise ConfigError("the server lists no model; give --model.") from error


async def _chars_per_token(target: Target, options: LoadOptions) -> float:
    """Characters of a token of the data set, counted by a server that has /tokenize."""
    if options.sharegpt is None:
        return CHARS_PER_TOKEN
    prompts = load_prompts(options, CHARS_PER_TOKEN)[:_SAMPLE]
    text = "\n".join(prompt.text for prompt in prompts)
    body = msgspec.json.encode({"prompt": text, "add_special_tokens": False})
    try:
        async with request(target, "POST", "/tokenize", body) as answer:
            count = int(msgspec.json.decode(await answer.body())["count"])
    except (HttpFailureError, msgspec.DecodeError, LookupError, TypeError, ValueError):
        return CHARS_PER_TOKEN
    return len(text) / count if count else CHARS_PER_TOKEN
