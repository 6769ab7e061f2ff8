"""Messages as clients send them, checked and brought into one form.

What means the same reads the same afterwards: `content` has the form that the template takes, a
string mostly (`contents.py`), tool arguments are always objects, absent tool calls are always
absent, reasoning has all its names. Templates that need text or null instead get those
(`call_forms.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill.entrypoints.chat.call_forms import call_forms
from tokenmill.entrypoints.chat.contents import Contents
from tokenmill.entrypoints.chat.system_turns import placed_system_messages
from tokenmill.entrypoints.chat.templates import ChatTemplate
from tokenmill.entrypoints.parsers.custom_calls import CUSTOM_INPUT
from tokenmill.errors import invalid

Message = Mapping[str, Any]
"""`role`, `content`, and for some roles `tool_calls`, `tool_call_id`, `name`, ..."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_REASONING_NAMES = ("reasoning_content", "reasoning")
_MAX_DEPTH = 64


def normalise_messages(
    messages: Any, template: ChatTemplate, contents: Contents | None = None
) -> list[dict[str, Any]]:
    """A copy of the conversation in its one form, as plain data; `contents` reads those of the
    messages, and takes text alone unless it is given.

    The `developer` role becomes `system` if the template does not know it. Other roles than the
    usual ones are taken if the template names them. System messages that the template would refuse
    or forget become part of others (`system_turns.py`).

    Raises `InvalidRequestError` that names the field, such as `messages[2].content`.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise invalid("messages", "must be a list of messages, each with role and content")
    if not messages:
        raise invalid("messages", "is empty; it needs at least one message")
    contents = contents or Contents(template, None)
    normal = [
        _message(message, f"messages[{i}]", template, contents)
        for i, message in enumerate(messages)
    ]
    return placed_system_messages(normal, template)


def _message(
    message: Any, where: str, template: ChatTemplate, contents: Contents
) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise invalid(where, "must be an object with role and content")
    known = ("role", "content", "tool_calls")
    normal = {
        key: plain(value, f"{where}.{key}")
        for key, value in message.items()
        if key not in known and value is not None
    }
    role = _role(message.get("role"), f"{where}.role", template)
    calls = _tool_calls(message.get("tool_calls"), f"{where}.tool_calls")
    if calls and role != "assistant":
        raise invalid(f"{where}.tool_calls", f"belongs to the assistant, not to role {role!r}")
    content = message.get("content")
    if content is None and role != "assistant":
        raise invalid(f"{where}.content", "is missing; it must be a string or a list of parts")
    normal = {"role": role, "content": contents.read(content, f"{where}.content"), **normal}
    normal |= _reasoning(normal, where, template)
    return _with_calls(normal, calls, template) if calls else normal


def _with_calls(
    message: dict[str, Any], calls: list[dict[str, Any]], template: ChatTemplate
) -> dict[str, Any]:
    """A message and its calls in the form that the template takes."""
    forms = call_forms(template.source)
    if forms.text_arguments:
        for call in calls:
            arguments = call["function"]["arguments"]
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    if forms.null_content and not message["content"]:
        message["content"] = None
    return {**message, "tool_calls": calls}


def _role(role: Any, where: str, template: ChatTemplate) -> str:
    if role is None:
        raise invalid(where, f"is missing; it must be one of {', '.join(ROLES)}")
    if not isinstance(role, str) or not (role in ROLES or template.mentions(role)):
        raise invalid(where, f"is {str(role)[:40]!r}; it must be one of {', '.join(ROLES)}")
    return "system" if role == "developer" and not template.mentions(role) else role


def _reasoning(message: Mapping[str, Any], where: str, template: ChatTemplate) -> dict[str, str]:
    """What the assistant thought, under every name that clients and templates have for it."""
    given = [name for name in _REASONING_NAMES if message.get(name) is not None]
    for name in given:
        if not isinstance(message[name], str):
            raise invalid(f"{where}.{name}", "must be a string")
    if not given or message["role"] != "assistant":
        return {}
    names = [*_REASONING_NAMES]
    if ".thinking" in template.source:
        names.append("thinking")
    return dict.fromkeys(names, message[given[0]])


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if calls is None:
        return []
    if isinstance(calls, str | Mapping) or not isinstance(calls, Sequence):
        raise invalid(where, "must be a list")
    return [_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if isinstance(call, Mapping) and call.get("type") == "custom":
        call, function = _as_function_call(call, f"{where}.custom")
    if not isinstance(function, Mapping):
        raise invalid(f"{where}.function", "must be an object with name and arguments")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise invalid(f"{where}.function.name", "must be a string that is not empty")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    extra = {key: value for key, value in call.items() if key != "function" and value is not None}
    return {
        "type": "function",
        **plain(extra, where),
        "function": {"name": function["name"], "arguments": arguments},
    }


def _as_function_call(call: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], Any]:
    """(the call of a custom tool without what is special about it, its function)"""
    custom = call.get("custom")
    if not isinstance(custom, Mapping) or not isinstance(custom.get(CUSTOM_INPUT), str):
        raise invalid(where, "must be an object with name and input")
    plain_call = {key: value for key, value in call.items() if key not in ("type", "custom")}
    arguments = {CUSTOM_INPUT: custom[CUSTOM_INPUT]}
    return plain_call, {"name": custom.get("name"), "arguments": arguments}


def _arguments(arguments: Any, where: str) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise invalid(where, f"is no JSON: {error}") from error
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise invalid(where, "must be an object, or one written as JSON")
    normal: dict[str, Any] = plain(arguments, where)
    return normal


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy made of nothing but dict, list, str, int, float, bool and None.

    Templates get nothing else: any other object brings methods that a sandbox cannot judge. Raises
    `InvalidRequestError` for such objects, and for data nested too deep.
    """
    if depth > _MAX_DEPTH:
        raise invalid(where, f"is nested deeper than {_MAX_DEPTH} levels")
    if value is None or type(value) in (str, int, float, bool):
        return value
    # Subclasses, such as enums, may bring methods of their own.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise invalid(where, f"is of type {type(value).__name__}, which is no JSON value")
