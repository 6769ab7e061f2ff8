"""Forms on a tiny model with random weights: the text has the form, however the request is run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from helpers.schemas import all_cases, load, validator
from helpers.tiny import tiny_llama
from tokenmill import LLM, RequestOutput, SamplingParams
from tokenmill.errors import InvalidRequestError

RECORD = {
    "type": "object",
    "properties": {
        "first name": {"enum": ["Alice", "Bob", "Größe 🎉"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["quick", "brown"]}, "maxItems": 2},
    },
    "required": ["first name", "age", "tags"],
    "additionalProperties": False,
}
FORMS = [
    {"json": RECORD},
    {"json": RECORD, "disable_any_whitespace": True},
    {"regex": r"[a-c]{2,4}-\d\d"},
    {"choice": ["A", "AB", "ABC", "你好", "The quick brown fox jumps"]},
    {"grammar": 'start: "one two " ("three" | "four" start)\n'},
    {"grammar": 'root ::= "(" root ")" | [0-9]+ "!"\n'},
    {
        "structural_tag": {
            "format": {
                "type": "tag",
                "begin": "<n>",
                "content": {"type": "json_schema", "json_schema": {"type": "boolean"}},
                "end": "</n>",
            }
        }
    },
    None,
]
PROMPTS = ["The quick brown fox", "One two three four", "def add(a, b):", "Größe 🎉"]
Result = tuple[list[int], str, str | None, int | str | None]


def params(number: int, **changes) -> SamplingParams:
    """Greedy and sampled, with and without other parameters."""
    given = {
        "structured_outputs": FORMS[number % len(FORMS)],
        "temperature": 0.0 if number % 3 == 0 else 1.0,
        "seed": 100 + number,
        "max_tokens": 80,
        "min_tokens": 7 if number % 5 == 1 else 0,
        "ignore_eos": number % 7 == 2,
        "logprobs": 1 if number % 8 == 4 else None,
    }
    return SamplingParams(**{**given, **changes})


def engine(**settings) -> LLM:
    return LLM(model=str(tiny_llama()), device="cpu", num_threads=1, **settings)


def run(llm: LLM, numbers: range) -> list[Result]:
    prompts = [PROMPTS[number % len(PROMPTS)] * (1 + number % 3) for number in numbers]
    outputs = llm.generate(prompts, [params(number) for number in numbers], use_tqdm=False)
    return [result(output) for output in outputs]


def result(output: RequestOutput) -> Result:
    (sequence,) = output.outputs
    assert sequence.error is None, sequence.error
    return sequence.token_ids, sequence.text, sequence.finish_reason, sequence.stop_reason


ALL = range(24)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with engine() as made:
        yield made


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[Result]:
    """Each alone."""
    return [run(llm, range(number, number + 1))[0] for number in ALL]


def fits(form: dict, text: str) -> bool:
    if "json" in form:
        validator(form["json"]).validate(load(text))
        return True
    if "choice" in form:
        return text in form["choice"]
    patterns = {
        "regex": form.get("regex", ""),
        "grammar": r"(one two four)*one two three|\(*\d+!\)*",
        "structural_tag": "<n>(true|false)</n>",
    }
    (kind,) = form.keys() & patterns.keys()
    return re.fullmatch(patterns[kind], text) is not None


def test_what_ends_by_itself_has_its_form(expected):
    num_ended = 0
    for number, (_, text, reason, _) in zip(ALL, expected, strict=True):
        form = FORMS[number % len(FORMS)]
        if form is not None and reason == "stop":
            assert fits(form, text), text
            num_ended += 1
    assert num_ended > 8


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"structured_outputs_config": {"enable_forced_tokens": False}},
        {"async_scheduling": True},
        {"async_scheduling": True, "structured_outputs_config": {"enable_forced_tokens": False}},
        {"max_num_batched_tokens": 8, "max_num_seqs": 6},
        {"block_size": 4, "max_model_len": 160, "num_kv_blocks": 40},
        {"block_size": 4, "max_model_len": 160, "num_kv_blocks": 40, "async_scheduling": True},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_results_do_not_depend_on_how_requests_are_run(expected, settings):
    with engine(**settings) as llm:
        assert run(llm, ALL) == expected
        if "num_kv_blocks" in settings:
            assert llm.llm_engine._client.core.scheduler.make_stats().num_preemptions > 0


def num_steps(llm: LLM, *args) -> int:
    core = llm.llm_engine._client.core
    before = core.num_settled_steps
    llm.generate(*args, use_tqdm=False)
    return core.num_settled_steps - before


def test_forced_tokens_save_steps(llm):
    asked = SamplingParams(
        structured_outputs={"json": RECORD, "disable_any_whitespace": True},
        max_tokens=80,
        seed=1,
    )
    with engine(structured_outputs_config={"enable_forced_tokens": False}) as plain:
        assert num_steps(llm, "Once", asked) < num_steps(plain, "Once", asked) / 2


def test_each_sequence_of_n_has_its_own_place(llm):
    (output,) = llm.generate(
        "Once", params(3, n=4, temperature=1.0, min_tokens=0, ignore_eos=False), use_tqdm=False
    )
    assert len({tuple(sequence.token_ids) for sequence in output.outputs}) > 1
    for sequence in output.outputs:
        assert sequence.text in FORMS[3]["choice"]


def test_b071_fifty_samples_are_choices_and_all_are_reachable(llm):
    choices = ["A", "AB", "ABC", "", "你好", "🎉👨‍👩‍👧", "a.*b", "[x](y)", "a\\b", 'say "hi"', "A"]
    asked = SamplingParams(
        structured_outputs={"choice": choices}, temperature=2.0, n=50, max_tokens=40, seed=5
    )
    (output,) = llm.generate("Once", asked, use_tqdm=False)
    found = {sequence.text for sequence in output.outputs}
    assert all(sequence.finish_reason == "stop" for sequence in output.outputs)
    assert found <= set(choices)
    assert len(found) > 5


@pytest.mark.parametrize("num_others", [1, 5])
def test_b069_a_text_ends_at_once_while_others_go_on(llm, num_others):
    short = SamplingParams(structured_outputs={"choice": ["a"]}, max_tokens=50, min_tokens=20)
    long = SamplingParams(structured_outputs={"regex": "b*"}, max_tokens=20, ignore_eos=True)
    first, *others = llm.generate(["Once"] * (1 + num_others), [short] + [long] * num_others)
    assert (first.outputs[0].text, len(first.outputs[0].token_ids)) == ("a", 1)
    assert all(len(other.outputs[0].token_ids) == 20 for other in others)


def test_a_complete_text_needs_no_end_token(llm):
    form = {"json": {"const": {"a": 1}}, "disable_any_whitespace": True}
    for changes in ({}, {"min_tokens": 50}, {"ignore_eos": True}, {"logprobs": 0}):
        asked = SamplingParams(structured_outputs=form, max_tokens=60, **changes)
        (output,) = llm.generate("Once", asked, use_tqdm=False)
        assert output.outputs[0].text == '{"a":1}'
        assert output.outputs[0].finish_reason == "stop"
        assert output.outputs[0].stop_reason is None
        assert 2 not in output.outputs[0].token_ids


def test_ignored_ends_let_a_text_go_on_as_long_as_it_can(llm):
    asked = SamplingParams(structured_outputs={"regex": "a+"}, max_tokens=30, ignore_eos=True)
    (output,) = llm.generate("Once", asked, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    assert set(output.outputs[0].text) == {"a"}


def test_an_empty_text_may_be_all_there_is(llm):
    asked = SamplingParams(structured_outputs={"choice": [""]}, max_tokens=5)
    (output,) = llm.generate("Once", asked, use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("", "stop")


def test_a_stop_string_cuts_a_document(llm):
    form = {"choice": ["The quick brown fox jumps"]}
    for included, text in ((False, "The quick"), (True, "The quick brown")):
        asked = SamplingParams(
            structured_outputs=form,
            max_tokens=60,
            stop=[" brown"],
            include_stop_str_in_output=included,
        )
        (output,) = llm.generate("Once", asked, use_tqdm=False)
        assert output.outputs[0].text == text
        assert output.outputs[0].stop_reason == " brown"


def test_the_length_ends_a_document_in_the_middle(llm):
    asked = SamplingParams(structured_outputs=FORMS[1], max_tokens=6, seed=1)
    (output,) = llm.generate("Once", asked, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 6
    with pytest.raises(json.JSONDecodeError):
        json.loads(output.outputs[0].text)


def test_logprobs_are_those_behind_the_mask(llm):
    asked = SamplingParams(structured_outputs={"choice": ["a", "b"]}, max_tokens=5, logprobs=3)
    (output,) = llm.generate("Once", asked, use_tqdm=False)
    first = output.outputs[0].logprobs[0]
    finite = {token: entry for token, entry in first.items() if entry.logprob > float("-inf")}
    assert {entry.decoded_token for entry in finite.values()} == {"a", "b"}
    assert sum(2.718281828**entry.logprob for entry in finite.values()) == pytest.approx(1.0)


def test_bans_that_leave_nothing_end_their_request_alone(llm):
    asked = [
        SamplingParams(structured_outputs={"choice": ["a"]}, bad_words=["a"], max_tokens=5),
        SamplingParams(structured_outputs={"choice": ["a"]}, max_tokens=5),
    ]
    banned, fine = llm.generate(["Once", "Once"], asked, use_tqdm=False)
    assert banned.outputs[0].finish_reason == "error"
    assert fine.outputs[0].text == "a"


def test_what_cannot_be_enforced_is_a_value_error_and_nothing_stays_behind(llm):
    good = SamplingParams(structured_outputs={"choice": ["a"]}, max_tokens=5)
    for form, parameter in [
        ({"regex": "("}, "structured_outputs.regex"),
        ({"json": {"type": "array", "uniqueItems": True}}, "structured_outputs.json"),
        ({"grammar": "start: missing"}, "structured_outputs.grammar"),
    ]:
        bad = SamplingParams(structured_outputs=form)
        with pytest.raises(ValueError) as caught:
            llm.generate(["x", "y"], [good, bad], use_tqdm=False)
        assert isinstance(caught.value, InvalidRequestError)
        assert caught.value.parameter == parameter
        assert not llm.llm_engine.has_unfinished_requests()
    with pytest.raises(InvalidRequestError, match="this engine's"):
        llm.generate("x", SamplingParams(structured_outputs={"regex": "a", "backend": "xgrammar"}))


def test_a_handful_of_schemas_at_a_high_temperature(llm):
    cases = [case for case in all_cases() if case.refused_for is None][::12]
    asked = [
        SamplingParams(
            structured_outputs={"json": case.schema}, temperature=1.5, seed=i, max_tokens=60
        )
        for i, case in enumerate(cases)
    ]
    outputs = llm.generate(["Some JSON: "] * len(cases), asked, use_tqdm=False)
    ended = 0
    for case, output in zip(cases, outputs, strict=True):
        assert output.outputs[0].finish_reason in ("stop", "length"), output.outputs[0].error
        if output.outputs[0].finish_reason == "stop":
            validator(case.schema).validate(load(output.outputs[0].text))
            ended += 1
    assert ended > 10


def test_without_a_tokenizer_a_form_is_refused():
    with (
        engine(skip_tokenizer_init=True) as llm,
        pytest.raises(InvalidRequestError, match="needs a tokenizer"),
    ):
        llm.generate([[1, 2]], SamplingParams(structured_outputs={"regex": "a"}))
