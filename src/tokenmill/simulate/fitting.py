"""A cost model from steps that an engine has made.

Seconds of a step are taken for a sum of parts, each a number that the work has times a cost that is
at least 0. Short steps count as much as long ones: what matters is by which part of itself each is
missed. Tokens above one of `KNEES` may cost more each, but never less, as they do where a step is
bound by memory first and then by products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tokenmill.errors import ConfigError
from tokenmill.simulate.work import StepTime, StepWork

KNEES = (8, 32, 128)
"""Tokens of a step from which on a further one may cost more."""
FEATURES = (
    "step", "request", "token", *(f"token above {knee}" for knee in KNEES), "row of logits",
    "key", "score",
)  # fmt: skip
_NUM_REWEIGHTINGS = 4
_NUM_ROUNDS = 5_000
_CONVERGED = 1e-9
"""Of the largest coordinate."""


def features_of(work: StepWork) -> tuple[float, ...]:
    """The numbers that `FEATURES` names."""
    return (
        1.0,
        work.num_requests,
        work.num_tokens,
        *(max(work.num_tokens - knee, 0) for knee in KNEES),
        work.num_logits,
        work.num_keys,
        work.num_scores,
    )


@dataclass(frozen=True, slots=True)
class FittedCost:
    """What each of the `FEATURES` costs, in seconds."""

    costs: tuple[float, ...]

    def seconds(self, work: StepWork) -> float:
        return sum(
            cost * number for cost, number in zip(self.costs, features_of(work), strict=True)
        )


def read_step_times(path: Path) -> list[StepTime]:
    """Lines that `tokenmill bench throughput --step-times` has written. Raises `ConfigError`."""
    try:
        steps = msgspec.json.Decoder(StepTime).decode_lines(path.expanduser().read_bytes())
    except OSError as error:
        raise ConfigError(f"step_times={path}: cannot be read: {error.strerror}.") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"step_times={path}: a line is no step: {error}.") from error
    if not steps or min(step.seconds for step in steps) <= 0:
        raise ConfigError(
            f"step_times={path} must hold steps, each with more than 0 seconds. Make one with"
            f" `tokenmill bench throughput --step-times {path}`."
        )
    return steps


def write_step_times(path: Path, steps: Sequence[StepTime]) -> None:
    """Raises `ConfigError` where there can be no such file."""
    try:
        path.expanduser().write_bytes(msgspec.json.Encoder().encode_lines(steps))
    except OSError as error:
        raise ConfigError(f"step_times={path}: cannot be written: {error.strerror}.") from error


def fit(steps: Sequence[StepTime]) -> FittedCost:
    """The costs that miss the measured seconds least.

    Errors count in parts of what a step is predicted to take, not of what it took: else steps that
    took long by chance would count for little, and all predictions be too short.
    """
    weights = [1.0 / step.seconds for step in steps]
    for _ in range(_NUM_REWEIGHTINGS):
        rows = [
            [weight * number for number in features_of(step)]
            for weight, step in zip(weights, steps, strict=True)
        ]
        targets = [weight * step.seconds for weight, step in zip(weights, steps, strict=True)]
        cost = FittedCost(tuple(_non_negative_least_squares(rows, targets)))
        weights = [1.0 / cost.seconds(step) for step in steps]
    return cost


def _non_negative_least_squares(
    rows: Sequence[Sequence[float]], targets: Sequence[float]
) -> list[float]:
    """Find x >= 0 that brings every row's product with x as near to its target as can be.

    One coordinate after another takes its best value, until none moves.
    """
    count = range(len(rows[0]))
    scales = [max(row[i] for row in rows) or 1.0 for i in count]
    scaled = [[row[i] / scales[i] for i in count] for row in rows]
    squares = [[sum(row[i] * row[j] for row in scaled) for j in count] for i in count]
    sums = [
        sum(row[i] * target for row, target in zip(scaled, targets, strict=True)) for i in count
    ]
    x = [0.0] * len(scales)
    for _ in range(_NUM_ROUNDS):
        largest_move = 0.0
        for i in count:
            if squares[i][i] == 0.0:
                continue
            slope = sum(square * value for square, value in zip(squares[i], x, strict=True))
            new = max(x[i] + (sums[i] - slope) / squares[i][i], 0.0)
            largest_move = max(largest_move, abs(new - x[i]))
            x[i] = new
        if largest_move < _CONVERGED * max(x):
            break
    return [value / scale for value, scale in zip(x, scales, strict=True)]


def relative_errors(cost: FittedCost, steps: Sequence[StepTime]) -> list[float]:
    """Of each step: 0.1 is predicted a tenth too long, -0.1 a tenth too short."""
    return [cost.seconds(step) / step.seconds - 1.0 for step in steps]
