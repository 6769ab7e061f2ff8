"""Tools and choices of the Responses protocol as those of a chat."""

from __future__ import annotations

from typing import Any

from tokenmill.errors import invalid, shown

_FIELDS = {
    "function": ("name", "description", "parameters", "strict"),
    "custom": ("name", "description", "format"),
}
"""Type of a tool to what a chat has in an object of that name."""


class ChatTools:
    """The tools of a request as those of a chat. Raises `InvalidRequestError` when made.

    Those of a namespace are tools like the others, whose names have the namespace in front.
    """

    def __init__(self, given: list[dict[str, Any]]) -> None:
        self.tools: list[dict[str, Any]] = []
        self.places: dict[str, str] = {}
        """Paths in the chat to paths in the request."""
        self.namespaces: dict[str, tuple[str, str]] = {}
        """Names in the chat to (namespace, name)."""
        for i, tool in enumerate(given):
            if tool.get("type") == "namespace":
                self._add_namespace(tool, f"tools[{i}]")
            else:
                self._add(tool, f"tools[{i}]")

    def _add_namespace(self, namespace: dict[str, Any], where: str) -> None:
        name, tools = namespace.get("name"), namespace.get("tools")
        if not isinstance(name, str) or not isinstance(tools, list):
            raise invalid(where, "must have a name and a list of tools")
        for i, tool in enumerate(tools):
            place = f"{where}.tools[{i}]"
            if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
                raise invalid(place, "must be an object with a name")
            whole = namespaced(name, tool["name"])
            self.namespaces[whole] = name, tool["name"]
            self._add({**tool, "name": whole}, place)

    def _add(self, tool: dict[str, Any], where: str) -> None:
        kind = tool.get("type")
        if not isinstance(kind, str) or kind not in _FIELDS:
            raise invalid(
                f"{where}.type",
                f"is {shown(kind)}; this server runs no tools itself: send functions and custom"
                f" tools",
            )
        inner = {name: tool[name] for name in _FIELDS[kind] if tool.get(name) is not None}
        form = inner.get("format")
        if isinstance(form, dict) and form.get("type") == "grammar":
            inner["format"] = {"type": "grammar", "grammar": form}
        place = f"tools[{len(self.tools)}]"
        self.places[place] = self.places[f"{place}.{kind}"] = where
        self.places[f"{place}.custom.format.grammar"] = f"{where}.format"
        self.tools.append({"type": kind, kind: inner})


def namespaced(namespace: str, name: str) -> str:
    """The name of a namespace's tool in a chat."""
    return f"{namespace}.{name}"


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
    raise invalid(
        "tool_choice",
        "must be none, auto or required, or an object of type function, custom or allowed_tools",
    )


def _check_kind(choice: dict[str, Any], given: list[dict[str, Any]], where: str) -> None:
    """What a choice names must be a tool of that type."""
    kind, name = choice.get("type"), choice.get("name")
    if not any(tool["type"] == kind and tool.get("name") == name for tool in given):
        raise invalid(where, f"names {shown(name)}, which is no tool of type {shown(kind)}")
