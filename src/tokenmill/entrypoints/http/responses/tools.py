"""Tools and choices of the Responses protocol as those of a chat."""

from __future__ import annotations

from typing import Any

from tokenmill.errors import InvalidRequestError, shown

_FIELDS = {
    "function": ("name", "description", "parameters", "strict"),
    "custom": ("name", "description", "format"),
}
"""Type of a tool to what a chat has in an object of that name."""


def chat_tools(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools of a chat. Raises `InvalidRequestError` that names the field."""
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(given)]


def shown_tools(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Checked tools as a response repeats them."""
    optional = {"description": None, "parameters": None, "strict": None}
    return [{**optional, **tool} if tool["type"] == "function" else tool for tool in given]


def chat_choice(choice: Any, given: list[dict[str, Any]]) -> Any:
    """The choice of a chat. Raises `InvalidRequestError` that names the field."""
    if choice is None or isinstance(choice, str):
        return choice
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(kind, str) and kind in _FIELDS:
        _check_kind(choice, given, "tool_choice")
        return choice  # a chat takes the short form, too
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
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise _invalid(
            f"{where}.type",
            f"is {shown(kind)}; this server runs no tools itself: send functions and custom tools",
        )
    inner = {name: tool[name] for name in _FIELDS[kind] if tool.get(name) is not None}
    form = inner.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar":
        inner["format"] = {"type": "grammar", "grammar": form}
    return {"type": kind, kind: inner}


def _invalid(where: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where} {what}.", parameter=where)
