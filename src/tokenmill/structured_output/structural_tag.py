"""Structural tags: free text with parts of a given form in it, in the terms of Lark.

Both notations are read. The first knows parts that begin with a trigger:

    {"triggers": ["<fn="], "structures": [{"begin": "<fn=f>", "schema": {...}, "end": "</fn>"}]}

The second has formats within formats, `{"type": "structural_tag", "format": {...}}`:

    const_string         {"value"}
    json_schema          {"json_schema"}
    regex                {"pattern"}
    any_text             {}
    sequence, or         {"elements"}
    tag                  {"begin", "content", "end"}
    triggered_tags       {"triggers", "tags", "at_least_one", "stop_after_first"}
    tags_with_separator  {"tags", "separator", "at_least_one", "stop_after_first"}
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from tokenmill.structured_output.json_schema import enforceable_schema

_ANY_TEXT = "/(?s:.*)/"
_SLASH = re.compile(r"\\.|/", re.DOTALL)
_MAX_PARTS = 1_000


def structural_tag_to_lark(tag: object, json_options: Mapping[str, Any]) -> str:
    """`json_options` are llguidance's, of the JSON within.

    Raises `ValueError` that says what is malformed, or not supported.
    """
    return _Writer(json_options).write(_format_of(tag))


def _format_of(tag: object) -> Mapping[str, Any]:
    """The tag in the second notation."""
    if not isinstance(tag, Mapping):
        raise ValueError("a structural tag is an object")
    if "structures" in tag:
        structures = _list(tag, "structures", "structures")
        tags = [
            {
                "begin": _get(each, "begin", str, "structures"),
                "content": {"type": "json_schema", "json_schema": _schema(each)},
                "end": _get(each, "end", str, "structures"),
            }
            for each in structures
        ]
        return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
    form: Mapping[str, Any] = _get(tag, "format", dict, "structural_tag")
    return form


def _schema(structure: Mapping[str, Any]) -> object:
    return structure.get("schema", {})


class _Writer:
    """Writes rules; each format becomes an expression of names, literals and patterns."""

    def __init__(self, json_options: Mapping[str, Any]) -> None:
        self._json_options = json_options
        self._rules: list[str] = []
        self._num_parts = 0
        self._writers: dict[str, Callable[[Mapping[str, Any]], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "any_text": lambda _: self._rule(_ANY_TEXT),
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def write(self, form: Mapping[str, Any]) -> str:
        """The whole grammar."""
        start = self._expression(form)
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def _expression(self, form: object) -> str:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise ValueError(f"a structural tag may have {_MAX_PARTS} parts")
        if not isinstance(form, Mapping):
            raise ValueError(f"a format is an object, not {type(form).__name__}")
        kind = form.get("type")
        if kind not in self._writers:
            raise ValueError(f"format type {kind!r} is not one of {', '.join(self._writers)}")
        return self._writers[str(kind)](form)

    def _const_string(self, form: Mapping[str, Any]) -> str:
        return _literal(_get(form, "value", str, "const_string"))

    def _json_schema(self, form: Mapping[str, Any]) -> str:
        schema = enforceable_schema(form.get("json_schema", {}), closed=False)
        return self._rule(f"%json {json.dumps(schema | {'x-guidance': self._json_options})}")

    def _regex(self, form: Mapping[str, Any]) -> str:
        pattern = _get(form, "pattern", str, "regex")
        escaped = _SLASH.sub(lambda m: "\\/" if m[0] == "/" else m[0], pattern)
        if "\n" in escaped or not escaped:
            raise ValueError("a pattern in a structural tag must not be empty or have line breaks")
        return self._rule(f"/{escaped}/")

    def _sequence(self, form: Mapping[str, Any]) -> str:
        return f"({' '.join(map(self._expression, _list(form, 'elements', 'sequence')))})"

    def _or(self, form: Mapping[str, Any]) -> str:
        return f"({' | '.join(map(self._expression, _list(form, 'elements', 'or')))})"

    def _tag(self, form: Mapping[str, Any]) -> str:
        begin = _get(form, "begin", str, "tag")
        return f"({_literal(begin)} {self._rest_of_tag(form)})"

    def _rest_of_tag(self, form: Mapping[str, Any]) -> str:
        """What follows a tag's begin."""
        content = form.get("content")
        ends = form.get("end")
        ends = [ends] if isinstance(ends, str) else ends
        if not isinstance(ends, list) or not all(isinstance(each, str) for each in ends):
            raise ValueError("the end of a tag is a string or a list of strings")
        if isinstance(content, Mapping) and content.get("type") == "any_text":
            return self._text_until([each for each in ends if each])
        end = " | ".join(map(_literal, ends)) or '""'
        return f"{self._expression(content)} ({end})"

    def _triggered_tags(self, form: Mapping[str, Any]) -> str:
        triggers = _strings(form, "triggers", "triggered_tags")
        tags = _list(form, "tags", "triggered_tags")
        by_trigger: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        whole: list[str] = []
        for tag in tags:
            begin = _get(tag, "begin", str, "tag")
            trigger = next((each for each in triggers if begin.startswith(each)), None)
            if trigger is None:
                raise ValueError(f"tag {begin!r} begins with none of the triggers")
            rest = f"{_literal(begin[len(trigger) :])} {self._rest_of_tag(tag)}"
            rule = self._rule(rest)
            by_trigger[trigger].append(rule)
            whole.append(f"({_literal(trigger)} {rule})")
        used = {trigger: rules for trigger, rules in by_trigger.items() if rules}
        branches = [
            f"({self._text_until([trigger])} ({' | '.join(rules)}))"
            for trigger, rules in used.items()
        ]
        found = self._rule(" | ".join(branches))
        first = self._rule(" | ".join(whole))
        tail = self._rule(_without(triggers), terminal=True)
        if form.get("stop_after_first"):
            return first if form.get("at_least_one") else f"({found} | {tail})"
        return f"({first} {found}* {tail})" if form.get("at_least_one") else f"({found}* {tail})"

    def _tags_with_separator(self, form: Mapping[str, Any]) -> str:
        tags = [self._tag(tag) for tag in _list(form, "tags", "tags_with_separator")]
        one = self._rule(" | ".join(tags))
        separator = _literal(_get(form, "separator", str, "tags_with_separator"))
        several = one if form.get("stop_after_first") else f"({one} ({separator} {one})*)"
        return several if form.get("at_least_one") else f"({several})?"

    def _text_until(self, ends: list[str]) -> str:
        """The shortest text that ends with one of these; any text if there are none."""
        if not ends:
            return self._rule(_ANY_TEXT)
        pattern = "|".join(map(_escaped, ends))
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: /(?s:.*)({pattern})/")
        return name

    def _rule(self, body: str, *, terminal: bool = False) -> str:
        name = f"{'T' if terminal else 'r'}{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name


def _without(words: list[str]) -> str:
    """Any text without these words."""
    pattern = "|".join(map(_escaped, words))
    return f"/(?s:.*)/ & ~/(?s:.*)({pattern})(?s:.*)/"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """A pattern for just this text, in a regular expression of Lark."""
    return "".join(
        char if char.isalnum() or char in " _" else f"\\x{{{ord(char):x}}}" for char in text
    )


def _get(value: object, key: str, kind: type, where: str) -> Any:
    found = value.get(key) if isinstance(value, Mapping) else None
    if not isinstance(found, kind):
        words = "a string" if kind is str else "an object"
        raise ValueError(f"{where} needs {key}, {words}")
    return found


def _list(value: Mapping[str, Any], key: str, where: str) -> list[Any]:
    found = value.get(key)
    if not isinstance(found, list) or not found:
        raise ValueError(f"{where} needs {key}, a list that is not empty")
    return found


def _strings(value: Mapping[str, Any], key: str, where: str) -> list[str]:
    found = _list(value, key, where)
    if not all(isinstance(each, str) and each for each in found):
        raise ValueError(f"{where} needs {key}, a list of strings that are not empty")
    return found
