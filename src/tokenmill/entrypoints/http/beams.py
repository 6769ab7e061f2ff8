"""`use_beam_search`: the search of `entrypoints/beam_search.py`, beside the other requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from tokenmill.contracts.request import AdapterRef
from tokenmill.engine.prompts import Prompt
from tokenmill.entrypoints.beam_search import BeamSearch, BeamSearchParams
from tokenmill.entrypoints.http.errors import blamed_on_fields
from tokenmill.entrypoints.http.protocol import SamplingFields
from tokenmill.entrypoints.http.state import ServerState
from tokenmill.errors import GenerationError, InvalidRequestError, shown
from tokenmill.outputs import RequestOutput
from tokenmill.sampling_params import SamplingParams

_WITHOUT_MEANING = (
    "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "allowed_token_ids", "bad_words", "stop", "stop_token_ids", "min_tokens",
    "prompt_logprobs", "logprob_token_ids", "thinking_token_budget", "repetition_detection",
    "vllm_xargs", "skip_special_tokens", "spaces_between_special_tokens",
)  # fmt: skip
"""Fields that a search does not look at."""
_SMALLEST_DEADLINE = 1e-3
"""Seconds."""


def beam_search_params(fields: SamplingFields, params: SamplingParams) -> BeamSearchParams | None:
    """The search that a request asks for; None if it asks for none. `params` have its limits.

    Raises `InvalidRequestError` that names a field which has no meaning.
    """
    if not fields.use_beam_search:
        if fields.length_penalty not in (None, 1):
            raise InvalidRequestError(
                f"length_penalty={shown(fields.length_penalty)} needs use_beam_search=true.",
                parameter="length_penalty",
            )
        return None
    if fields.stream:
        raise InvalidRequestError(
            "use_beam_search cannot be streamed: which beam wins is known at the end. Set"
            " stream=false.",
            parameter="use_beam_search",
        )
    given = {name: getattr(fields, name) for name in _WITHOUT_MEANING}
    for name, value in {**given, "logit_bias": params.logit_bias}.items():
        if value is not None:
            raise InvalidRequestError(
                f"{name} has no meaning with use_beam_search; leave it out.", parameter=name
            )
    if params.structured_outputs is not None:
        raise InvalidRequestError(
            "use_beam_search follows no grammar: leave out response_format, structured_outputs and"
            " required tools.",
            parameter="use_beam_search",
        )
    return BeamSearchParams(
        beam_width=params.n,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        temperature=fields.temperature or 0.0,
        length_penalty=1.0 if fields.length_penalty is None else fields.length_penalty,
        include_stop_str_in_output=params.include_stop_str_in_output,
    )


async def beam_outputs(
    state: ServerState,
    prompt: Prompt,
    beams: BeamSearchParams,
    *,
    num_logprobs: int,
    priority: int,
    cache_salt: str | None,
    adapter: AdapterRef | None,
    deadline: float | None,
    data_parallel_rank: int | None,
) -> AsyncGenerator[RequestOutput, None]:
    """The final output of a search, as `Engine.generate` gives that of a request."""
    engine = state.engine
    with blamed_on_fields({"beam_width": "n"}):
        search = BeamSearch(prompt, beams, engine.config, engine.end_token_ids)
    ends = None if deadline is None else time.monotonic() + deadline

    async def ask(prompt: Prompt) -> RequestOutput:
        last: RequestOutput | None = None
        left = None if ends is None else max(ends - time.monotonic(), _SMALLEST_DEADLINE)
        answers = engine.generate(
            prompt,
            search.request,
            request_id=state.new_name(),
            priority=priority,
            cache_salt=cache_salt,
            deadline=left,
            stream=False,
            adapter=adapter,
            data_parallel_rank=data_parallel_rank,
        )
        async with aclosing(answers) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                last = output
        if last is None:
            raise GenerationError("the engine gave no answer.")
        return last

    while not search.is_done:
        tasks = [asyncio.create_task(ask(each)) for each in search.prompts()]
        try:
            search.advance(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    yield search.result(engine.tokenizer, num_logprobs=num_logprobs)
