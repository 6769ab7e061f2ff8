"""The result of one step: what the workers tell the scheduler."""

from __future__ import annotations

import msgspec

from tokenmill.contracts.request import TensorData, TokenLogprobs


class ModelRunnerOutput(msgspec.Struct):
    """One step's result. `req_ids` repeats the plan's batch; the lists are parallel to it.

    It is its own `StepFuture`: of a step that has finished already.
    """

    step_id: int
    req_ids: list[str]
    sampled_token_ids: list[list[int]]
    """Per request 0 (middle of a prompt), 1, or with accepted drafts up to k + 1 tokens."""
    logprobs: dict[str, list[TokenLogprobs]] = {}
    """Per request that asked for it: one entry per sampled token."""
    prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
    """Per request that asked for it: one entry per prompt token that this step's logits predict."""
    draft_token_ids: dict[str, list[int]] = {}
    """Proposals for the next step, where there are any."""
    pooled: dict[str, TensorData] = {}
    """float32 results of the pooling requests whose prompt this step has completed."""
    errors: dict[str, str] = {}
    """Requests that failed, alone, with the reason; they have no tokens. A row that has failed
    fails in every step until it is freed: with two plans in flight the next one names it again."""

    @property
    def has_tokens_only(self) -> bool:
        """Whether there is nothing beside `sampled_token_ids`."""
        return not (
            self.logprobs
            or self.prompt_logprobs
            or self.draft_token_ids
            or self.pooled
            or self.errors
        )

    def result(self) -> ModelRunnerOutput:
        """Itself."""
        return self


class SampledTokens(msgspec.Struct, array_like=True):
    """What ranks are told that do not see what a step has sampled; lists by request."""

    req_ids: list[str]
    rows: list[int]
    token_ids: list[list[int]]
