"""JSON schemas (draft 2020-12) that are enforced to the letter, and why others are refused.

A backend enforces most keywords. What it would take for something else, or enforce only in part,
is refused here with the keyword's name, or put in terms that say the same and are enforced:

    uniqueItems, not, if, contains, ...   refused, unless they ask for nothing
    minProperties                         refused where it counts names that may come twice
    bounds beyond 2**53                   refused: numbers are compared as doubles
    format date, time, date-time          as patterns that know leap years, and no leap seconds
    open bounds at whole numbers          as the nearest number within, where llguidance needs it
    unknown keywords                      refused: they could be slips of the pen

Nothing recurs; depth and size were checked when the parameters were made.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard
from urllib.parse import unquote

from tokenmill.errors import shown
from tokenmill.structured_outputs import MAX_RULES

Schema = dict[str, Any]

LARGEST_EXACT = 2**53
"""Integers up to this are exact as doubles."""

_ANNOTATIONS = frozenset(
    (
        "$schema", "$id", "$anchor", "$comment", "$vocabulary", "title", "description", "default",
        "examples", "example", "deprecated", "readOnly", "writeOnly", "contentMediaType",
        "contentEncoding", "contentSchema", "discriminator", "externalDocs", "xml",
    )
)  # fmt: skip
_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "additionalItems")


def _is_count(value: object) -> bool:
    if isinstance(value, float):
        return value >= 0 and value.is_integer()
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_schema(value: object) -> bool:
    return isinstance(value, dict | bool)


def _is_schemas(value: object) -> bool:
    return isinstance(value, list) and all(_is_schema(each) for each in value)


def _is_map(value: object) -> bool:
    return isinstance(value, dict) and all(_is_schema(each) for each in value.values())


def _is_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_bound(value: object) -> bool:
    return _is_number(value) or isinstance(value, bool)  # draft 4 has truth values here


_TYPES = frozenset(("null", "boolean", "object", "array", "number", "string", "integer"))


def _is_type(value: object) -> bool:
    names = [value] if isinstance(value, str) else value
    return (
        isinstance(names, list)
        and bool(names)
        and all(isinstance(each, str) and each in _TYPES for each in names)
    )


KEYWORDS: dict[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(_MAPS_OF_SCHEMAS, (_is_map, "an object of schemas")),
    **dict.fromkeys(_LISTS_OF_SCHEMAS, (_is_schemas, "a list of schemas")),
    **dict.fromkeys(_SCHEMAS, (_is_schema, "a schema")),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        (_is_count, "an integer of at least 0"),
    ),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), (_is_number, "a number")),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), (_is_bound, "a number")),
    **dict.fromkeys(("$ref", "pattern", "format"), (_is_text, "a string")),
    "required": (_is_strings, "a list of strings"),
    "type": (_is_type, f"one or several of {', '.join(sorted(_TYPES))}"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list that is not empty"),
    "const": (lambda _: True, "any value"),
}
"""The keywords that are enforced, and what their values must be."""

_NEUTRAL: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "uniqueItems": lambda s: s["uniqueItems"] is False or s.get("maxItems") in (0, 1),
    "not": lambda s: s["not"] is False,
    "if": lambda s: "then" not in s and "else" not in s,
    "then": lambda s: (
        "if" not in s or (s["then"] in (True, {}) and s.get("else", True) in (True, {}))
    ),
    "else": lambda s: (
        "if" not in s or (s["else"] in (True, {}) and s.get("then", True) in (True, {}))
    ),
    "contains": lambda s: s.get("minContains") == 0 and "maxContains" not in s,
    "minContains": lambda s: "contains" not in s or s["minContains"] == 0,
    "maxContains": lambda s: "contains" not in s,
    "propertyNames": lambda s: s["propertyNames"] in (True, {}),
    "dependentRequired": lambda s: not s["dependentRequired"],
    "dependentSchemas": lambda s: not s["dependentSchemas"],
    "dependencies": lambda s: not s["dependencies"],
    "unevaluatedItems": lambda s: s["unevaluatedItems"] in (True, {}),
    "unevaluatedProperties": lambda s: s["unevaluatedProperties"] in (True, {}),
    "$dynamicRef": lambda s: False,
    "$dynamicAnchor": lambda s: True,
    "$recursiveRef": lambda s: False,
    "$recursiveAnchor": lambda s: s["$recursiveAnchor"] is False,
}
"""Keywords of the standard that no backend enforces, and when they ask for nothing."""


def enforceable_schema(schema: object, *, closed: bool) -> Schema:
    """A decoded schema in terms that are enforced to the letter; it is changed on the way.

    `closed` objects have no properties but those they speak of. Raises `ValueError` that names the
    keyword that cannot be enforced.
    """
    if schema is True:
        return {}
    if schema is False:
        raise ValueError("the schema false fits nothing")
    if not isinstance(schema, dict):
        raise ValueError("a schema is an object, true or false")
    schema.pop("x-guidance", None)  # the library's own switch for being lenient
    references = _References(schema)
    for path, each in subschemas(schema):
        _check(path, each)
        references.check(path, each)
        _rewrite(each)
        if closed:
            _close(each)
    _close_bounds(schema)
    return schema


def patterns_of(schema: Schema) -> Iterator[tuple[str, str]]:
    """(where it stands, pattern) of every regular expression in an enforceable schema."""
    for path, each in subschemas(schema):
        if "pattern" in each:
            yield f"pattern at {path}", each["pattern"]
        for pattern in each.get("patternProperties", ()):
            yield f"patternProperties at {path}", pattern


class _References:
    """Where `$ref` may lead: to a place in the same document, and not too often."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._num_references = 0

    def check(self, path: str, schema: Schema) -> None:
        reference = schema.get("$ref")
        if reference is None:
            return
        self._num_references += 1
        if self._num_references > MAX_RULES:
            raise _refusal(path, "$ref", f"at most {MAX_RULES} references are allowed")
        if not reference.startswith("#"):
            raise _refusal(path, "$ref", f"{shown(reference)} is not in this schema")
        if not reference.startswith("#/"):
            return  # the root, or an anchor
        target: object = self._root
        for part in reference[2:].split("/"):
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and key in target:
                target = target[key]
            elif isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            else:
                raise _refusal(path, "$ref", f"{shown(reference)} leads nowhere")


def subschemas(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """(path, schema) of the schema and all within; each is checked before those within it."""
    stack: list[tuple[str, Any]] = [("#", schema)]
    while stack:
        path, each = stack.pop()
        if not isinstance(each, dict):
            continue
        yield path, each
        for keyword in _MAPS_OF_SCHEMAS:
            for name, inner in each.get(keyword, {}).items():
                stack.append((f"{path}/{keyword}/{name}", inner))
        for keyword in _LISTS_OF_SCHEMAS:
            stack += [(f"{path}/{keyword}/{i}", s) for i, s in enumerate(each.get(keyword, ()))]
        for keyword in _SCHEMAS:
            inner = each.get(keyword)
            if isinstance(inner, list):
                stack += [(f"{path}/{keyword}/{i}", s) for i, s in enumerate(inner)]
            else:
                stack.append((f"{path}/{keyword}", inner))


def _check(path: str, schema: Schema) -> None:
    """Refuse what is malformed, and what no backend enforces; drop what asks for nothing."""
    for keyword in list(schema):
        value = schema[keyword]
        if keyword in _ANNOTATIONS or keyword.startswith("x-"):
            continue
        if keyword in _NEUTRAL:
            if not _NEUTRAL[keyword](schema):
                raise _refusal(path, keyword, "this keyword cannot be enforced")
        elif keyword not in KEYWORDS:
            raise _refusal(path, keyword, "this keyword is not known")
        elif keyword == "items" and isinstance(value, list):  # of drafts before 2020-12
            if not _is_schemas(value):
                raise _refusal(path, keyword, "must be a schema or a list of schemas")
        else:
            fits, words = KEYWORDS[keyword]
            if not fits(value):
                raise _refusal(path, keyword, f"must be {words}")
    for keyword in [name for name in schema if name in _NEUTRAL or name.startswith("x-")]:
        del schema[keyword]
    _check_numbers(path, schema)
    _check_num_properties(path, schema)


def _check_numbers(path: str, schema: Schema) -> None:
    """Numbers that a double cannot hold would be compared with their neighbours."""
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
        value = schema.get(keyword)
        if _is_number(value) and abs(value) > LARGEST_EXACT:
            raise _refusal(path, keyword, "numbers beyond 2**53 cannot be enforced")
    if schema.get("multipleOf", 1) <= 0:
        raise _refusal(path, "multipleOf", "must be more than 0")
    for keyword in ("enum", "const"):
        stack = [schema.get(keyword)]
        while stack:
            value = stack.pop()
            if isinstance(value, list):
                stack += value
            elif isinstance(value, dict):
                stack += value.values()
            elif _is_number(value) and abs(value) > LARGEST_EXACT:
                raise _refusal(path, keyword, "numbers beyond 2**53 cannot be enforced")


def _check_num_properties(path: str, schema: Schema) -> None:
    """Names that `properties` does not list may come twice, which counts once."""
    least = schema.get("minProperties", 0)
    if least <= 1:
        return
    required = set(schema.get("required", ()))
    if least <= len(required):
        del schema["minProperties"]
    elif least > len(required) + 1:
        why = "it can ask for one property beside the required ones, since names may come twice"
        raise _refusal(path, "minProperties", why)


_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
"""0001 to 9999."""
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    f"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = (
    "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?"
    "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
}
"""Formats as RFC 3339 has them, without leap seconds."""
_LONGEST_HOSTNAME = 253


def _rewrite(schema: Schema) -> None:
    """Put formats in terms that are enforced to the letter."""
    form = schema.get("format")
    if form in FORMAT_PATTERNS:
        del schema["format"]
        _add(schema, "pattern", FORMAT_PATTERNS[form])
    elif form == "hostname":
        _add(schema, "maxLength", min(schema.pop("maxLength", 253), _LONGEST_HOSTNAME))


def _close_bounds(schema: Schema) -> None:
    """Put open bounds at whole numbers in terms of closed ones, where the other bound is near.

    llguidance takes 0 for a number above 0 if it is to be at most 0.5 (and -0 for one below 0): an
    open bound lets its own number through if the other bound, which may stand in another schema of
    an `allOf`, is a fraction next to it. The closed bound is a millionth of their distance inside.
    """
    fractions = sorted(
        abs(each[keyword])
        for _, each in subschemas(schema)
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        if _is_number(each.get(keyword)) and each[keyword] % 1
    )
    for path, each in subschemas(schema):
        for keyword, closed, sign in (
            ("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)
        ):  # fmt: skip
            bound = each.get(keyword)
            if not _is_number(bound) or bound % 1 or bound * sign < 0:
                continue
            following = bisect(fractions, abs(bound))
            if following == len(fractions) or fractions[following] - abs(bound) >= 1:
                continue
            distance = fractions[following] - abs(bound)
            inside = abs(bound) + 10.0 ** (math.floor(math.log10(distance)) - 6)
            if inside == abs(bound):
                raise _refusal(path, keyword, "it is too near to another bound to be told from it")
            del each[keyword]
            _add(each, closed, inside * sign)


def _add(schema: Schema, keyword: str, value: object) -> None:
    """A keyword beside the others, also if it is there already."""
    if keyword in schema:
        schema["allOf"] = [*schema.get("allOf", ()), {keyword: value}]
    else:
        schema[keyword] = value


def _close(schema: Schema) -> None:
    if "additionalProperties" not in schema and (
        "properties" in schema or "patternProperties" in schema
    ):
        schema["additionalProperties"] = False


def _refusal(path: str, keyword: str, why: str) -> ValueError:
    return ValueError(f"{keyword} at {path}: {why}")
