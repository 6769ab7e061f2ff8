"""The other backend: what it takes it enforces, and it takes nothing else."""

# ruff: noqa: E501 - a case a line

from __future__ import annotations

import functools
import json
import random
import re

import numpy as np
import pytest

from helpers.grammar_walk import EOS, allowed, begin, text_of, walk, walk_tokenizer
from helpers.schemas import Case, all_cases, load, validator
from tokenmill.errors import InvalidRequestError
from tokenmill.structured_output.xgrammar import XGrammarBackend
from tokenmill.structured_outputs import StructuredOutputsParams


@functools.cache
def backend() -> XGrammarBackend:
    tokenizer = walk_tokenizer()
    return XGrammarBackend(
        tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=[EOS], num_threads=1
    )


def form(**given) -> StructuredOutputsParams:
    return StructuredOutputsParams(**given)


def texts(params: StructuredOutputsParams, count: int, **kwargs) -> list[str]:
    found = []
    for seed in range(count):
        grammar = begin(params, backend())
        ids, ended = walk(grammar, random.Random(seed), backend=backend(), **kwargs)
        if ended:
            found.append(text_of(ids))
    return found


def is_taken(case: Case) -> bool:
    try:
        backend().compile(form(json=case.schema))
    except InvalidRequestError:
        return False
    return True


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_schemas_are_enforced_or_refused(case):
    params = form(json=case.schema)
    if not is_taken(case):
        return
    assert case.refused_for is None
    check = validator(case.schema)
    for document in texts(params, 3):
        check.validate(load(document))


def test_many_schemas_are_enforced():
    assert sum(map(is_taken, all_cases())) > 180


@pytest.mark.parametrize(
    ("params", "pattern"),
    [
        (form(regex="[a-c]{2}x?"), "[a-c]{2}x?"),
        (form(choice=["A", "AB", "a.b", '"', "你好", "x\\y"]), r'A|AB|a\.b|"|你好|x\\y'),
        (form(grammar='root ::= "<" [0-9]+ ">" | "-"'), "<[0-9]+>|-"),
        (form(grammar="start: /[ab]+/ \"!\"\n"), "[ab]+!"),
        (form(structural_tag={"type": "structural_tag", "format": {"type": "tag", "begin": "<b>", "content": {"type": "json_schema", "json_schema": {"type": "boolean"}}, "end": "</b>"}}), "<b>(true|false)</b>"),
    ],
)  # fmt: skip
def test_other_forms(params, pattern):
    found = texts(params, 25, patience=6)
    assert found
    for text in found:
        assert re.fullmatch(pattern, text), text


def test_white_space_is_bounded():
    array = {"type": "array", "items": {"type": "boolean"}, "maxItems": 4}
    for document in texts(form(json=array), 60):
        assert not re.search(r"\s\s", document)
    for document in texts(form(json=array, disable_any_whitespace=True), 30):
        assert not re.search(r"\s", document)
    with pytest.raises(InvalidRequestError, match="whitespace_pattern"):
        backend().compile(form(json=array, whitespace_pattern="[ ]"))


def test_a_complete_text_is_known_to_be():
    grammar = begin(form(regex="ab?"), backend())
    tokenizer = walk_tokenizer()
    assert EOS not in allowed(grammar, backend())
    assert grammar.accept(tokenizer.encode("a", add_special_tokens=False)) is None
    assert EOS in allowed(grammar, backend())
    assert not grammar.is_terminated
    assert grammar.accept(tokenizer.encode("b", add_special_tokens=False)) is None
    assert grammar.is_terminated
    assert begin(form(regex="ab"), backend()).accept([EOS]) is not None


def test_forced_tokens_are_the_ones_that_masks_allow_alone():
    schema = {
        "type": "object",
        "properties": {"first name": {"enum": ["Alice", "Bob"]}, "age": {"type": "integer"}},
        "required": ["first name", "age"],
    }
    params, num_forced = form(json=schema, disable_any_whitespace=True), 0
    for seed in range(5):
        plain, quick = begin(params, backend()), begin(params, backend())
        rng = random.Random(seed)
        for _ in range(40):
            forced = quick.take_forced(1000)
            num_forced += len(forced)
            for token_id in forced:
                assert allowed(plain, backend()) == [token_id]
                assert plain.accept([token_id]) is None
            assert plain.is_terminated == quick.is_terminated
            if plain.is_terminated:
                break
            choices = allowed(plain, backend())
            assert choices == allowed(quick, backend())
            token_id = rng.choice(choices)
            if token_id == EOS:
                break
            assert plain.accept([token_id]) is None
            assert quick.accept([token_id]) is None
    assert num_forced > 20


def test_walking_over_drafts_changes_nothing():
    params = form(regex="[ab]cd?e")
    grammar, probe = begin(params, backend()), begin(params, backend())
    drafts = walk_tokenizer().encode("ac", add_special_tokens=False)
    masks = [allowed(probe, backend())]
    for draft in drafts:
        assert probe.accept([draft]) is None
        masks.append(allowed(probe, backend()))
    assert grammar.cut_drafts([*drafts, EOS]) == drafts
    assert [allowed(grammar, backend()) for _ in grammar.walk(drafts)] == masks
    assert allowed(grammar, backend()) == masks[0]


def test_masks_of_many_rows_are_those_of_each_alone():
    grammars = [begin(form(regex=p), backend()) for p in ("a+", "[0-9]{3}", "x|y") * 4]
    num_words = -(-walk_tokenizer().vocab_size // 32)
    together = np.zeros((len(grammars), num_words), np.int32)
    backend().fill_bitmasks([each.matcher for each in grammars], together)
    for grammar, row in zip(grammars, together, strict=True):
        alone = np.zeros((1, num_words), np.int32)
        backend().fill_bitmasks([grammar.matcher], alone)
        assert (alone[0] == row).all()


@pytest.mark.parametrize(
    "params",
    [
        form(regex="("),
        form(grammar="root ::= missing"),
        form(grammar='a ::= "b"'),
        form(grammar="what is this"),
        form(structural_tag={"type": "structural_tag"}),
        form(json={"type": 5}),
        form(json={"allOf": [{"type": "integer"}, {"minimum": 3}]}),
    ],
    ids=lambda p: f"{p.kind} {p.source[:30]}",
)
def test_what_is_malformed_is_refused(params):
    with pytest.raises(InvalidRequestError) as caught:
        backend().compile(params)
    assert caught.value.parameter == f"structured_outputs.{params.kind}"


def test_any_json_object():
    for document in texts(form(json_object=True), 10):
        assert isinstance(json.loads(document), dict)
