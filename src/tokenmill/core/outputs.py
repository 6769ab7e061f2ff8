"""What a request is told of a step."""

from __future__ import annotations

from tokenmill.contracts.request import EngineCoreOutput
from tokenmill.contracts.result import ModelRunnerOutput
from tokenmill.core.request import Request
from tokenmill.core.stop import Stop


def step_output(
    request: Request, token_ids: list[int], stop: Stop | None, result: ModelRunnerOutput
) -> EngineCoreOutput:
    """Its new tokens, and what was asked for beside them; `stop` is how it has ended, if it has."""
    request_id = request.request_id
    output = request.make_output(token_ids, None if stop is None else stop.stop_reason)
    output.pooled = result.pooled.get(request_id)
    if request_id in result.logprobs:
        output.new_logprobs = result.logprobs[request_id][: len(token_ids)]
    output.prompt_logprobs = request.take_prompt_logprobs()
    return output


def error_output(request: Request, error: str) -> EngineCoreOutput:
    """The end of a request that has failed."""
    output = request.make_output()
    output.error = error
    return output
