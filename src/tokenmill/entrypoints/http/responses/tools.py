"""Tools of the Responses protocol: functions, and custom tools, whose input is any text.

Models call functions with JSON. A custom tool is shown to them as a function of one text, which is
taken out of the call.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokenmill.entrypoints.http.responses.items import CUSTOM_INPUT
from tokenmill.errors import InvalidRequestError, shown

_KINDS = ("function", "custom")


def chat_tools(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools of a chat. Raises `InvalidRequestError` that names the field."""
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(given)]


def custom_names(given: list[dict[str, Any]]) -> frozenset[str]:
    """Names of the custom ones among checked tools."""
    return frozenset(tool["name"] for tool in given if tool["type"] == "custom")


def custom_input(arguments: str) -> str:
    """The text that a call of a custom tool has; all of it where the model wrote something else."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    text = value.get(CUSTOM_INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def shown_tools(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Checked tools as a response repeats them."""
    optional = {"description": None, "parameters": None, "strict": None}
    return [{**optional, **tool} if tool["type"] == "function" else tool for tool in given]


def chat_choice(choice: Any, given: list[dict[str, Any]]) -> Any:
    """The choice of a chat. Raises `InvalidRequestError` that names the field."""
    if choice is None or isinstance(choice, str):
        return choice
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind in _KINDS:
        _check_kind(choice, given, "tool_choice")
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind == "allowed_tools":
        tools = choice.get("tools")
        for i, tool in enumerate(tools if isinstance(tools, list) else []):
            if isinstance(tool, dict):
                _check_kind(tool, given, f"tool_choice.tools[{i}]")
        allowed = {"mode": choice.get("mode"), "tools": tools}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    raise _invalid(
        "tool_choice",
        "must be none, auto or required, or an object of type function, custom or allowed_tools",
    )


def _check_kind(choice: dict[str, Any], given: list[dict[str, Any]], where: str) -> None:
    """What a choice names must be a tool of that type."""
    kind, name = choice.get("type"), choice.get("name")
    if not any(tool["type"] == kind and tool.get("name") == name for tool in given):
        raise _invalid(where, f"names {shown(name)}, which is no tool of type {shown(kind)}")


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in _KINDS:
        raise _invalid(
            f"{where}.type",
            f"is {shown(kind)}; this server runs no tools itself: send functions and custom tools",
        )
    function = {"name": tool.get("name")}
    for name in ("description", "parameters", "strict"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    if kind == "custom":
        function |= _custom(tool, where)
    return {"type": "function", "function": function}


def _custom(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """Parameters of the function that stands for a custom tool."""
    text: dict[str, Any] = {"type": "string"}
    form = tool.get("format")
    kind = "text" if form is None else form.get("type") if isinstance(form, dict) else None
    if kind == "grammar":
        assert isinstance(form, dict)
        if form.get("syntax") != "regex" or not isinstance(form.get("definition"), str):
            raise _invalid(
                f"{where}.format",
                "must be a grammar of syntax regex with a definition; others cannot be enforced"
                " within a call",
            )
        text["pattern"] = form["definition"]
    elif kind != "text":
        raise _invalid(f"{where}.format.type", f"is {shown(kind)}; it must be text or grammar")
    schema = {
        "type": "object",
        "properties": {CUSTOM_INPUT: text},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }
    return {"parameters": schema, "strict": kind == "grammar"}


def _invalid(where: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where} {what}.", parameter=where)
