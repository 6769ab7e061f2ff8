"""A step's result: what it is made of, and when: at once, or when the host asks for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.contracts.request import TokenLogprobs
from tokenmill.contracts.result import ModelRunnerOutput
from tokenmill.sampling.sampler import SamplerOutput
from tokenmill.worker.batch import InputBatch, IntArray
from tokenmill.worker.decode_steps import Drawn

BAD_LOGITS = (
    "The model gave this request no usable logits: they hold NaN or infinite values, or every token"
    " is banned. If other requests fail alike, check the model's weights and dtype."
)


@dataclass(frozen=True, slots=True)
class ExecuteModelState:
    """What a forward pass leaves for `sample_tokens`."""

    step_id: int
    batch: InputBatch
    logits: torch.Tensor
    """float32 [len(batch.sampled_indices), vocab_size]"""
    wants_logprobs: npt.NDArray[np.bool_]
    """[num_reqs]"""
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    """By place in the batch."""
    bad_reqs: set[int]
    """Places in the batch of requests whose prompt logits are not finite."""


class UnfinishedStep:
    """A step that the device still computes; its result is made by whoever asks first."""

    def __init__(self, finish: Callable[[], ModelRunnerOutput]) -> None:
        self._finish: Callable[[], ModelRunnerOutput] | None = finish
        self._output: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        """Wait for the device, and make the result."""
        if self._finish is not None:
            self._output = self._finish()
            self._finish = None  # lets go of the step's tensors
        return self._output


def finish_now(finish: Callable[[], ModelRunnerOutput]) -> ModelRunnerOutput:
    """For a device that computes in the calls themselves."""
    return finish()


def finish_later(finish: Callable[[], ModelRunnerOutput]) -> UnfinishedStep:
    """For a device that computes by itself, while the host prepares the next step."""
    return UnfinishedStep(finish)


def make_output(
    state: ExecuteModelState, sampled: SamplerOutput, num_new_tokens: IntArray, bad_reqs: set[int]
) -> ModelRunnerOutput:
    """The result of a step that brought its requests `num_new_tokens` [num_reqs] tokens.

    `bad_reqs` are the places of those that end with an error.
    """
    batch = state.batch
    token_ids = sampled.token_ids.tolist()
    starts = batch.sampled_start
    spans = list(zip(starts.tolist(), (starts + num_new_tokens).tolist(), strict=True))
    return ModelRunnerOutput(
        step_id=state.step_id,
        req_ids=batch.req_ids,
        sampled_token_ids=[token_ids[start:end] for start, end in spans],
        logprobs={
            batch.req_ids[place]: [sampled.logprobs[i] for i in range(*spans[place])]
            for place in np.flatnonzero(state.wants_logprobs & (num_new_tokens > 0)).tolist()
        }
        if sampled.logprobs
        else {},
        prompt_logprobs={
            batch.req_ids[place]: entries
            for place, entries in state.prompt_logprobs.items()
            if place not in bad_reqs
        },
        errors={batch.req_ids[place]: BAD_LOGITS for place in sorted(bad_reqs)},
    )


def decode_output(plan: SchedulerOutput, drawn: Drawn) -> ModelRunnerOutput:
    """The result of a step that drew a token for each request."""
    token_ids, bad_places = drawn
    output = ModelRunnerOutput(plan.step_id, plan.req_ids, token_ids)
    for place in bad_places:
        token_ids[place] = []
        output.errors[plan.req_ids[place]] = BAD_LOGITS
    return output
