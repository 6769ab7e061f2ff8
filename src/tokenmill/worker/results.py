"""When a step's result is made: at once, or when the host asks for it."""

from __future__ import annotations

from collections.abc import Callable

from tokenmill.contracts.result import ModelRunnerOutput


class FinishedStep:
    """A step whose result is there."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def result(self) -> ModelRunnerOutput:
        """The result."""
        return self._output


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


def finish_now(finish: Callable[[], ModelRunnerOutput]) -> FinishedStep:
    """For a device that computes in the calls themselves."""
    return FinishedStep(finish())


def finish_later(finish: Callable[[], ModelRunnerOutput]) -> UnfinishedStep:
    """For a device that computes by itself, while the host prepares the next step."""
    return UnfinishedStep(finish)
