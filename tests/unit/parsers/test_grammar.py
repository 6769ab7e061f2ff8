"""Grammars of calls: what they allow is read back by the family's parser, and nothing else is."""

from __future__ import annotations

import functools
import json
import random

import jsonschema
import llguidance
import llguidance.numpy
import pytest
import tokenizers

from helpers.answers import Message
from helpers.tiny_text import tiny_tokenizer
from tokenmill.entrypoints.parsers.answer import AnswerParser
from tokenmill.entrypoints.parsers.grammar import (
    MISTRAL_ARGS,
    STYLES,
    calls_or_json,
    forced_calls,
    lazy_calls,
)
from tokenmill.entrypoints.parsers.grammar_writer import Tool
from tokenmill.entrypoints.parsers.registry import FORCED, FORCED_FORMAT, TOOL_FORMATS
from tokenmill.errors import InvalidRequestError

CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Bern ☃"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "note": {"anyOf": [{"$ref": "#/$defs/note"}, {"type": "null"}]},
        "wet": {"type": "boolean"},
    },
    "required": ["city", "note"],
    "additionalProperties": False,
    "$defs": {"note": {"type": "array", "items": {"enum": [0.5, "\"'\\\n"]}, "maxItems": 2}},
}
WEATHER = Tool("get_weather", CITY, strict=True)
NOW = Tool("now", None)
TOOLS = [WEATHER, NOW]
PARIS = '{"city": "Paris", "note": null}'


@functools.cache
def tokenizer(special):
    """The tiny tokenizer; `special` are marks that are special tokens."""
    backend = tiny_tokenizer()
    backend.add_special_tokens(
        [tokenizers.AddedToken(mark, special=True, normalized=False) for mark in special]
    )
    return backend, llguidance.LLTokenizer(
        backend.to_str(), n_vocab=backend.get_vocab_size(), eos_token=2
    )


def marks_of(name):
    name = parser_of(name)
    return FORCED_FORMAT.marks if name == FORCED else TOOL_FORMATS[name].marks


def ids_of(special):
    backend, _ = tokenizer(special)
    return lambda text: backend.token_to_id(text) if text in special else None


def matcher_of(grammar, special):
    _, wrapped = tokenizer(special)
    matcher = llguidance.LLMatcher(
        wrapped, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0
    )
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(grammar, text, special=()):
    """Whether the grammar allows the text, and that it ends there."""
    backend, _ = tokenizer(special)
    matcher = matcher_of(grammar, special)
    ids = backend.encode(text, add_special_tokens=False).ids
    return matcher.consume_tokens(ids) and matcher.is_accepting()


def random_text(grammar, seed, special=(), longest=2_000):
    """A text of random tokens among those allowed."""
    backend, wrapped = tokenizer(special)
    matcher, rng = matcher_of(grammar, special), random.Random(seed)
    mask = llguidance.numpy.allocate_token_bitmask(1, wrapped.vocab_size)
    ids = []
    while not matcher.is_stopped() and len(ids) < longest:
        llguidance.numpy.fill_next_token_bitmask(matcher, mask, 0)
        allowed = [i for i in range(backend.get_vocab_size()) if mask[0, i // 32] >> (i % 32) & 1]
        if 2 in allowed and (len(ids) > 80 or len(allowed) == 1 or rng.random() < 0.5):
            break
        ids.append(rng.choice([i for i in allowed if i != 2]))
        assert matcher.consume_token(ids[-1])
    assert matcher.is_accepting(), backend.decode(ids, skip_special_tokens=False)
    return backend.decode(ids, skip_special_tokens=False)


def parser_of(style):
    return "mistral" if style == MISTRAL_ARGS else style


def parse(name, text, tools=TOOLS):
    name = parser_of(name)
    parser = AnswerParser(
        tools=FORCED_FORMAT if name == FORCED else TOOL_FORMATS[name],
        schemas={tool.name: tool.parameters for tool in tools},
    )
    message = Message()
    message.add(parser.push(text) + parser.finish())
    return message


VARIANTS = [(name, special) for name in STYLES for special in (False, True) if marks_of(name)] + [
    (FORCED, False)
]


@pytest.mark.parametrize(("name", "is_special"), VARIANTS)
def test_whatever_is_forced_is_calls_that_fit_their_schemas(name, is_special):
    special = tuple(marks_of(name)) if is_special else ()
    grammar = forced_calls(TOOLS, name, ids_of(special))
    validator = jsonschema.Draft202012Validator(CITY)
    seen = set()
    for seed in range(12):
        message = parse(name, random_text(grammar, seed, special))
        assert message.content == ""
        assert message.calls
        for called, arguments in message.calls:
            seen.add(called)
            if called == "now":
                assert json.loads(arguments) == {}
            else:
                assert called == "get_weather"
                validator.validate(json.loads(arguments))
    assert seen == {"get_weather", "now"}


CALLS = {
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json"
    "\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "hermes": '<tool_call>\n{"name": "{}", "arguments": {}}\n</tool_call>',
    "json": '[{"name": "{}", "parameters": {}}]',
    "llama3_json": '{"name": "{}", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "{}", "arguments": {}}]',
    MISTRAL_ARGS: "[TOOL_CALLS]{}[ARGS]{}",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.{}:0"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
}
CODER = Tool(
    "write",
    {
        "properties": {
            "path": {"type": "string", "description": "where"},
            "mode": {"enum": ["a", "w"]},
            "size": {"type": "integer", "maximum": 99},
            "more": {"anyOf": [{"$ref": "#/$defs/more"}, {"type": "null"}]},
        },
        "required": ["path", "size"],
        "$defs": {"more": {"type": "array", "items": {"type": "boolean"}}},
    },
    strict=True,
)
FILLED = {"path": "a <b>\n\n", "mode": "w", "size": "7", "more": "[true]"}


def written(name, tool, arguments):
    before, between, after = CALLS[name].split("{}")
    return before + tool + between + arguments + after


@pytest.mark.parametrize("name", CALLS)
def test_required_named_and_single_calls(name):
    one = written(name, "get_weather", PARIS)
    required = forced_calls(TOOLS, name, lambda _: None)
    assert accepts(required, one)
    assert accepts(required, written(name, "now", "{}"))
    assert parse(name, one).calls == [("get_weather", PARIS)]
    for wrong in (
        "",
        "Ok. " + one,
        one[:-1],
        one + "!",
        written(name, "other", "{}"),
        written(name, "now", '{"a": 1}'),
        written(name, "get_weather", "{}"),
        written(name, "get_weather", PARIS.replace("Paris", "Rome")),
    ):
        assert not accepts(required, wrong)
    named = forced_calls([NOW], name, lambda _: None, parallel=False)
    assert accepts(named, written(name, "now", "{}"))
    assert not accepts(named, one)


@pytest.mark.parametrize(
    ("name", "two"),
    [
        ("hermes", CALLS["hermes"] + "\n" + CALLS["hermes"]),
        ("llama3_json", CALLS["llama3_json"] + "; " + CALLS["llama3_json"]),
        ("json", CALLS["json"][:-1] + ", " + CALLS["json"][1:]),
    ],
)
def test_several_calls_unless_one_is_wanted(name, two):
    text = two.replace('"{}"', '"now"').replace(": {}", ": {}")
    assert accepts(forced_calls(TOOLS, name, lambda _: None), text)
    assert not accepts(forced_calls(TOOLS, name, lambda _: None, parallel=False), text)


def test_pythonic_arguments():
    grammar = forced_calls(TOOLS, "pythonic", lambda _: None)
    for text in (
        "[now()]",
        '[get_weather(city="Paris", note=null), now()]',
        '[get_weather(city="Paris", days=3, note=[0.5], wet=true)]',
    ):
        assert accepts(grammar, text), text
    for text in ("[get_weather()]", "[get_weather(note=null)]", "[now(a=1)]", "[]", "now()"):
        assert not accepts(grammar, text), text
    optional = Tool("f", {"properties": {"a": {"const": 1}, "b": {"const": 2}}})
    grammar = forced_calls([optional], "pythonic", lambda _: None, parallel=False)
    texts = ("[f()]", "[f(a=1)]", "[f(b=2)]", "[f(a=1, b=2)]")
    assert all(accepts(grammar, text) for text in texts)
    assert not accepts(grammar, "[f(, b=2)]")


def coded(name, **values):
    parameters = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def glm_coded(name, **values):
    arguments = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in values.items()
    )
    return f"<tool_call>{name}\n{arguments}</tool_call>"


WRITTEN = pytest.mark.parametrize(
    ("family", "coded"), [("qwen3_coder", coded), ("glm45", glm_coded)]
)


@WRITTEN
@pytest.mark.parametrize("is_special", [False, True])
def test_values_without_quotes(family, coded, is_special):
    special = tuple(marks_of(family)) if is_special else ()
    grammar = forced_calls([CODER, NOW], family, ids_of(special))
    for right in (
        coded("now"),
        coded("write", **FILLED),
        coded("write", path="x", size="5") + "\n" + coded("now"),
    ):
        assert accepts(grammar, right, special), right
    for wrong in (
        coded("write", path="x"),
        coded("write", path="x", size="100"),
        coded("write", path="x", size="x"),
        coded("write", path="x", mode="z", size="5"),
        coded("write", path="x", size="5", other="x"),
        coded("now", path="x"),
        coded("other"),
    ):
        assert not accepts(grammar, wrong, special), wrong
    ((_, arguments),) = parse(family, coded("write", **FILLED), [CODER]).calls
    read = {"path": "a <b>\n\n", "mode": "w", "size": 7, "more": [True]}
    assert json.loads(arguments) == read


@WRITTEN
@pytest.mark.parametrize("is_special", [False, True])
def test_values_without_quotes_of_strict_tools(family, coded, is_special):
    special = tuple(marks_of(family)) if is_special else ()
    tools = [CODER, Tool("loose", {"properties": {"a": {"type": "integer"}}})]
    grammar = lazy_calls(tools, family, ids_of(special))
    assert accepts(grammar, "Ok.\n" + coded("write", **FILLED) + "\nDone.", special)
    assert accepts(grammar, coded("loose", a="x", anything="<y>\nz"), special)
    assert not accepts(grammar, coded("write", path="x"), special)


@pytest.mark.parametrize("schema", [{"pattern": "a"}, {"maxLength": 5}, {"format": "date"}])
def test_strings_without_quotes_are_held_to_nothing_or_refused(schema):
    tool = Tool("f", {"properties": {"a": {"type": "string", **schema}}}, place="tools[3]")
    with pytest.raises(InvalidRequestError, match="without quotes") as caught:
        forced_calls([tool], "qwen3_coder", lambda _: None)
    assert caught.value.parameter == "tools[3]"


def test_either_calls_or_a_document():
    """B055."""
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    for name in CALLS:
        grammar = calls_or_json(TOOLS, name, lambda _: None, schema)
        assert accepts(grammar, '{"x": 5}')
        assert accepts(grammar, written(name, "now", "{}"))
        assert not accepts(grammar, '{"y": 5}')
        assert not accepts(grammar, "text")


@pytest.mark.parametrize("name", sorted(CALLS))
@pytest.mark.parametrize("is_special", [False, True])
def test_strict_tools_are_held_to_their_schemas_once_a_call_begins(name, is_special):
    special = tuple(marks_of(name)) if is_special else ()
    grammar = lazy_calls([WEATHER, Tool("loose", CITY)], name, ids_of(special))
    if name in ("json", "llama3_json"):
        assert grammar is None
        return
    good = written(name, "get_weather", PARIS)
    for text in ("", "Just text, <b> [x] {}.", good, f"Ok.\n{good}", f"{good}\nand {good}."):
        assert accepts(grammar, text, special), text
    assert accepts(grammar, written(name, "loose", '{"any": "thing"}'), special)
    for arguments in ("{}", "no json", PARIS.replace("Paris", "Rome")):
        assert not accepts(grammar, written(name, "get_weather", arguments), special)
    assert not accepts(grammar, written(name, "other", "{}"), special)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"type": 5}, "type"),
        ({"properties": {"a": {"not": {"type": "null"}}}}, "not"),
        ({"patterns": {}}, "not known"),
        ({"properties": []}, "properties"),
    ],
)
def test_b059_schemas_that_cannot_be_enforced_name_their_tool(parameters, message):
    tool = Tool("f", parameters, place="tools[3]")
    with pytest.raises(InvalidRequestError, match=message) as caught:
        forced_calls([NOW, tool], "hermes", lambda _: None)
    assert caught.value.parameter == "tools[3]"


@pytest.mark.parametrize(
    "parameters",
    [
        {"anyOf": [{}]},
        {"properties": {"class": {}}},
        {"properties": {"a-b": {}}},
        {"properties": {}, "required": ["a"]},
        {"properties": {"a": True}},
    ],
)
def test_what_arguments_one_by_one_cannot_express_is_refused(parameters):
    tool = Tool("f", parameters, place="tools[3]")
    with pytest.raises(InvalidRequestError, match="one by one") as caught:
        forced_calls([tool], "pythonic", lambda _: None)
    assert caught.value.parameter == "tools[3]"


def test_schemas_of_requests_are_left_as_they_are():
    before = json.dumps(CITY)
    forced_calls(TOOLS, "hermes", lambda _: None)
    assert json.dumps(CITY) == before
