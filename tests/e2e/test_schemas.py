"""Three hundred schemas on the default model at temperature 1: no document is invalid."""

from __future__ import annotations

import random

import pytest

from helpers.default_model import default_model_path
from helpers.schemas import all_cases, load, validator
from tokenmill import LLM, SamplingParams
from tokenmill.errors import InvalidRequestError

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROMPTS = [
    "Some JSON that fits the schema: ",
    "{",
    "A list of people with their names and ages:\n",
    "The answer is\n\n\n\n\n",
]


@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_b061_every_document_that_ends_by_stop_validates(temperature: float) -> None:
    """And every schema that cannot be enforced is refused with a reason."""
    cases = all_cases()
    assert len(cases) >= 300
    rng = random.Random(temperature)
    num_stopped = num_refused = 0
    enforced = [case for case in cases if case.refused_for is None]
    with LLM(str(default_model_path()), device="cpu", kv_cache_memory_bytes=1 << 29) as llm:
        for case in cases:
            if case.refused_for is not None:
                params = SamplingParams(structured_outputs={"json": case.schema})
                with pytest.raises(InvalidRequestError) as caught:
                    llm.generate("x", params, use_tqdm=False)
                assert case.refused_for in str(caught.value)
                num_refused += 1
        asked = [
            SamplingParams(
                structured_outputs={"json": case.schema},
                temperature=temperature,
                seed=number,
                max_tokens=300,
                n=2,
            )
            for number, case in enumerate(enforced)
        ]
        outputs = llm.generate([rng.choice(PROMPTS) for _ in enforced], asked, use_tqdm=False)
    for case, output in zip(enforced, outputs, strict=True):
        for sequence in output.outputs:
            assert sequence.finish_reason in ("stop", "length"), (case.name, sequence.error)
            if sequence.finish_reason == "stop":
                validator(case.schema).validate(load(sequence.text))
                num_stopped += 1
    assert num_refused > 25
    assert num_stopped > 1.5 * len(enforced), "most documents end by themselves"


def test_b062_json_of_tempting_prompts_ends_and_has_no_runs_of_blanks() -> None:
    """Greedy answers to prompts that tempt a small model to emit blank lines."""
    prompts = [
        f"List {i} facts about rivers as JSON.\n\n\n\n\n\n{' ' * (i % 7)}" for i in range(50)
    ]
    forms = [
        {
            "json": {
                "type": "object",
                "properties": {
                    "facts": {
                        "type": "array",
                        "items": {"type": "string", "maxLength": 40},
                        "maxItems": 3,
                    }
                },
                "required": ["facts"],
                "additionalProperties": False,
            }
        },
        {
            "json": {
                "type": "object",
                "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "y"]}},
                "required": ["a", "b"],
                "additionalProperties": False,
            }
        },
    ]
    params = [
        SamplingParams(structured_outputs=forms[i % 2], temperature=0, max_tokens=300)
        for i in range(len(prompts))
    ]
    with LLM(str(default_model_path()), device="cpu", kv_cache_memory_bytes=1 << 29) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for output, given in zip(outputs, params, strict=True):
        (sequence,) = output.outputs
        assert sequence.finish_reason == "stop", sequence.text
        assert given.structured_outputs is not None
        validator(load(given.structured_outputs.source)).validate(load(sequence.text))
        outside = "".join(sequence.text.split('"')[::2])
        assert "\n\n" not in outside
        assert " " * 17 not in outside
