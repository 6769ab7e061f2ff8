"""Who makes the steps in which every request computes one token and draws the next one."""

from __future__ import annotations

from typing import Protocol

from tokenmill.contracts.plan import SchedulerOutput

Drawn = tuple[list[list[int]], list[int]]
"""One token a request, and the places of requests whose logits gave none."""


class DecodeSteps(Protocol):
    """Makes the steps that it takes; the runner makes the others."""

    def run(self, plan: SchedulerOutput) -> bool:
        """Compute a plan whose differences are applied, and draw its tokens; False if it is none
        of these steps. Nothing is written yet, so it may be run again.
        """
        ...

    def commit(self) -> Drawn:
        """Write the drawn tokens into the rows, and count them."""
        ...


class NoDecodeSteps:
    """The runner makes all steps."""

    def run(self, plan: SchedulerOutput) -> bool:
        """None of these."""
        return False

    def commit(self) -> Drawn:
        """Never called."""
        raise AssertionError("no step was taken")
