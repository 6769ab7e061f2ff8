"""Who makes the steps in which every request computes one token and draws the next one."""

from __future__ import annotations

from typing import Protocol

from tokenmill.contracts.plan import SchedulerOutput

Drawn = tuple[list[list[int]], list[int]]
"""One token a request, and the places of requests whose logits gave none."""


class DecodeSteps(Protocol):
    """Makes the steps that it takes; the runner makes the others."""

    def run_layers(self, plan: SchedulerOutput) -> bool:
        """Run the forward pass of a plan whose differences are applied; False if it is none of
        these steps. It may be run again.
        """
        ...

    def draw(self) -> Drawn:
        """Draw the tokens after the last forward pass; nothing is written yet."""
        ...

    def commit(self) -> None:
        """Write the drawn tokens into the rows and count them."""
        ...


class NoDecodeSteps:
    """The runner makes all steps."""

    def run_layers(self, plan: SchedulerOutput) -> bool:
        """None of these."""
        return False

    def draw(self) -> Drawn:
        """Never called."""
        raise AssertionError("no step was taken")

    def commit(self) -> None:
        """Never called."""
