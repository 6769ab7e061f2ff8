"""Three hundred JSON schemas over the keywords of draft 2020-12, and a validator of documents."""

# ruff: noqa: E501 - a case a line

from __future__ import annotations

import datetime
import decimal
import ipaddress
import json
import re
import uuid
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import jsonschema

decimal.getcontext().prec = 400  # remainders of long numbers are exact

NAMES = ["name", "größe", "年齢", "emoji 🎉", 'quo"te', "back\\slash", "", "a/b", "tab\t", "it's"]
WORDS = [
    "red",
    "green",
    "blue",
    "Größe",
    "naïve",
    "你好",
    "привет",
    "🎉",
    'say "hi"',
    "a\\b",
    "x\ny",
]


@dataclass(frozen=True)
class Case:
    """A schema, and the keyword for which it is refused, if it is."""

    name: str
    schema: dict[str, Any] | bool
    refused_for: str | None = None


def validator(schema: dict[str, Any] | bool) -> jsonschema.Draft202012Validator:
    """Of documents that `load` has read; formats count."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    return jsonschema.Draft202012Validator(exact, format_checker=FORMATS)


def load(text: str) -> Any:
    """A document with exact numbers. Raises `ValueError` for what is no JSON."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_float=_exact, parse_constant=refuse)


def _exact(number: str) -> Decimal | float:
    try:
        return Decimal(number)
    except decimal.InvalidOperation:  # an exponent of many digits
        return float(number)


# ---- formats, checked by other means than patterns where there are any ---------------------------

FORMATS = jsonschema.FormatChecker(formats=())


def _format(name: str, raises: type[Exception] = ValueError):
    def register(check):
        def checked(value: object) -> bool:
            return not isinstance(value, str) or check(value) is not False

        FORMATS.checks(name, raises=raises)(checked)
        return check

    return register


@_format("date")
def _date(value: str) -> None:
    datetime.datetime.strptime(value, "%Y-%m-%d")


@_format("time")
def _time(value: str) -> bool:
    match = re.fullmatch(r"(\d\d:\d\d:\d\d)(\.\d+)?([Zz]|[+-]\d\d:\d\d)", value)
    if match is None:
        return False
    datetime.time.fromisoformat(match[1])
    if match[3] not in "Zz":
        datetime.time.fromisoformat(match[3][1:])
    return True


@_format("date-time")
def _date_time(value: str) -> bool:
    _date(value[:10])
    return value[10] in "Tt" and _time(value[11:])


@_format("email")
def _email(value: str) -> bool:
    local, _, domain = value.rpartition("@")
    return bool(local) and bool(domain) and " " not in value


@_format("uuid")
def _uuid(value: str) -> bool:
    return str(uuid.UUID(value)) == value.lower()


@_format("ipv4")
def _ipv4(value: str) -> None:
    ipaddress.IPv4Address(value)


@_format("ipv6")
def _ipv6(value: str) -> None:
    ipaddress.IPv6Address(value)


@_format("hostname")
def _hostname(value: str) -> bool:
    label = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
    return len(value) <= 253 and all(label.fullmatch(part) for part in value.split("."))


@_format("uri")
def _uri(value: str) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", value) is not None and " " not in value


@_format("duration")
def _duration(value: str) -> bool:
    return (
        re.fullmatch(r"P(?=.)(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=.)(\d+H)?(\d+M)?(\d+S)?)?)", value)
        is not None
    )


# ---- the schemas ---------------------------------------------------------------------------------


def all_cases() -> list[Case]:
    """All of them, in a fixed order."""
    families = [
        _types(), _enums(), _strings(), _formats(), _integers(), _numbers(), _arrays(), _objects(),
        _references(), _combinations(), _annotations(), _realistic(), _refused(),
    ]  # fmt: skip
    return [case for family in families for case in family]


def _record(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An object with all of these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **more,
    }


def _short(**more: Any) -> dict[str, Any]:
    return {"type": "string", "maxLength": 12, **more}


def _types() -> list[Case]:
    single = ["null", "boolean", "integer", "number", "string", "array", "object"]
    cases = [Case(f"type {name}", {"type": name}) for name in single]
    unions = [["null", "integer"], ["string", "boolean"], ["array", "null"], ["object", "number"]]
    cases += [Case(f"types {some}", {"type": some}) for some in unions]
    cases += [Case("anything", {}), Case("true", True)]
    for name in single[:5]:
        cases.append(Case(f"record of {name}", _record({"value": {"type": name}})))
    return cases


def _enums() -> list[Case]:
    values: list[Any] = [
        *WORDS, None, True, False, 0, -7, 3.25, -0.5, 123456789, [], {}, [1, "two", None],
        {"a": 1, "b": [True]}, "\u0001", "\u2028", "a" * 60,
    ]  # fmt: skip
    cases = [Case(f"const {json.dumps(value)[:40]}", {"const": value}) for value in values]
    cases += [
        Case("enum of words", {"enum": WORDS}),
        Case("enum of numbers", {"enum": [1, 2, 3.5, -4]}),
        Case("enum of all kinds", {"enum": values}),
        Case("enum of strings by type", {"type": "string", "enum": ["a", "b", 3]}),
        Case("enum in a record", _record({"color": {"enum": WORDS[:3]}})),
        Case("enum with common starts", {"enum": ["A", "AB", "ABC", "ABCD"]}),
        Case("enum of one", {"enum": ["only"]}),
        Case("enum of many", {"enum": [f"item {i}" for i in range(500)]}),
    ]
    return cases


def _strings() -> list[Case]:
    cases = [
        Case(f"length {low} to {high}", {"type": "string", "minLength": low, "maxLength": high})
        for low, high in [(0, 0), (1, 1), (0, 5), (3, 8), (10, 10), (20, 40)]
    ]
    patterns = [
        "^[a-z]+$", "^[A-Z][a-z]{2,8}$", "^\\d{3}-\\d{4}$", "^(cat|dog|bird)$", "^a", "z$", "foo",
        "^[^aeiou]{4}$", "^[\\w.-]+@[\\w-]+\\.[a-z]{2,3}$", "^#[0-9a-fA-F]{6}$", "^$", "^x?y*z+$",
        "^(ab){2,3}$", "^.{3}$", "^[äöü]+$", "^[一-龥]{2}$", "^\\+?[0-9 ]{5,12}$", "^v\\d+\\.\\d+$",
        '^"quoted"$', "^\\\\d$", "^[a-c]|[x-z]$", "^(?:no)?n-capturing$", "^\\$[0-9]+$",
    ]  # fmt: skip
    cases += [Case(f"pattern {p}", {"type": "string", "pattern": p}) for p in patterns]
    cases += [
        Case("pattern and length", {"type": "string", "pattern": "^[a-z]+$", "maxLength": 6}),
        Case("pattern and least length", {"type": "string", "pattern": "[0-9]", "minLength": 4}),
        Case("length of any type", {"minLength": 2, "maxLength": 4}),
        Case("strings in a list", {"type": "array", "items": _short(), "maxItems": 3}),
        Case("pattern in a record", _record({"code": {"type": "string", "pattern": "^[A-Z]{3}$"}})),
    ]
    return cases


def _formats() -> list[Case]:
    names = [
        "date",
        "time",
        "date-time",
        "email",
        "uuid",
        "ipv4",
        "ipv6",
        "hostname",
        "uri",
        "duration",
    ]
    cases = [Case(f"format {name}", {"type": "string", "format": name}) for name in names]
    cases += [
        Case(f"{name} in a record", _record({"v": {"type": "string", "format": name}}))
        for name in names[:5]
    ]
    cases += [
        Case("format and pattern", {"type": "string", "format": "date", "pattern": "^20"}),
        Case("format of any type", {"format": "date"}),
    ]
    return cases


def _integers() -> list[Case]:
    bounds: list[dict[str, Any]] = [
        {"minimum": 0}, {"maximum": 0}, {"minimum": 1, "maximum": 10}, {"minimum": -5, "maximum": 5},
        {"minimum": -100, "maximum": -50}, {"minimum": 7, "maximum": 7}, {"exclusiveMinimum": 0},
        {"exclusiveMinimum": 0, "exclusiveMaximum": 3}, {"minimum": 99, "maximum": 1001},
        {"minimum": 0.5, "maximum": 3.5}, {"exclusiveMaximum": -1}, {"multipleOf": 7},
        {"multipleOf": 5, "minimum": 1, "maximum": 100}, {"multipleOf": 2.0, "maximum": 9},
        {"minimum": 1000000, "maximum": 9999999}, {"minimum": -9007199254740992},
        {"minimum": 1.0, "exclusiveMaximum": 2.0}, {"multipleOf": 0.5, "minimum": 0, "maximum": 4},
    ]  # fmt: skip
    return [Case(f"integer {json.dumps(b)}", {"type": "integer", **b}) for b in bounds]


def _numbers() -> list[Case]:
    bounds: list[dict[str, Any]] = [
        {"minimum": 0}, {"maximum": 100}, {"minimum": 0, "maximum": 1}, {"minimum": -1, "maximum": 1},
        {"exclusiveMinimum": 0, "exclusiveMaximum": 1}, {"minimum": 2.5, "maximum": 2.75},
        {"minimum": -273.15}, {"multipleOf": 0.01, "minimum": 0, "maximum": 10}, {"multipleOf": 0.25},
        {"multipleOf": 3}, {"minimum": 0.001, "maximum": 0.002}, {"exclusiveMaximum": 0},
        {"minimum": 10, "maximum": 10}, {"minimum": -90, "maximum": 90},
        {"minimum": 1e-3, "exclusiveMaximum": 1e3}, {"exclusiveMinimum": 0, "maximum": 0.5},
        {"exclusiveMinimum": 1, "maximum": 1.25}, {"minimum": -0.05, "exclusiveMaximum": 0},
        {"minimum": 0.5, "allOf": [{"exclusiveMinimum": 0}], "exclusiveMaximum": 0.75},
    ]  # fmt: skip
    cases = [Case(f"number {json.dumps(b)}", {"type": "number", **b}) for b in bounds]
    cases.append(Case("bounds of any type", {"minimum": 3, "maximum": 4}))
    return cases


def _arrays() -> list[Case]:
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    shapes: list[dict[str, Any]] = [
        {"items": digit, "maxItems": 4}, {"items": digit, "minItems": 2, "maxItems": 2},
        {"items": digit, "minItems": 1, "maxItems": 5}, {"items": {"type": "boolean"}, "minItems": 3, "maxItems": 6},
        {"items": {"type": "array", "items": digit, "maxItems": 2}, "maxItems": 3},
        {"prefixItems": [digit, _short(), {"type": "null"}], "items": False},
        {"prefixItems": [digit, _short()], "items": digit, "maxItems": 5},
        {"prefixItems": [digit], "minItems": 1, "maxItems": 1}, {"items": False}, {"maxItems": 0},
        {"items": _record({"x": digit, "y": digit}), "minItems": 1, "maxItems": 3},
        {"items": {"enum": WORDS}, "minItems": 2, "maxItems": 4},
        {"items": {"type": ["integer", "null"]}, "maxItems": 3},
        {"prefixItems": [{"const": "point"}, digit, digit], "items": False, "minItems": 3},
        {"items": {"anyOf": [digit, {"const": "x"}]}, "maxItems": 4},
        {"items": {"type": "string", "pattern": "^[a-z]{2}$"}, "minItems": 3, "maxItems": 3},
        {"items": digit, "maxItems": 1, "uniqueItems": True}, {"items": digit, "maxItems": 3, "uniqueItems": False},
    ]  # fmt: skip
    cases = [Case(f"array {json.dumps(s)[:60]}", {"type": "array", **s}) for s in shapes]
    cases += [
        Case("arrays in a record", _record({"a": {"type": "array", "items": digit, "maxItems": 2}, "b": {"type": "array", "maxItems": 0}})),
        Case("array of any type", {"items": digit, "maxItems": 2}),
    ]  # fmt: skip
    return cases


def _objects() -> list[Case]:
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    cases = [Case(f"property {json.dumps(name)}", _record({name: digit})) for name in NAMES]
    shapes: list[dict[str, Any]] = [
        {"properties": {"a": digit}}, {"properties": {"a": digit, "b": digit}, "required": ["b"]},
        {"properties": {"a": digit, "b": digit}, "additionalProperties": False},
        {"additionalProperties": digit, "maxProperties": 3}, {"additionalProperties": False},
        {"patternProperties": {"^x": digit}, "additionalProperties": False, "maxProperties": 3},
        {"patternProperties": {"^x": digit, "^y": {"type": "null"}}, "additionalProperties": False, "maxProperties": 2},
        {"properties": {"id": digit}, "patternProperties": {"^s_": _short()}, "additionalProperties": False, "required": ["id"]},
        {"required": ["a", "b"], "maxProperties": 2}, {"required": ["a"], "additionalProperties": digit, "maxProperties": 1},
        {"maxProperties": 0}, {"minProperties": 1, "maxProperties": 1, "additionalProperties": digit},
        {"properties": {"a": digit}, "required": ["a"], "minProperties": 1, "additionalProperties": False},
        {"properties": {f"p{i}": digit for i in range(20)}, "additionalProperties": False},
        {"properties": {f"p{i}": digit for i in range(20)}, "required": [f"p{i}" for i in range(0, 20, 3)], "additionalProperties": False},
        {"properties": {"a": digit, "b": digit}, "minProperties": 1, "additionalProperties": False},
    ]  # fmt: skip
    cases += [Case(f"object {json.dumps(s)[:60]}", {"type": "object", **s}) for s in shapes]
    nested: dict[str, Any] = digit
    for depth in range(1, 8):
        nested = _record({f"level{depth}": nested})
        cases.append(Case(f"nested {depth} deep", nested))
    cases.append(Case("all names", _record({name: {"type": "boolean"} for name in NAMES})))
    cases.append(Case("properties of any type", {"properties": {"a": digit}, "required": ["a"]}))
    return cases


def _references() -> list[Case]:
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    tree = _record(
        {
            "v": digit,
            "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
        }
    )
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(10)} | {"d10": digit}
    return [
        Case("a definition", {"$defs": {"d": digit}, "$ref": "#/$defs/d"}),
        Case("old definitions", {"definitions": {"d": digit}, **_record({"x": {"$ref": "#/definitions/d"}})}),
        Case("a chain of definitions", {"$defs": chain, "$ref": "#/$defs/d0"}),
        Case("a tree", {"$defs": {"tree": tree}, "$ref": "#/$defs/tree"}),
        Case("a list by recursion", {"$defs": {"list": {"anyOf": [{"type": "null"}, _record({"head": digit, "tail": {"$ref": "#/$defs/list"}})]}}, "$ref": "#/$defs/list"}),
        Case("mutual recursion", {"$defs": {"a": _record({"b": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/b"}]}}), "b": _record({"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}})}, "$ref": "#/$defs/a"}),
        Case("the root", _record({"v": digit, "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}})),
        Case("a name with slashes", {"$defs": {"a/b": digit, "c~d": {"type": "null"}}, **_record({"x": {"$ref": "#/$defs/a~1b"}, "y": {"$ref": "#/$defs/c~0d"}})}),
        Case("a reference with siblings", {"$defs": {"d": {"type": "integer", "minimum": 0}}, "$ref": "#/$defs/d", "maximum": 5}),
        Case("one definition twice", {"$defs": {"d": digit}, **_record({"x": {"$ref": "#/$defs/d"}, "y": {"$ref": "#/$defs/d"}})}),
        Case("a reference to a property", _record({"x": digit, "y": {"$ref": "#/properties/x"}})),
        Case("expressions", {"$defs": {"e": {"anyOf": [digit, {"type": "array", "prefixItems": [{"enum": ["+", "*"]}, {"$ref": "#/$defs/e"}, {"$ref": "#/$defs/e"}], "items": False, "minItems": 3}]}}, "$ref": "#/$defs/e"}),
        Case("an unused definition", {"$defs": {"d": digit}, "type": "boolean"}),
        Case("references in a map", {"$defs": {"d": digit}, "type": "object", "additionalProperties": {"$ref": "#/$defs/d"}, "maxProperties": 2}),
    ]  # fmt: skip


def _combinations() -> list[Case]:
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    cat = _record({"kind": {"const": "cat"}, "lives": digit})
    dog = _record(
        {"kind": {"const": "dog"}, "tricks": {"type": "array", "items": _short(), "maxItems": 2}}
    )
    either = {"anyOf": [digit, {"type": "null"}]}
    return [
        Case("anyOf types", {"anyOf": [digit, {"type": "boolean"}, {"const": "x"}]}),
        Case("anyOf records", {"anyOf": [cat, dog]}),
        Case("anyOf in anyOf", {"anyOf": [either, {"anyOf": [{"const": "a"}, {"const": "b"}]}]}),
        Case("anyOf with siblings", {"type": "integer", "anyOf": [{"minimum": 5, "maximum": 7}, {"minimum": 1, "maximum": 2}]}),
        Case("anyOf that overlap", {"anyOf": [{"type": "integer", "maximum": 5, "minimum": 0}, {"type": "integer", "minimum": 3, "maximum": 8}]}),
        Case("oneOf types", {"oneOf": [digit, {"type": "boolean"}, {"type": "null"}]}),
        Case("oneOf constants", {"oneOf": [{"const": "a"}, {"const": "b"}]}),
        Case("oneOf records", {"oneOf": [cat, dog]}),
        Case("oneOf in a list", {"type": "array", "items": {"oneOf": [cat, dog]}, "minItems": 1, "maxItems": 2}),
        Case("oneOf of one", {"oneOf": [digit]}),
        Case("allOf bounds", {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 6}]}),
        Case("allOf records", {"allOf": [{"type": "object", "properties": {"a": digit}, "required": ["a"]}, {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"], "maxProperties": 2}]}),
        Case("allOf patterns", {"type": "string", "allOf": [{"pattern": "^[a-z]+$"}, {"pattern": "x"}], "maxLength": 6}),
        Case("allOf lengths", {"type": "string", "allOf": [{"minLength": 2}, {"maxLength": 4}]}),
        Case("allOf of anyOf", {"allOf": [either, {"anyOf": [{"type": "null"}, {"type": "string"}]}]}),
        Case("allOf of references", {"$defs": {"low": {"minimum": 1}, "high": {"maximum": 3}}, "type": "integer", "allOf": [{"$ref": "#/$defs/low"}, {"$ref": "#/$defs/high"}]}),
        Case("allOf of one", {"allOf": [digit]}),
        Case("allOf items", {"type": "array", "maxItems": 3, "allOf": [{"items": {"type": "integer"}}, {"items": {"minimum": 0, "maximum": 3}}]}),
        Case("enum and bounds", {"enum": [1, 5, 9, "x"], "type": "integer", "maximum": 6}),
        Case("const and type", {"const": 5, "type": "integer"}),
        Case("nullable properties", _record({"a": either, "b": either, "c": either})),
        Case("deep combinations", {"anyOf": [{"allOf": [digit, {"maximum": 4}]}, {"oneOf": [{"const": "x"}, {"type": "null"}]}]}),
        Case("anyOf records with optional parts", {"anyOf": [{"type": "object", "properties": {"a": digit}, "additionalProperties": False}, {"type": "object", "properties": {"b": digit}, "required": ["b"], "additionalProperties": False}]}),
    ]  # fmt: skip


def _annotations() -> list[Case]:
    notes: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.com/s",
        "$comment": "no matter", "title": "T", "description": "D", "default": 1, "examples": [1, 2],
        "deprecated": True, "readOnly": True, "writeOnly": False, "contentMediaType": "text/plain",
        "contentEncoding": "base64", "x-anything": {"a": 1},
    }  # fmt: skip
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    cases = [Case(f"annotation {name}", {name: value, **digit}) for name, value in notes.items()]
    cases.append(Case("all annotations", {**notes, **digit}))
    neutral: list[dict[str, Any]] = [
        {"uniqueItems": False}, {"not": False}, {"then": {"type": "null"}}, {"minContains": 3},
        {"dependentRequired": {}}, {"unevaluatedProperties": True}, {"propertyNames": True},
        {"minLength": 5, "pattern": "^x", "maxItems": 0, "required": ["q"]},
    ]  # fmt: skip
    cases += [Case(f"without effect {json.dumps(n)}", {**n, **digit}) for n in neutral]
    return cases


def _realistic() -> list[Case]:
    score = {"type": "number", "minimum": 0, "maximum": 1}
    address = _record(
        {"street": _short(), "zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "city": _short()}
    )
    person = _record(
        {
            "name": _short(minLength=1),
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "email": {
                "anyOf": [{"type": "string", "format": "email", "maxLength": 30}, {"type": "null"}]
            },
        }
    )
    line = _record(
        {
            "sku": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"},
            "count": {"type": "integer", "minimum": 1, "maximum": 99},
            "price": {"type": "number", "minimum": 0, "maximum": 1000, "multipleOf": 0.01},
        }
    )
    point = {
        "type": "array",
        "prefixItems": [
            {"type": "number", "minimum": -180, "maximum": 180},
            {"type": "number", "minimum": -90, "maximum": 90},
        ],
        "items": False,
        "minItems": 2,
    }
    call = lambda name, arguments: _record({"name": {"const": name}, "arguments": arguments})  # noqa: E731
    shapes: dict[str, dict[str, Any]] = {
        "person": person, "address": address, "people": {"type": "array", "items": person, "minItems": 1, "maxItems": 2},
        "invoice": _record({"id": {"type": "string", "format": "uuid"}, "date": {"type": "string", "format": "date"}, "lines": {"type": "array", "items": line, "minItems": 1, "maxItems": 2}}),
        "weather": _record({"city": _short(), "unit": {"enum": ["C", "F"]}, "degrees": {"type": "number", "minimum": -90, "maximum": 60}}),
        "sentiment": _record({"label": {"enum": ["positive", "neutral", "negative"]}, "score": score}),
        "topics": _record({"topics": {"type": "array", "items": {"enum": ["sport", "art", "science"]}, "maxItems": 3}, "is_spam": {"type": "boolean"}}),
        "place": _record({"type": {"const": "Point"}, "coordinates": point}),
        "tool calls": {"type": "array", "items": {"anyOf": [call("add", _record({"a": {"type": "integer", "minimum": 0, "maximum": 99}})), call("now", {"type": "object", "additionalProperties": False})]}, "minItems": 1, "maxItems": 2},
        "settings": {"type": "object", "properties": {"debug": {"type": "boolean"}, "level": {"enum": ["low", "high"]}, "port": {"type": "integer", "minimum": 1, "maximum": 65535}}, "additionalProperties": False},
        "event": _record({"at": {"type": "string", "format": "date-time"}, "host": {"type": "string", "format": "ipv4"}, "kind": {"enum": ["start", "stop"]}}),
        "question": _record({"question": {"type": "string", "maxLength": 40}, "choices": {"type": "array", "items": _short(), "minItems": 4, "maxItems": 4}, "answer": {"type": "integer", "minimum": 0, "maximum": 3}}),
        "comment thread": {"$defs": {"c": _record({"text": _short(), "replies": {"type": "array", "items": {"$ref": "#/$defs/c"}, "maxItems": 1}})}, "$ref": "#/$defs/c"},
        "translation": _record({"from": {"type": "string", "pattern": "^[a-z]{2}$"}, "to": {"type": "string", "pattern": "^[a-z]{2}$"}, "text": {"type": "string", "maxLength": 30}}),
        "versions": {"type": "object", "patternProperties": {"^[a-z]{1,8}$": {"type": "string", "pattern": "^\\d{1,3}\\.\\d{1,3}$"}}, "additionalProperties": False, "maxProperties": 3},
    }  # fmt: skip
    cases = [Case(name, schema) for name, schema in shapes.items()]
    cases += [Case(f"list of {name}", {"type": "array", "items": shapes[name], "minItems": 2, "maxItems": 2}) for name in ("address", "weather", "sentiment", "place", "event")]  # fmt: skip
    cases += [Case(f"{name} or nothing", {"anyOf": [shapes[name], {"type": "null"}]}) for name in ("person", "invoice", "settings", "topics", "versions")]  # fmt: skip
    return cases


def _refused() -> list[Case]:
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    schemas: list[tuple[str, dict[str, Any]]] = [
        ("uniqueItems", {"type": "array", "items": digit, "uniqueItems": True}),
        ("not", {"type": "integer", "not": {"const": 3}}),
        ("if", {"if": {"type": "integer"}, "then": {"minimum": 3}}),
        ("contains", {"type": "array", "contains": digit}),
        ("contains", {"type": "array", "contains": digit, "minContains": 2}),
        ("propertyNames", {"type": "object", "propertyNames": {"pattern": "^a"}}),
        ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
        ("dependentSchemas", {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}),
        ("unevaluatedProperties", {"type": "object", "unevaluatedProperties": False}),
        ("unevaluatedItems", {"type": "array", "unevaluatedItems": False}),
        ("$dynamicRef", {"$dynamicRef": "#node", "$defs": {"n": {"$dynamicAnchor": "node"}}}),
        ("minProperties", {"type": "object", "additionalProperties": digit, "minProperties": 3}),
        ("Properties", {"type": "object", "properties": {"a": True}, "maxProperties": 0}),
        ("oneOf", {"oneOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]}),
        ("format", {"type": "string", "format": "iri"}),
        ("format", {"type": "string", "format": "no-such-format"}),
        ("pattern", {"type": "string", "pattern": "(?=a)b"}),
        ("pattern", {"type": "string", "pattern": "(a)\\1"}),
        ("minimum", {"type": "integer", "minimum": 2**60}),
        ("const", {"const": 2**53 + 1}),
        ("$ref", {"$ref": "https://example.com/other.json"}),
        ("$ref", {"$ref": "#/$defs/missing"}),
        ("maxLenght", {"type": "string", "maxLenght": 5}),
        ("type", {"type": "text"}),
        ("required", {"type": "object", "required": "a"}),
        ("enum", {"enum": []}),
        ("minLength", {"type": "string", "minLength": -1}),
        ("multipleOf", {"type": "integer", "multipleOf": 0}),
    ]  # fmt: skip
    cases = [Case(f"refused {key} {i}", schema, key) for i, (key, schema) in enumerate(schemas)]
    cases.append(Case("refused impossible", {"type": "string", "minLength": 5, "maxLength": 3}, ""))
    cases.append(Case("refused false", False, ""))
    return cases
