"""What form a request's text must have: a JSON schema, a regular expression, a grammar, and so on.

`StructuredOutputsParams` is one field of `SamplingParams`. It is frozen and normalised when built:
JSON comes as text or as values and is kept as text. Size and depth are checked here, without any
recursion, before a parser of any kind sees what a user wrote; whether it can be enforced is for the
grammar backend to say (`structured_output/`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from tokenmill import parameter_checks as check
from tokenmill.errors import InvalidRequestError, refuse_unknown

MAX_JSON_CHARS = 1 << 19
"""Characters of a schema or a structural tag."""
MAX_GRAMMAR_CHARS = 1 << 19
MAX_REGEX_CHARS = 1 << 14
MAX_WHITESPACE_CHARS = 256
MAX_CHOICES = 10_000
MAX_CHOICE_CHARS = 1 << 18
"""Characters of all choices together."""
MAX_DEPTH = 100
"""Brackets within brackets."""
MAX_RULES = 4_000
"""Rules of a grammar, and references of a schema: each may lead to the next."""
_MAX_VALUES = 200_000
"""Values in a schema, counted at every depth."""

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
"""The fields of which exactly one is given."""
_WHITESPACE_OPTIONS = ("disable_any_whitespace", "whitespace_pattern")
_NAME = "structured_outputs"
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', re.DOTALL)
_CLASS = r"\[(?:[^\]\\]|\\.)+\]?"
_IN_REGEX = re.compile(rf"\\.|{_CLASS}|[\[({{]|[\])}}]", re.DOTALL)
_IN_GRAMMAR = re.compile(rf'"(?:[^"\\\n]|\\.)*"?|\\.|{_CLASS}|[\[({{]|[\])}}]', re.DOTALL)


class _StrictKeywords(msgspec.StructMeta):
    """Refuses unknown keywords with the nearest known one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        refuse_unknown(_NAME, kwargs, self.__struct_fields__)
        return super().__call__(*args, **kwargs)


class StructuredOutputsParams(
    msgspec.Struct, metaclass=_StrictKeywords, frozen=True, kw_only=True, omit_defaults=True
):
    """The form of the text; exactly one of the first six fields is given.

    Raises `InvalidRequestError` that names the parameter, its value and its limit.
    """

    json: str | dict[str, Any] | None = None
    """A JSON schema (draft 2020-12), as text or as values; kept as text."""
    json_object: bool | None = None
    """True: any JSON object."""
    regex: str | None = None
    """A regular expression that the whole text matches."""
    choice: list[str] | None = None
    """The text is one of these."""
    grammar: str | None = None
    """A context-free grammar: Lark with a rule `start`, or GBNF with a rule `root`."""
    structural_tag: str | dict[str, Any] | None = None
    """Free text with parts of a given form in it, as text or as values; kept as text."""
    disable_any_whitespace: bool = False
    """JSON without blanks between its parts; by default one blank, or a line break and up to 16
    blanks, may stand there."""
    whitespace_pattern: str | None = None
    """A regular expression for what may stand between the parts of JSON, in place of that."""
    disable_additional_properties: bool = False
    """Objects of a schema that do not speak of `additionalProperties` have none."""
    backend: str | None = None
    """Must be the engine's backend, if it is given."""

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequestError(
                f"{_NAME} has {' and '.join(given) or 'none'} of {', '.join(KINDS)};"
                " exactly one must be given.",
                parameter=_NAME,
            )
        (kind,) = given
        value = _NORMALISE[kind](_field(kind), getattr(self, kind))
        msgspec.structs.force_setattr(self, kind, value)
        self._check_options(kind)

    @property
    def kind(self) -> str:
        """Which of the fields is given."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def source(self) -> str:
        """What was given, as text; choices as a JSON list."""
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else msgspec.json.encode(value).decode()

    def _check_options(self, kind: str) -> None:
        """An option without effect is refused: whoever gives it expects one."""
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            check.flag(_field(name), getattr(self, name))
        pattern = self.whitespace_pattern
        if pattern is not None:
            _text(_field("whitespace_pattern"), pattern, MAX_WHITESPACE_CHARS)
            check_depth(_field("whitespace_pattern"), pattern)
            if self.disable_any_whitespace:
                raise InvalidRequestError(
                    f"{_field('whitespace_pattern')} and disable_any_whitespace exclude each other;"
                    " give one of them.",
                    parameter=_field("whitespace_pattern"),
                )
        for name in _WHITESPACE_OPTIONS:
            if getattr(self, name) and kind not in ("json", "json_object"):
                raise _no_effect(name, kind, "json and json_object")
        if self.disable_additional_properties and kind != "json":
            raise _no_effect("disable_additional_properties", kind, "json")
        if self.backend is not None and not isinstance(self.backend, str):
            raise check.refusal(_field("backend"), self.backend, "must be the name of a backend")


def as_structured_outputs(value: object) -> StructuredOutputsParams | None:
    """The parameters in any form that they may come in: as they are, or as a mapping."""
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return StructuredOutputsParams(**value)
    raise check.refusal(_NAME, value, "must be StructuredOutputsParams, or a mapping of its fields")


def check_depth(name: str, text: str, tokens: re.Pattern[str] = _IN_REGEX) -> None:
    """Refuse brackets that are nested too deep; those in character classes are characters."""
    depth = 0
    for match in tokens.finditer(text):
        token = match[0]
        if token in ("(", "{", "["):
            depth += 1
        elif token in (")", "}", "]"):
            depth = max(depth - 1, 0)
        elif token[0] == "[" and token.count("[") > MAX_DEPTH:  # classes may hold classes
            raise _too_deep(name)
        if depth > MAX_DEPTH:
            raise _too_deep(name)


def check_json_depth(name: str, text: str) -> None:
    """The same for JSON, whose strings do not count."""
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        token = match[0]
        if token in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise _too_deep(name)
        elif token in "]}":
            depth -= 1


def _too_deep(name: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{name} has brackets nested deeper than {MAX_DEPTH}; make it flatter.", parameter=name
    )


def _no_effect(option: str, kind: str, kinds: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{_field(option)} has no effect on {kind}, only on {kinds}; leave it out.",
        parameter=_field(option),
    )


def _field(name: str) -> str:
    return f"{_NAME}.{name}"


def _text(name: str, value: object, longest: int) -> str:
    """Text that is there, not too long, and that can be sent and compiled."""
    if not isinstance(value, str):
        raise check.refusal(name, value, "must be a string")
    if not value:
        raise check.refusal(name, value, "must not be empty")
    if len(value) > longest:
        raise InvalidRequestError(
            f"{name} has {len(value)} characters; at most {longest} are allowed.", parameter=name
        )
    if "\x00" in value:
        raise check.refusal(name, value, "must not hold the character NUL")
    _check_unicode(name, value)
    return value


def _check_unicode(name: str, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{name} holds a lone surrogate, which is no character.", parameter=name
        ) from error


def _json_text(name: str, value: object) -> str:
    """JSON as text; its values are checked, not their meaning."""
    if isinstance(value, str):
        text = _text(name, value, MAX_JSON_CHARS)
        check_json_depth(name, text)
        try:
            decoded = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequestError(f"{name} is no JSON: {error}.", parameter=name) from error
    else:
        decoded = value
    if not isinstance(decoded, Mapping | bool):
        raise check.refusal(name, decoded, "must be a JSON object")
    _check_values(name, decoded)
    if isinstance(value, str):
        return value
    try:
        text = msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError, NotImplementedError) as error:
        raise InvalidRequestError(
            f"{name} holds what JSON cannot: {error}.", parameter=name
        ) from error
    return _text(name, text, MAX_JSON_CHARS)


def _check_values(name: str, value: object) -> None:
    """Depth and number of values, level by level; a value that holds itself is too deep."""
    level, num_values = [value], 0
    for _ in range(MAX_DEPTH + 1):
        inner: list[object] = []
        for each in level:
            if isinstance(each, Mapping):
                inner += each.values()
            elif isinstance(each, list | tuple):
                inner += each
            if num_values + len(inner) > _MAX_VALUES:
                raise InvalidRequestError(
                    f"{name} holds more than {_MAX_VALUES} values; make it smaller.",
                    parameter=name,
                )
        if any(isinstance(item, float) and not math.isfinite(item) for item in inner):
            raise InvalidRequestError(f"{name} holds a number that is not finite.", parameter=name)
        num_values += len(inner)
        level = [each for each in inner if isinstance(each, Mapping | list | tuple)]
        if not level:
            return
    raise _too_deep(name)


def _json_object(name: str, value: object) -> bool:
    if value is not True:
        raise check.refusal(name, value, "must be true, or left out")
    return True


_RULE = re.compile(
    r"^[ \t]*[?!]?[A-Za-z0-9_.-]+[ \t]*(?:\[[^\]\n]*\])?[ \t]*(?:::=|:)", re.MULTILINE
)


def _regex(name: str, value: object) -> str:
    text = _text(name, value, MAX_REGEX_CHARS)
    check_depth(name, text)
    return text


def _grammar(name: str, value: object) -> str:
    text = _text(name, value, MAX_GRAMMAR_CHARS)
    check_depth(name, text, _IN_GRAMMAR)
    num_rules = sum(1 for _ in _RULE.finditer(text))
    if num_rules > MAX_RULES:
        raise InvalidRequestError(
            f"{name} has {num_rules} rules; at most {MAX_RULES} are allowed.", parameter=name
        )
    return text


def _choices(name: str, value: object) -> list[str]:
    """Strings, each once; the empty one may be among them."""
    items = check.as_list(name, value, "strings")
    if not items:
        raise check.refusal(name, items, "must not be empty")
    if len(items) > MAX_CHOICES:
        raise check.refusal(name, f"{len(items)} strings", f"at most {MAX_CHOICES} are allowed")
    for item in items:
        if not isinstance(item, str):
            raise check.refusal(name, item, "every choice must be a string")
        if "\x00" in item:
            raise check.refusal(name, item, "must not hold the character NUL")
        _check_unicode(name, item)
    num_chars = sum(map(len, items))
    if num_chars > MAX_CHOICE_CHARS:
        raise InvalidRequestError(
            f"{name} has {num_chars} characters in all; at most {MAX_CHOICE_CHARS} are allowed.",
            parameter=name,
        )
    return list(dict.fromkeys(items))


_NORMALISE = {
    "json": _json_text,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choices,
    "grammar": _grammar,
    "structural_tag": _json_text,
}
