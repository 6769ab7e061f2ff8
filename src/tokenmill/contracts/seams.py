"""Protocols at which parts meet. Each has a trivial implementation, so that "off" is an object."""

from __future__ import annotations

from typing import Protocol

from tokenmill.contracts.plan import GrammarOutput, SchedulerOutput
from tokenmill.contracts.result import ModelRunnerOutput


class StepFuture(Protocol):
    """A step under way."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step and return its result."""
        ...


class Executor(Protocol):
    """Carries plans to the workers. Calls return at once; steps run in the order of the calls."""

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Start the forward pass of a plan."""
        ...

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> StepFuture:
        """Sample after the forward pass that was started last."""
        ...

    def shutdown(self) -> None:
        """Stop the workers and free what they hold; may be called twice."""
        ...
