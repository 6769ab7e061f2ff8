"""Writes grammars: rules from the parts that calls consist of."""

from __future__ import annotations

import copy
import json
import keyword
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.entrypoints.parsers.xml_calls import ArgumentMarks, is_string
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
ANY_OBJECT: dict[str, Any] = {"type": "object"}
ANY_TEXT = r"/(.|\n)*/"
_MARK = re.compile(r"(<[^<>\s]+>)")
_SHARED = ("$defs", "definitions")
"""Keys of a schema that its properties may refer to."""
_OF_OBJECTS = frozenset(
    ["type", "properties", "required", "additionalProperties", "title", "description", "$schema"]
).union(_SHARED)
_OF_STRINGS = frozenset(
    ("type", "enum", "const", "title", "description", "default", "example", "examples")
)
"""What may be said of arguments that are written one by one, and of strings without quotes."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call."""

    name: str
    parameters: Mapping[str, Any] | None
    """A JSON schema; None for a function without any."""
    strict: bool = False
    place: str = "tools"
    """Its field in the request, for errors."""
    is_custom: bool = False
    """Whether its one argument is a text that stands for all of them."""

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
class Pattern:
    """A place for what a regular expression says."""

    regex: str


@dataclass(frozen=True, slots=True)
class Keywords:
    """A place for arguments as Python writes them."""

    tool: Tool
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Parameters:
    """A place for arguments as `xml_calls` has them."""

    tool: Tool
    schema: Mapping[str, Any]
    marks: ArgumentMarks


Part = str | Mark | Schema | Pattern | Keywords | Parameters


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


class GrammarWriter:
    """Rules of one grammar."""

    def __init__(self, special_id: SpecialId) -> None:
        self._special_id = special_id
        self._rules: list[str] = []
        self._num_names = 0
        self._has_any = False

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
                self.rule(name, f"%json {_enforced(schema, place)}")
                return name
            case Pattern(regex):
                return f"/{regex}/"
            case Keywords(tool, schema):
                return self._keywords(tool, schema)
            case Parameters(tool, schema, marks):
                return self._parameters(tool, schema, marks)

    def _keywords(self, tool: Tool, schema: Mapping[str, Any]) -> str:
        """Keyword arguments in the order of the schema: all that are required, any of the rest."""
        required, properties = _arguments(tool, schema, _no_identifier)
        shared = {key: schema[key] for key in _SHARED if key in schema}
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

    def _parameters(self, tool: Tool, schema: Mapping[str, Any], marks: ArgumentMarks) -> str:
        """Marked values in the order of the schema; of a schema that says nothing, any."""
        end = marks.after_value
        if schema.keys() <= {"type"}:
            self.rule(name := self._name("key"), r"/[^<>\n]+/")
            head = f"{self._marked(marks.before_key)} {name} {self._marked(marks.after_key)}"
            return f"({head} {self._text(end)})*"
        required, properties = _arguments(tool, schema, _no_key)
        shared = {key: schema[key] for key in _SHARED if key in schema}
        written = []
        for name, value in properties.items():
            if is_string(value):
                inner = self._string(tool, name, value, end)
            else:
                inner = (
                    f"{self.parts([Schema({**shared, **value}, tool.place)])} {self._marked(end)}"
                )
            one = f"{self._marked(marks.before_key + name + marks.after_key)} {inner}"
            written.append(one if name in required else f"({one})?")
        return " ".join(written)

    def _string(self, tool: Tool, name: str, schema: Mapping[str, Any], end: str) -> str:
        """A string without quotes, up to a mark."""
        unknown = schema.keys() - _OF_STRINGS
        if unknown:
            raise InvalidRequestError(
                f"{tool.place}: {shown(name)} is a string with {', '.join(sorted(unknown))}, which"
                f" calls of this model's family, without quotes, cannot be held to; leave that out,"
                f" or use tool_choice='auto' without strict.",
                parameter=tool.place,
            )
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is None:
            return self._text(end)
        return f"({' | '.join(map(json.dumps, values))}) {self._marked(end)}"

    def _text(self, end: str) -> str:
        """Any text up to a mark."""
        if not self._has_any:
            self.rule("ANY", ANY_TEXT)
            self._has_any = True
        marked = self._marked(end)
        if marked.startswith("<"):  # a special token, which no text holds
            return f"ANY {marked}"
        name = self._name("text")
        self.rule(f"{name}[lazy]", f"ANY {json.dumps(end)}")
        return name

    def _marked(self, text: str) -> str:
        """An expression for text in which marks may be special tokens."""
        pieces = _MARK.split(text)
        return self.parts([Mark(each) if _MARK.fullmatch(each) else each for each in pieces])

    def _name(self, kind: str) -> str:
        self._num_names += 1
        return f"{kind}_{self._num_names}"


def _enforced(schema: Mapping[str, Any], place: str) -> str:
    """The schema as backends enforce it, as text."""
    try:
        enforced = enforceable_schema(copy.deepcopy(dict(schema)), closed=False)
        return json.dumps({**enforced, **_EXTRA_KEYWORDS})
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


def _arguments(
    tool: Tool, schema: Mapping[str, Any], refuse_name: Callable[[str], str | None]
) -> tuple[frozenset[str], dict[str, Mapping[str, Any]]]:
    """(required, properties) of a schema whose arguments are written one by one."""
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    problem = next(_problems(schema, properties, required, refuse_name), None)
    if problem is not None:
        raise InvalidRequestError(
            f"{tool.place}: {problem}, so calls of this model's family, which write arguments one"
            f" by one, cannot be forced; name its properties, or use tool_choice='auto'.",
            parameter=tool.place,
        )
    return frozenset(required), dict(properties)


def _problems(
    schema: Mapping[str, Any],
    properties: Any,
    required: Any,
    refuse_name: Callable[[str], str | None],
) -> Iterator[str]:
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        yield "its schema is none"
        return
    for key in schema.keys() - _OF_OBJECTS:
        yield f"its schema has {shown(key)} at the top"
    for name, value in properties.items():
        refusal = refuse_name(name)
        if refusal is not None:
            yield f"{shown(name)} {refusal}"
        if not isinstance(value, Mapping):
            yield f"the schema of {shown(name)} is no object"
    for name in required:
        if name not in properties:
            yield f"{shown(name)} is required and has no schema"


def _no_identifier(name: str) -> str | None:
    is_one = name.isidentifier() and not keyword.iskeyword(name)
    return None if is_one else "is no name for an argument of Python"


def _no_key(name: str) -> str | None:
    is_one = name.strip() and name == name.strip() and not any(char in "<>\n" for char in name)
    return None if is_one else "is no name for a parameter"
