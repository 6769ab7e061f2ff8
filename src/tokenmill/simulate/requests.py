"""Simulated requests: what the scheduler gets, and what has become of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill.contracts.request import EngineCoreRequest, FinishReason
from tokenmill.sampling_params import SamplingParams

SAMPLED = 1
"""The token that every step brings."""
FILLER = 2
"""The ids of prompts, but for the first one of each part: it tells whose the part is."""
_PARAMS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


def part(mark: int, length: int) -> list[int]:
    """Ids of a part of a prompt that no part with another mark shares a block with."""
    return [mark, *[FILLER] * (length - 1)] if length > 0 else []


@dataclass(slots=True)
class SimulatedRequest:
    """One request; seconds are on the simulation's clock."""

    number: int
    arrival: float
    prompt: list[int]
    output_len: int
    priority: int = 0
    deadline: float | None = None
    turns_left: int = 0
    """Of its session, behind this one."""
    num_output: int = field(default=0, init=False)
    scheduled: float | None = field(default=None, init=False)
    first: float | None = field(default=None, init=False)
    """When its first token came."""
    last: float = field(default=0.0, init=False)
    """When the last token so far came."""
    finish_reason: FinishReason | None = field(default=None, init=False)
    num_cached: int = field(default=0, init=False)
    """Tokens of its prompt found in the prefix cache."""
    num_preemptions: int = field(default=0, init=False)

    @property
    def request_id(self) -> str:
        return str(self.number)

    def to_core(self) -> EngineCoreRequest:
        """What the engine's core would be sent."""
        return EngineCoreRequest(
            request_id=self.request_id,
            prompt_token_ids=self.prompt,
            sampling_params=_PARAMS,
            seed=0,
            max_tokens=self.output_len,
            arrival_time=self.arrival,
            priority=self.priority,
            deadline=self.deadline,
        )
