"""Items of the Responses protocol as the messages of a chat.

What the assistant thought, said and called between two items of others is one message of it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

import msgspec

from tokenmill.entrypoints.http.responses.tools import namespaced
from tokenmill.entrypoints.parsers.custom_calls import CUSTOM_INPUT
from tokenmill.errors import invalid, shown

ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Types of parts to the field that has their text."""
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
_OUTPUTS = ("function_call_output", "custom_tool_call_output")

Item = dict[str, Any]


def new_id(prefix: str) -> str:
    """An id that nobody can guess: who knows one may ask for what it names."""
    return f"{prefix}_{secrets.token_hex(16)}"


def checked_items(given: str | list[Item] | None) -> list[Item]:
    """The input as items in the form that is kept: each has a type and an id, and messages have
    lists of parts. References are left as they are.

    Raises `InvalidRequestError` that names the field.
    """
    if given is None:
        return []
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": given}]
    items = []
    for i, item in enumerate(given):
        kind = item.get("type")
        if kind is None:
            kind = "message" if "role" in item else "item_reference"
        if not isinstance(kind, str):
            raise invalid(f"input[{i}].type", "must be a string")
        item = {**item, "type": kind}
        if kind == "message":
            item = _whole_message(item, f"input[{i}]")
        if item.get("id") is None and kind != "item_reference":
            item["id"] = new_id("item")
        if not isinstance(item.get("id"), str):
            raise invalid(f"input[{i}].id", "must be a string")
        items.append(item)
    return items


def _whole_message(item: Item, where: str) -> Item:
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        raise invalid(f"{where}.role", f"is {shown(role)}; it must be {', '.join(ROLES)}")
    if isinstance(content, str):
        if role == "assistant":
            content = [{"type": "output_text", "text": content, "annotations": []}]
        else:
            content = [{"type": "input_text", "text": content}]
    if not isinstance(content, list):
        raise invalid(f"{where}.content", "must be a string or a list of parts")
    return {"status": "completed", **item, "content": content}


class ChatItems:
    """The messages of a chat, and where each comes from."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: dict[str, str] = {}
        """Paths in the chat to paths in the request."""
        self._turn: dict[str, Any] | None = None
        """The assistant's message at the end, while it may grow."""
        self._call_names: dict[str, str] = {}

    def instructions(self, text: str | None) -> None:
        """The system prompt."""
        if text:
            self._add("instructions", {"role": "system", "content": text})

    def history(self, items: Iterable[Item]) -> None:
        """Items of earlier responses."""
        for item in items:
            self._item("previous_response_id", item)

    def input(self, items: Iterable[Item]) -> None:
        """Items of the request. Raises `InvalidRequestError` that names the field."""
        for i, item in enumerate(items):
            self._item(f"input[{i}]", item)

    def _item(self, where: str, item: Item) -> None:
        kind = item["type"]
        if kind == "message":
            self._message(where, item)
        elif kind == "reasoning":
            self._reasoning(where, item)
        elif kind in _CALLS:
            self._call(where, item)
        elif kind in _OUTPUTS:
            self._output(where, item)
        else:
            raise invalid(f"{where}.type", f"is {shown(kind)}, which this server does not take")

    def _message(self, where: str, item: Item) -> None:
        role = item["role"]
        parts = [
            (f"{where}.content[{i}]", part)
            for i, part in enumerate(_as_parts(item["content"], f"{where}.content"))
        ]
        if role == "assistant":
            texts = [_text(part, place) for place, part in parts]
            turn = self._own(where, may_follow=("reasoning_content",))
            turn["content"] = "".join(texts)
        else:
            self._add_parts(where, {"role": role}, parts)

    def _reasoning(self, where: str, item: Item) -> None:
        texts: list[str] = []
        for name in ("content", "summary"):  # a summary only where there is nothing else
            parts = item.get(name)
            if parts is None or texts:
                continue
            if not isinstance(parts, list):
                raise invalid(f"{where}.{name}", "must be a list of parts")
            for i, part in enumerate(parts):
                text = part.get("text") if isinstance(part, dict) else None
                if not isinstance(text, str):
                    raise invalid(f"{where}.{name}[{i}].text", "must be a string")
                texts.append(text)
        if texts:
            self._own(where, may_follow=())["reasoning_content"] = "\n".join(texts)

    def _call(self, where: str, item: Item) -> None:
        name, call_id = _string(item, "name", where), _string(item, "call_id", where)
        if item.get("namespace") is not None:
            name = namespaced(_string(item, "namespace", where), name)
        field = _CALLS[item["type"]]
        arguments: Any = _string(item, field, where)
        if item["type"] == "custom_tool_call":
            arguments = {CUSTOM_INPUT: arguments}
        elif item.get("status") == "incomplete" and not _is_json(arguments):
            arguments = {}  # one of ours, that was cut off
        self._call_names[call_id] = name
        turn = self._own(where, may_follow=("reasoning_content", "content", "tool_calls"))
        calls = turn.setdefault("tool_calls", [])
        place = f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}].function"
        self.places[f"{place}.arguments"] = f"{where}.{field}"
        function = {"name": name, "arguments": arguments}
        calls.append({"id": call_id, "type": "function", "function": function})

    def _output(self, where: str, item: Item) -> None:
        call_id = _string(item, "call_id", where)
        message = {"role": "tool", "tool_call_id": call_id}
        if call_id in self._call_names:  # some templates write it
            message["name"] = self._call_names[call_id]
        output = item.get("output")
        if isinstance(output, str):
            self._add(where, {**message, "content": output})
            return
        if not isinstance(output, list):
            raise invalid(f"{where}.output", "must be a string or a list of parts")
        parts = [(f"{where}.output[{i}]", part) for i, part in enumerate(output)]
        self._add_parts(where, message, parts)

    def _own(self, where: str, *, may_follow: tuple[str, ...]) -> dict[str, Any]:
        """The assistant's message for something that may follow these fields of it."""
        turn = self._turn
        if turn is not None:
            has = {name for name, value in turn.items() if value and name != "role"}
            if has <= set(may_follow):
                return turn
        turn = {"role": "assistant", "content": ""}
        self._add(where, turn)
        self._turn = turn
        return turn

    def _add_parts(self, where: str, message: dict[str, Any], parts: list[tuple[str, Any]]) -> None:
        """A message of these parts: one text where that is all they are."""
        converted = [_part(part, place) for place, part in parts]
        if all(part["type"] == "text" for part in converted):
            content: Any = "\n".join(part["text"] for part in converted)
        else:
            content = converted
            for i, (place, _) in enumerate(parts):
                self.places[f"messages[{len(self.messages)}].content[{i}]"] = place
        self._add(where, {**message, "content": content})

    def _add(self, where: str, message: dict[str, Any]) -> None:
        self._turn = None
        self.places[f"messages[{len(self.messages)}]"] = where
        self.messages.append(message)


def _as_parts(content: Any, where: str) -> list[Any]:
    if isinstance(content, list):
        return content
    raise invalid(where, "must be a string or a list of parts")


def _part(part: Any, where: str) -> dict[str, Any]:
    """A part of a user, or of a tool's output, as one of a chat's message."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "input_image":
        url = part.get("image_url")
        if not isinstance(url, str):
            raise invalid(f"{where}.image_url", "must be a string; files are not kept here")
        return {"type": "image_url", "image_url": {"url": url}}
    return {"type": "text", "text": _text(part, where)}


def _text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise invalid(f"{where}.type", f"is {shown(kind)}, which this server does not take here")
    return _string(part, _TEXT_PARTS[kind], where)


def _string(item: Item, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid(f"{where}.{name}", "must be a string")
    return value


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)  # builds nothing of it
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
