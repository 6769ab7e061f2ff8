"""Messages of Anthropic's protocol as the messages of a chat.

A turn is a list of blocks. The results of tools in a user's turn become messages of their own, in
their places; what the assistant thought, said and called in its turn becomes one message. Turns of
one role that follow each other are one turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tokenmill.errors import InvalidRequestError, invalid, shown

ROLES = ("user", "assistant", "system")
_BILLING_LINE = re.compile(r"\A\s{0,99}x-anthropic-billing-header:[^\n]*(\n|\Z)", re.IGNORECASE)
"""A line that some agents put before everything else. It changes with every request, and with it
the prompt's whole prefix would."""

Block = tuple[str, dict[str, Any]]
"""(its path in the request, the block)"""


class ChatTurns:
    """The messages of a chat, and where each comes from."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: dict[str, str] = {}
        """Paths in the chat to paths in the request."""
        self._call_names: dict[str, str] = {}

    def system(self, system: Any) -> None:
        """The system prompt. Raises `InvalidRequestError`."""
        if system is None:
            return
        blocks = list(_blocks(system, "system"))
        texts = [_BILLING_LINE.sub("", _text_of(block, where)) for where, block in blocks]
        texts = [text for text in texts if text]
        if texts:
            self._add("system", {"role": "system", "content": "\n".join(texts)})
            self.places["messages[0].content"] = "system"

    def turns(self, messages: list[dict[str, Any]]) -> None:
        """The conversation. Raises `InvalidRequestError` that names the field."""
        if not messages:
            raise invalid("messages", "is empty; it needs at least one message")
        for role, where, blocks in _merged(messages):
            if role == "assistant":
                self._assistant(where, blocks)
            elif role == "system":
                texts = [_text_of(block, place) for place, block in blocks]
                self._add(where, {"role": "system", "content": "\n".join(texts)})
            else:
                self._user(where, blocks)

    def _user(self, where: str, blocks: list[Block]) -> None:
        if not blocks:
            raise invalid(f"{where}.content", "is empty; it needs at least one block")
        parts: list[tuple[str, dict[str, Any]]] = []
        for place, block in blocks:
            if block["type"] == "tool_result":
                self._add_parts(where, {"role": "user"}, parts)
                parts = []
                self._tool_result(place, block)
            else:
                parts += _parts(place, block)
        self._add_parts(where, {"role": "user"}, parts)

    def _tool_result(self, where: str, block: dict[str, Any]) -> None:
        call_id = _string(block, "tool_use_id", where)
        message = {"role": "tool", "tool_call_id": call_id}
        if call_id in self._call_names:  # some templates write it
            message["name"] = self._call_names[call_id]
        content = block.get("content")
        blocks = [] if content is None else list(_blocks(content, f"{where}.content"))
        parts = [part for place, each in blocks for part in _parts(place, each)]
        if not parts:
            failed = block.get("is_error") is True
            parts = [(where, {"type": "text", "text": "Error" if failed else ""})]
        self._add_parts(where, message, parts)

    def _assistant(self, where: str, blocks: list[Block]) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        place_of_chat = f"messages[{len(self.messages)}]"
        for place, block in blocks:
            kind = block["type"]
            if kind == "text":
                texts.append(_string(block, "text", place))
            elif kind == "thinking":
                thoughts.append(_string(block, "thinking", place))
            elif kind == "tool_use":
                call = self._call(place, block)
                self.places[f"{place_of_chat}.tool_calls[{len(calls)}].function.arguments"] = (
                    f"{place}.input"
                )
                calls.append(call)
            elif kind != "redacted_thinking":  # nobody but its author can read that
                raise _unknown(place, kind)
        message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        self._add(where, message)

    def _call(self, where: str, block: dict[str, Any]) -> dict[str, Any]:
        call_id, name = _string(block, "id", where), _string(block, "name", where)
        arguments = block.get("input")
        if not isinstance(arguments, dict):
            raise invalid(f"{where}.input", "must be an object")
        self._call_names[call_id] = name
        function = {"name": name, "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}

    def _add_parts(
        self, where: str, message: dict[str, Any], parts: list[tuple[str, dict[str, Any]]]
    ) -> None:
        """A message of these parts, if there are any: one text where that is all they are."""
        if not parts:
            return
        if all(part["type"] == "text" for _, part in parts):
            content: Any = "\n".join(part["text"] for _, part in parts)
        else:
            content = [part for _, part in parts]
            for i, (place, part) in enumerate(parts):
                chat_place = f"messages[{len(self.messages)}].content[{i}]"
                self.places[chat_place] = place
                if part["type"] == "image_url":
                    self.places[f"{chat_place}.image_url"] = f"{place}.source"
        self._add(where, {**message, "content": content})

    def _add(self, where: str, message: dict[str, Any]) -> None:
        self.places[f"messages[{len(self.messages)}]"] = where
        self.messages.append(message)


def _merged(messages: list[dict[str, Any]]) -> Iterator[tuple[str, str, list[Block]]]:
    """(role, path of the first message, blocks) of each turn."""
    turn: tuple[str, str, list[Block]] | None = None
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role = message.get("role")
        if role not in ROLES:
            raise invalid(f"{where}.role", f"is {shown(role)}; it must be {' or '.join(ROLES)}")
        content = message.get("content")
        if content is None:
            raise invalid(f"{where}.content", "is missing; it must be a string or a list of blocks")
        blocks = list(_blocks(content, f"{where}.content"))
        if turn is not None and turn[0] == role:
            turn[2].extend(blocks)
            continue
        if turn is not None:
            yield turn
        turn = role, where, blocks
    if turn is not None:
        yield turn


def _blocks(content: Any, where: str) -> Iterator[Block]:
    """Those of a content, which may be a string. Raises `InvalidRequestError`."""
    if isinstance(content, str):
        yield where, {"type": "text", "text": content}
        return
    if not isinstance(content, list):
        raise invalid(where, "must be a string or a list of blocks")
    for i, block in enumerate(content):
        place = f"{where}[{i}]"
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise invalid(place, "must be an object with a type")
        yield place, block


def _parts(where: str, block: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """A block of a user, or of a tool's result, as parts of a chat's message."""
    match block["type"]:
        case "text":
            return [(where, {"type": "text", "text": _string(block, "text", where)})]
        case "image":
            url = _image_url(block.get("source"), f"{where}.source")
            return [(where, {"type": "image_url", "image_url": {"url": url}})]
        case "document":
            return _document(where, block)
        case "search_result":
            head = f"{_string(block, 'title', where)}\n{_string(block, 'source', where)}"
            blocks = _blocks(block.get("content"), f"{where}.content")
            texts = [_text_of(each, place) for place, each in blocks]
            return [(where, {"type": "text", "text": "\n".join((head, *texts))})]
        case "tool_reference":
            return [(where, {"type": "text", "text": _string(block, "tool_name", where)})]
        case kind:
            raise _unknown(where, kind)


def _document(where: str, block: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The text of a document that is text."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    parts: list[tuple[str, dict[str, Any]]] = [
        (where, {"type": "text", "text": _string(block, name, where)})
        for name in ("title", "context")
        if block.get(name) is not None
    ]
    if kind == "text":
        assert isinstance(source, dict)
        return [
            *parts,
            (where, {"type": "text", "text": _string(source, "data", f"{where}.source")}),
        ]
    if kind == "content":
        assert isinstance(source, dict)
        for place, each in _blocks(source.get("content"), f"{where}.source.content"):
            if each["type"] not in ("text", "image"):  # no document within a document
                raise _unknown(place, each["type"])
            parts += _parts(place, each)
        return parts
    raise invalid(
        f"{where}.source.type",
        f"is {shown(kind)}; this server reads documents of type text and content only",
    )


def _image_url(source: Any, where: str) -> str:
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "url":
        return _string(source, "url", where)
    if kind == "base64":
        media_type = _string(source, "media_type", where)
        return f"data:{media_type};base64,{_string(source, 'data', where)}"
    raise invalid(
        f"{where}.type", f"is {shown(kind)}; this server takes images as base64 or by url only"
    )


def _text_of(block: dict[str, Any], where: str) -> str:
    if block["type"] != "text":
        raise invalid(f"{where}.type", f"is {shown(block['type'])}; only text may stand here")
    return _string(block, "text", where)


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise invalid(f"{where}.{name}", "must be a string")
    return value


def _unknown(where: str, kind: str) -> InvalidRequestError:
    return invalid(f"{where}.type", f"is {shown(kind)}, which this server does not take here")
