"""`StructuredOutputsParams`: one form, checked without recursion before anything parses it."""

# ruff: noqa: E501 - a case a line

from __future__ import annotations

from functools import partial

import msgspec
import pytest

from helpers.timing import in_time
from tokenmill.errors import InvalidRequestError, UnknownArgumentError
from tokenmill.sampling_params import SamplingParams
from tokenmill.structured_outputs import (
    MAX_CHOICE_CHARS,
    MAX_CHOICES,
    MAX_DEPTH,
    MAX_GRAMMAR_CHARS,
    MAX_JSON_CHARS,
    MAX_REGEX_CHARS,
    MAX_RULES,
    StructuredOutputsParams,
    as_structured_outputs,
)


def form(**given):
    return StructuredOutputsParams(**given)


@pytest.mark.parametrize(
    ("given", "kind", "source"),
    [
        ({"json": {"type": "object"}}, "json", '{"type":"object"}'),
        ({"json": '{"type": "object"}'}, "json", '{"type": "object"}'),
        ({"json": True}, "json", "true"),
        ({"json_object": True}, "json_object", "true"),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["b", "a", "b"]}, "choice", '["b","a"]'),
        ({"choice": [""]}, "choice", '[""]'),
        ({"grammar": "start: A"}, "grammar", "start: A"),
        ({"structural_tag": {"a": 1}}, "structural_tag", '{"a":1}'),
    ],
)
def test_a_form_is_kept_as_text(given, kind, source):
    params = form(**given)
    assert (params.kind, params.source) == (kind, source)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=type(params)) == params
    assert as_structured_outputs(given) == params
    assert SamplingParams(structured_outputs=given).structured_outputs == params


@pytest.mark.parametrize(
    ("given", "parameter", "message"),
    [
        ({}, "structured_outputs", "none of"),
        ({"json": {}, "regex": "a"}, "structured_outputs", "json and regex"),
        ({"json_object": False}, "structured_outputs.json_object", "must be true"),
        ({"json": ""}, "structured_outputs.json", "empty"),
        ({"json": "{"}, "structured_outputs.json", "no JSON"),
        ({"json": "[1]"}, "structured_outputs.json", "JSON object"),
        ({"json": 5}, "structured_outputs.json", "JSON object"),
        ({"json": {"a": {1, 2}.__iter__()}}, "structured_outputs.json", "cannot"),
        ({"json": {"const": float("nan")}}, "structured_outputs.json", "finite"),
        ({"json": '{"const": "\\ud800"}'}, "structured_outputs.json", "no JSON"),
        ({"regex": ""}, "structured_outputs.regex", "empty"),
        ({"regex": "a\x00b"}, "structured_outputs.regex", "NUL"),
        ({"regex": "\ud800"}, "structured_outputs.regex", "surrogate"),
        ({"regex": 5}, "structured_outputs.regex", "string"),
        ({"grammar": ""}, "structured_outputs.grammar", "empty"),
        ({"choice": []}, "structured_outputs.choice", "empty"),
        ({"choice": "abc"}, "structured_outputs.choice", "list"),
        ({"choice": [1]}, "structured_outputs.choice", "string"),
        ({"choice": ["a\x00"]}, "structured_outputs.choice", "NUL"),
        ({"regex": "a", "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern", "no effect"),
        ({"choice": ["a"], "disable_any_whitespace": True}, "structured_outputs.disable_any_whitespace", "no effect"),
        ({"json_object": True, "disable_additional_properties": True}, "structured_outputs.disable_additional_properties", "no effect"),
        ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern", "exclude"),
        ({"json": {}, "disable_any_whitespace": 1}, "structured_outputs.disable_any_whitespace", "True or False"),
        ({"json": {}, "backend": 3}, "structured_outputs.backend", "name"),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_field(given, parameter, message):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        form(**given)
    assert caught.value.parameter == parameter
    assert len(str(caught.value)) < 500


def test_an_unknown_field_is_refused_with_the_nearest_name():
    with pytest.raises(UnknownArgumentError, match="Did you mean 'regex'"):
        form(regexp="a")
    with pytest.raises(InvalidRequestError, match="mapping of its fields"):
        as_structured_outputs("regex")


def test_sizes_have_limits():
    form(regex="a" * MAX_REGEX_CHARS)
    form(choice=[str(i) for i in range(MAX_CHOICES)])
    too_large = [
        {"regex": "a" * (MAX_REGEX_CHARS + 1)},
        {"grammar": "a" * (MAX_GRAMMAR_CHARS + 1)},
        {"grammar": "".join(f"r{i}: A\n" for i in range(MAX_RULES + 1))},
        {"grammar": "".join(f"r{i} ::= [a]\n" for i in range(MAX_RULES + 1))},
        {"json": '{"title": "' + "a" * MAX_JSON_CHARS + '"}'},
        {"json": {"enum": [0] * 300_000}},
        {"choice": [str(i) for i in range(MAX_CHOICES + 1)]},
        {"choice": ["a" * (MAX_CHOICE_CHARS + 1)]},
    ]

    def refused(given):
        with pytest.raises(InvalidRequestError, match=r"at most|more than"):
            form(**given)

    for given in too_large:
        in_time(partial(refused, given), 1)


@pytest.mark.parametrize("brackets", ["()", "[]", "{}"])
def test_depth_has_a_limit_in_every_form(brackets):
    opened, closed = brackets
    deep = opened * (MAX_DEPTH + 1) + "a" + closed * (MAX_DEPTH + 1)
    for given in ({"regex": deep}, {"grammar": f"start: {deep}"}):
        with pytest.raises(InvalidRequestError, match="nested deeper"):
            form(**given)


def test_brackets_side_by_side_are_not_deep():
    form(regex="(a)" * 500 + "[([{]" * 500 + "\\(" * 500)
    form(grammar='start: ("a") ("(" "[") ' + "[({]" * 300)
    form(json={"allOf": [{"pattern": "((((("}] * 500})


def test_values_that_hold_themselves_are_too_deep():
    schema: dict = {}
    schema["not"] = schema
    with pytest.raises(InvalidRequestError, match="nested deeper"):
        form(json=schema)
    deep: dict = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(InvalidRequestError, match="nested deeper"):
        form(json=deep)
    while deep:  # taken apart by hand: the interpreter would recur
        deep = deep.pop("items")
