"""Grammars for calls: what a model may write where a call is required, or once one has begun.

They are Lark in the dialect of llguidance: `%json {...}` is a JSON schema, `<[7]>` a special token.
Each family's calls are written as its models were trained to write them, so that its parser reads
them back; arguments satisfy the tool's schema.
"""

from __future__ import annotations

import copy
import json
import keyword
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.entrypoints.parsers import deepseek, harmony
from tokenmill.errors import InvalidRequestError, shown
from tokenmill.structured_output.json_schema import enforceable_schema

SpecialId = Callable[[str], int | None]
"""The id of a special token; None for texts that are none."""

_EXTRA_KEYWORDS = {
    "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
}
"""JSON as Python writes it, which is what models have seen."""
_NO_ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call."""

    name: str
    parameters: Mapping[str, Any] | None
    """A JSON schema; None for a function without any."""
    strict: bool = False
    place: str = "tools"
    """Its field in the request, for errors."""

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of its arguments, which are an object in any case."""
        if self.parameters is None:
            return _NO_ARGUMENTS
        return {"type": "object", **self.parameters}


@dataclass(frozen=True, slots=True)
class Mark:
    """A text that may be a special token."""

    text: str


@dataclass(frozen=True, slots=True)
class Schema:
    """A place for JSON."""

    schema: Mapping[str, Any]
    place: str
    """The schema's field in the request."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """A place for arguments as Python writes them."""

    tool: Tool
    schema: Mapping[str, Any]


Part = str | Mark | Schema | Arguments


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How a family writes several calls."""

    call: Callable[[Tool, Mapping[str, Any]], list[Part]]
    """One call of a tool with arguments of this schema."""
    before: tuple[Part, ...] = ()
    between: tuple[Part, ...] = ()
    after: tuple[Part, ...] = ()
    trigger: str | None = None
    """The mark that nothing but a call begins with; the first part of the first call."""


def _object(key: str) -> Callable[[Tool, Mapping[str, Any]], list[Part]]:
    def call(tool: Tool, schema: Mapping[str, Any]) -> list[Part]:
        # In pieces as JSON has them: where a document may stand as well, both begin alike.
        head = ["{", '"name"', ": ", json.dumps(tool.name), ", ", f'"{key}"', ": "]
        return [*head, Schema(schema, tool.place), "}"]

    return call


def _hermes(tool: Tool, schema: Mapping[str, Any]) -> list[Part]:
    inner = _object("arguments")(tool, schema)
    return [Mark("<tool_call>"), "\n", *inner, "\n", Mark("</tool_call>")]


def _internlm(tool: Tool, schema: Mapping[str, Any]) -> list[Part]:
    inner = _object("parameters")(tool, schema)
    return [Mark("<|action_start|>"), Mark("<|plugin|>"), "\n", *inner, Mark("<|action_end|>")]


def _deepseek_v3(tool: Tool, schema: Mapping[str, Any]) -> list[Part]:
    head: list[Part] = [Mark(deepseek.CALL_BEGIN), "function", Mark(deepseek.SEPARATOR)]
    fence = f"{tool.name}\n```json\n"
    return [*head, fence, Schema(schema, tool.place), "\n```", Mark(deepseek.CALL_END)]


def _deepseek_v31(tool: Tool, schema: Mapping[str, Any]) -> list[Part]:
    head: list[Part] = [Mark(deepseek.CALL_BEGIN), tool.name, Mark(deepseek.SEPARATOR)]
    return [*head, Schema(schema, tool.place), Mark(deepseek.CALL_END)]


def _harmony(tool: Tool, schema: Mapping[str, Any]) -> list[Part]:
    return [
        Mark(harmony.CHANNEL),
        f"commentary to=functions.{tool.name} ",
        Mark("<|constrain|>"),
        "json",
        Mark(harmony.MESSAGE),
        Schema(schema, tool.place),
    ]


def _pythonic(tool: Tool, schema: Mapping[str, Any]) -> list[Part]:
    return [f"{tool.name}(", Arguments(tool, schema), ")"]


_DEEPSEEK_MARKS = ((Mark(deepseek.CALLS_BEGIN),), (Mark(deepseek.CALLS_END),))
STYLES: dict[str, CallStyle] = {
    "deepseek_v3": CallStyle(
        _deepseek_v3, _DEEPSEEK_MARKS[0], ("\n",), _DEEPSEEK_MARKS[1], deepseek.CALLS_BEGIN
    ),
    "deepseek_v31": CallStyle(
        _deepseek_v31, _DEEPSEEK_MARKS[0], (), _DEEPSEEK_MARKS[1], deepseek.CALLS_BEGIN
    ),
    "granite": CallStyle(
        _object("arguments"), (Mark("<|tool_call|>"), "["), (", ",), ("]",), "<|tool_call|>"
    ),
    "hermes": CallStyle(_hermes, between=("\n",), trigger="<tool_call>"),
    "internlm": CallStyle(_internlm, trigger="<|action_start|>"),
    "jamba": CallStyle(
        _object("arguments"),
        (Mark("<tool_calls>"), "["),
        (", ",),
        ("]", Mark("</tool_calls>")),
        "<tool_calls>",
    ),
    "json": CallStyle(_object("parameters"), ("[",), (", ",), ("]",)),
    "llama3_json": CallStyle(_object("parameters"), between=("; ",)),
    "llama4_json": CallStyle(_object("parameters"), between=("; ",)),
    "llama4_pythonic": CallStyle(_pythonic, ("[",), (", ",), ("]",)),
    "mistral": CallStyle(
        _object("arguments"), (Mark("[TOOL_CALLS]"), "["), (", ",), ("]",), "[TOOL_CALLS]"
    ),
    "openai": CallStyle(_harmony),
    "phi4_mini_json": CallStyle(
        _object("arguments"), (Mark("functools"), "["), (", ",), ("]",), "functools"
    ),
    "pythonic": CallStyle(_pythonic, ("[",), (", ",), ("]",)),
}
"""By the names of parsers; `json` is for models that have none."""


def forced_calls(
    tools: Sequence[Tool], style: str, special_id: SpecialId, *, parallel: bool = True
) -> str:
    """A grammar of nothing but calls of these tools: one, or with `parallel` any number.

    Raises `InvalidRequestError` for a tool that the family's calls cannot express.
    """
    writer = _Writer(special_id)
    writer.rule("start", writer.calls(tools, STYLES[style], parallel=parallel))
    return writer.text()


def calls_or_json(
    tools: Sequence[Tool],
    style: str,
    special_id: SpecialId,
    schema: Mapping[str, Any],
    *,
    parallel: bool = True,
) -> str:
    """A grammar of either calls or one JSON value of a schema. Raises as `forced_calls` does."""
    writer = _Writer(special_id)
    calls = writer.calls(tools, STYLES[style], parallel=parallel)
    writer.rule("start", f"{calls} | {writer.parts([Schema(schema, 'response_format')])}")
    return writer.text()


def lazy_calls(tools: Sequence[Tool], style: str, special_id: SpecialId) -> str | None:
    """A grammar of any text in which whatever begins like a call is one, with the arguments of a
    strict tool as its schema says. None for a family whose calls begin with no mark of their own.
    """
    form = STYLES[style]
    trigger = form.trigger
    if trigger is None:
        return None
    writer = _Writer(special_id)
    loose = [tool if tool.strict else _loosened(tool) for tool in tools]
    calls = writer.calls(loose, form, parallel=True, skip=trigger)
    token = special_id(trigger)
    if token is None:
        writer.rule("opening[lazy]", f"TEXT {json.dumps(trigger)}")
    else:
        writer.rule("opening", f"TEXT <[{token}]>")
    writer.rule("start", f"(opening {calls})* TEXT")
    writer.rule("TEXT", r"/(.|\n)*/")
    return writer.text()


def _loosened(tool: Tool) -> Tool:
    """A tool that is not strict: its arguments are an object, and that is all."""
    return Tool(tool.name, _ANY_OBJECT, place=tool.place)


class _Writer:
    """Rules of one grammar."""

    def __init__(self, special_id: SpecialId) -> None:
        self._special_id = special_id
        self._rules: list[str] = []
        self._num_names = 0

    def text(self) -> str:
        """The grammar."""
        return "".join(f"{rule}\n" for rule in self._rules)

    def rule(self, name: str, body: str) -> None:
        """Add a rule."""
        self._rules.append(f"{name}: {body}")

    def calls(
        self, tools: Sequence[Tool], form: CallStyle, *, parallel: bool, skip: str | None = None
    ) -> str:
        """An expression for calls; `skip` is a mark at the beginning that is there already."""
        name = self._name("call")
        one = " | ".join(self.parts(form.call(tool, tool.schema)) for tool in tools)
        self.rule(name, one)
        first = name
        before = list(form.before)
        if skip is not None and before:
            before[0] = _without(before[0], skip)
        elif skip is not None:
            first = self._name("call")
            heads = [[_without(each[0], skip), *each[1:]] for each in map(self._call(form), tools)]
            self.rule(first, " | ".join(map(self.parts, heads)))
        more = f"({self.parts(form.between)} {name})*" if parallel else ""
        return f"({self.parts(before)} {first} {more} {self.parts(form.after)})"

    def _call(self, form: CallStyle) -> Callable[[Tool], list[Part]]:
        return lambda tool: form.call(tool, tool.schema)

    def parts(self, parts: Sequence[Part]) -> str:
        """An expression for parts behind one another."""
        return " ".join(self._part(part) for part in parts if part)

    def _part(self, part: Part) -> str:
        match part:
            case str():
                return json.dumps(part)
            case Mark(text):
                token = self._special_id(text)
                return json.dumps(text) if token is None else f"<[{token}]>"
            case Schema(schema, place):
                name = self._name("json")
                enforced = _enforced(schema, place)
                self.rule(name, f"%json {json.dumps({**enforced, **_EXTRA_KEYWORDS})}")
                return name
            case Arguments(tool, schema):
                return self._arguments(tool, schema)

    def _arguments(self, tool: Tool, schema: Mapping[str, Any]) -> str:
        """Keyword arguments in the order of the schema: all that are required, any of the rest."""
        required, properties = _keywords(tool, schema)
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        rest = first = '""'
        for name, value in reversed(properties.items()):
            inner = self.parts([f"{name}=", Schema({**shared, **value}, tool.place)])
            both = self._name("args"), self._name("args")
            if name in required:
                self.rule(both[0], f"{inner} {rest}")
                self.rule(both[1], f'", " {inner} {rest}')
            else:
                self.rule(both[0], f"{inner} {rest} | {first}")
                self.rule(both[1], f'(", " {inner})? {rest}')
            first, rest = both
        return first

    def _name(self, kind: str) -> str:
        self._num_names += 1
        return f"{kind}_{self._num_names}"


def _enforced(schema: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The schema as backends enforce it."""
    try:
        return enforceable_schema(copy.deepcopy(dict(schema)), closed=False)
    except ValueError as error:
        raise InvalidRequestError(
            f"{place} has a schema that cannot be enforced: {error}.", parameter=place
        ) from error
    except RecursionError as error:
        raise InvalidRequestError(
            f"{place} has a schema that is nested too deep.", parameter=place
        ) from error


def _without(part: Part, mark: str) -> Part:
    """What is left of a part that begins with a mark."""
    text = part.text if isinstance(part, Mark) else part
    assert isinstance(text, str)
    assert text.startswith(mark)
    return text[len(mark) :]


def _keywords(
    tool: Tool, schema: Mapping[str, Any]
) -> tuple[frozenset[str], dict[str, Mapping[str, Any]]]:
    """(required, properties) of a schema that keyword arguments can express."""
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    problem = next(_problems(schema, properties, required), None)
    if problem is not None:
        raise InvalidRequestError(
            f"{tool.place}: {problem}, so its arguments cannot be forced as keyword arguments of"
            f" Python; name its properties, or use tool_choice='auto'.",
            parameter=tool.place,
        )
    return frozenset(required), dict(properties)


def _problems(schema: Mapping[str, Any], properties: Any, required: Any) -> Iterator[str]:
    known = {
        "type", "properties", "required", "additionalProperties", "title", "description",
        "$defs", "definitions", "$schema",
    }  # fmt: skip
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        yield "its schema is none"
        return
    for key in schema.keys() - known:
        yield f"its schema has {shown(key)} at the top"
    for name, value in properties.items():
        if not name.isidentifier() or keyword.iskeyword(name):
            yield f"{shown(name)} is no name for an argument"
        if not isinstance(value, Mapping):
            yield f"the schema of {shown(name)} is no object"
    for name in required:
        if name not in properties:
            yield f"{shown(name)} is required and has no schema"
