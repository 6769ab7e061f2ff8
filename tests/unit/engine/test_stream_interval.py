"""How often a stream tells what is new: `stream_interval`, of a request and of the engine."""

from __future__ import annotations

import pytest

from tokenmill.contracts.request import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from tokenmill.engine.input_processor import ProcessedInput
from tokenmill.engine.output_processor import OutputProcessor
from tokenmill.sampling_params import RequestOutputKind, SamplingParams


def lengths(
    kind: RequestOutputKind, *, engine: int = 1, own: int | None = None, num_tokens: int = 11
) -> list[int]:
    """Tokens in each output of a stream that gets one token a step."""
    params = SamplingParams(output_kind=kind, stream_interval=own, max_tokens=20)
    child = EngineCoreRequest("core", [5], params, seed=0, max_tokens=20, arrival_time=0.0)
    processor = OutputProcessor(None, engine)
    processor.add_request(ProcessedInput("user", None, [5], params, [child]))
    found = []
    for step in range(num_tokens):
        finish = FinishReason.LENGTH if step == num_tokens - 1 else None
        output = EngineCoreOutput("core", new_token_ids=[step], finish_reason=finish)
        results, _ = processor.process_outputs(EngineCoreOutputs([output]))
        found += [len(result.outputs[0].token_ids) for result in results]
    return found


@pytest.mark.parametrize(
    ("engine", "own", "deltas"),
    [
        (1, None, [1] * 11),
        (1, 4, [1, 4, 4, 2]),
        (3, None, [1, 3, 3, 3, 1]),
        (3, 2, [1, 3, 3, 3, 1]),  # the engine's is the least
        (3, 5, [1, 5, 5]),
        (1, 100, [1, 10]),
    ],
)
def test_the_first_and_the_last_come_at_once_and_nothing_is_lost(
    engine: int, own: int | None, deltas: list[int]
) -> None:
    assert lengths(RequestOutputKind.DELTA, engine=engine, own=own) == deltas
    totals = [sum(deltas[: i + 1]) for i in range(len(deltas))]
    assert lengths(RequestOutputKind.CUMULATIVE, engine=engine, own=own) == totals
    assert lengths(RequestOutputKind.FINAL_ONLY, engine=engine, own=own) == [11]


def test_one_token_is_one_output() -> None:
    assert lengths(RequestOutputKind.DELTA, own=8, num_tokens=1) == [1]
