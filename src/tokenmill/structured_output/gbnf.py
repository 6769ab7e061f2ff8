"""GBNF, the grammars of llama.cpp, in the terms of Lark.

    root   ::= "[" item ("," item)* "]"        start: "[" item ("," item)* "]"
    item   ::= [a-z]+ | root                    item: WORD | start

A rule that leads to no other rule but such ones becomes a terminal, one regular expression: there
the grammar means exactly what it says. Elsewhere every literal and class is a lexeme that takes as
much text as it can, so that some texts of an ambiguous grammar cannot be reached; none that the
grammar forbids can.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

_RULE = re.compile(r"^[ \t]*[A-Za-z0-9_-]+[ \t]*::=", re.MULTILINE)
_TOKEN = re.compile(
    r"""
    (?P<blank>[ \t]+|\#[^\n]*)
  | (?P<newline>[\r\n]+)
  | (?P<name>[A-Za-z0-9_-]+)
  | (?P<define>::=)
  | (?P<string>"(?:[^"\\\n]|\\.)*")
  | (?P<class>\[(?:[^\]\\\n]|\\.)*\])
  | (?P<repeat>[*+?]|\{[ \t]*\d*[ \t]*(?:,[ \t]*\d*[ \t]*)?\})
  | (?P<any>\.)
  | (?P<other>[|()])
    """,
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)", re.DOTALL)
_CONTROL = {"n": "\n", "r": "\r", "t": "\t"}
_MAX_REPEATS = 10_000


def is_gbnf(text: str) -> bool:
    """Whether a grammar is written in GBNF."""
    return _RULE.search(text) is not None


def gbnf_to_lark(text: str) -> str:
    """Raises `ValueError` that says where the grammar is malformed."""
    rules = _Parser(text).parse()
    if "root" not in rules:
        raise ValueError("a GBNF grammar needs a rule named root")
    for name, rule in rules.items():
        for reference in rule.references:
            if reference not in rules:
                raise ValueError(f"rule {name} refers to {reference}, which is not there")
    terminals = _terminals(rules)
    names = _lark_names(rules, terminals)
    lines = [f"start: {names['root']}"]
    lines += [f"{names[name]}: {rule.render(names)}" for name, rule in rules.items()]
    return "\n".join(lines) + "\n"


@dataclass(slots=True)
class _Rule:
    """A rule's body: pieces of Lark, and between them names of rules."""

    pieces: list[str] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    """Which pieces are names."""

    @property
    def references(self) -> list[str]:
        return [self.pieces[place] for place in self.places]

    def refer(self, name: str) -> None:
        self.places.append(len(self.pieces))
        self.pieces.append(name)

    def render(self, names: dict[str, str]) -> str:
        pieces = self.pieces.copy()
        for place in self.places:
            pieces[place] = names[pieces[place]]
        return " ".join(pieces)


class _Parser:
    """One pass over the tokens; groups are counted, so nothing recurs."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._rules: dict[str, _Rule] = {}

    def parse(self) -> dict[str, _Rule]:
        """The rules by name, in their order."""
        rule: _Rule | None = None
        depth, is_item, position = 0, False, 0
        while position < len(self._text):
            match = _TOKEN.match(self._text, position)
            if match is None:
                raise self._error(position, "cannot be read")
            kind, token = str(match.lastgroup), match[0]
            if kind == "name" and not depth and self._defines(match.end()):
                rule, is_item = self._begin(token, position), False
                position = self._text.index("::=", match.end()) + 3
                continue
            position = match.end()
            if kind in ("blank", "newline"):
                continue
            if rule is None or kind == "define":
                raise self._error(match.start(), "stands outside of a rule")
            if kind == "repeat" and not is_item:
                raise self._error(match.start(), "repeats nothing")
            depth += (token == "(") - (token == ")")
            if depth < 0:
                raise self._error(match.start(), "closes what nothing has opened")
            if kind == "name":
                rule.refer(token)
            else:
                rule.pieces.append(self._piece(kind, token, match.start()))
            is_item = token not in ("|", "(")
        if depth:
            raise ValueError("a group is not closed")
        return self._rules

    def _defines(self, position: int) -> bool:
        """Whether the name that ends here begins a rule."""
        rest = self._text[position : position + 64].lstrip(" \t")
        return rest.startswith("::=")

    def _begin(self, name: str, position: int) -> _Rule:
        if name in self._rules:
            raise self._error(position, "is defined twice")
        rule = self._rules[name] = _Rule()
        return rule

    def _piece(self, kind: str, token: str, position: int) -> str:
        if kind == "string":
            return json.dumps(_unescaped(token[1:-1]), ensure_ascii=False)
        if kind == "class":
            return self._class(token, position)
        if kind == "any":
            return "/(?s:.)/"
        return self._repeat(token, position) if kind == "repeat" else token

    def _repeat(self, token: str, position: int) -> str:
        if token in "*+?":
            return token
        low, comma, high = token[1:-1].replace(" ", "").replace("\t", "").partition(",")
        if not low and not high:
            raise self._error(position, "gives no number")
        if max(int(low or 0), int(high or 0)) > _MAX_REPEATS:
            raise self._error(position, f"repeats more than {_MAX_REPEATS} times")
        return f"{{{low or 0}{comma}{high}}}"

    def _class(self, token: str, position: int) -> str:
        body = token[1:-1]
        negated = body.startswith("^")
        body = body[negated:]
        parts, place = [], 0
        while place < len(body):
            low, place = _character(body, place)
            high = low
            if body[place : place + 1] == "-" and place + 1 < len(body):
                high, place = _character(body, place + 1)
            if high < low:
                raise self._error(position, "has a range that ends before it begins")
            parts.append(f"\\x{{{ord(low):x}}}-\\x{{{ord(high):x}}}")
        if not parts:
            if negated:
                return "/(?s:.)/"
            raise self._error(position, "is an empty class")
        return f"/[{'^' if negated else ''}{''.join(parts)}]/"

    def _error(self, position: int, why: str) -> ValueError:
        line = self._text.count("\n", 0, position) + 1
        return ValueError(f"line {line}: {self._text[position : position + 20]!r} {why}")


def _character(text: str, position: int) -> tuple[str, int]:
    """A character of a class, and where the next one begins."""
    match = _ESCAPE.match(text, position)
    if match is None:
        return text[position], position + 1
    return _unescape(match), match.end()


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(_unescape, text)


def _unescape(match: re.Match[str]) -> str:
    escape = match[1]
    if len(escape) == 1:
        return _CONTROL.get(escape, escape)
    code = int(escape[1:], 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000 or not code:
        raise ValueError(f"\\{escape} is no character that a text can hold")
    return chr(code)


def _terminals(rules: dict[str, _Rule]) -> set[str]:
    """Rules that lead to no recursion and to no rule that does: one regular expression each."""
    waiting = {name: set(rule.references) for name, rule in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, references in waiting.items():
        for reference in references:
            users[reference].append(name)
    ready = [name for name, references in waiting.items() if not references]
    found: set[str] = set()
    while ready:
        name = ready.pop()
        found.add(name)
        for user in users[name]:
            waiting[user].discard(name)
            if not waiting[user]:
                ready.append(user)
    return found


def _lark_names(rules: dict[str, _Rule], terminals: set[str]) -> dict[str, str]:
    """Names that Lark takes for what the rules are; numbered, so that none collide."""
    return {
        name: f"{'T' if name in terminals else 'r'}{number}" for number, name in enumerate(rules)
    }
