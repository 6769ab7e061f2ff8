"""Tools of a chat: what is asked for, what a model may write, and how its answer is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tokenmill.entrypoints.http.errors import blamed_on_fields
from tokenmill.entrypoints.http.progress import ReasoningTally
from tokenmill.entrypoints.http.prompts import check_num_values
from tokenmill.entrypoints.http.protocol import ChatCompletionRequest
from tokenmill.entrypoints.http.response_format import Form
from tokenmill.entrypoints.http.state import ServerState
from tokenmill.entrypoints.parsers.answer import AnswerParser
from tokenmill.entrypoints.parsers.custom_calls import CustomCallParser, custom_parameters
from tokenmill.entrypoints.parsers.events import Event, ReasoningPiece
from tokenmill.entrypoints.parsers.grammar import (
    calls_or_json,
    forced_calls,
    lazy_calls,
    style_of,
)
from tokenmill.entrypoints.parsers.grammar_writer import Tool
from tokenmill.entrypoints.parsers.reasoning import open_after_text
from tokenmill.entrypoints.parsers.registry import (
    FORCED,
    FORCED_FORMAT,
    TOOL_FORMATS,
    ToolFormat,
)
from tokenmill.errors import InvalidRequestError, invalid, shown
from tokenmill.structured_outputs import StructuredOutputsParams
from tokenmill.tokenizer.reasoning import REASONING_FORMATS

MAX_TOOLS = 1_024
MAX_NAME_LENGTH = 256
MODES = ("none", "auto", "required")
_TOOL_NAME = re.compile(rf"[A-Za-z0-9_.:/-]{{1,{MAX_NAME_LENGTH}}}")
"""What all families of models can write without quotes."""
NAMED = "named"
"""The mode of a choice that names a function."""
_NAMES = {"structured_outputs": "tools", "structured_outputs.grammar": "tools"}


class AnswerPlan:
    """What one chat asks of its answers.

    Raises `InvalidRequestError` when made, for tools or a choice that cannot be.
    """

    def __init__(self, state: ServerState, fields: ChatCompletionRequest) -> None:
        settings = state.answers
        self._state = state
        self.names: Mapping[str, str] = {}
        """The engine's parameters to the fields of the request that they come from."""
        self._tells_reasoning = fields.include_reasoning is not False
        self.reasoning_fields = settings.reasoning_fields
        self._reasoning = (
            None
            if settings.reasoning_parser is None
            else REASONING_FORMATS[settings.reasoning_parser]
        )
        self._is_open: bool | None = None
        check_num_values({"tools": fields.tools})
        tools = _read_tools(fields.tools)
        self.custom = frozenset(tool.name for tool in tools if tool.is_custom)
        """Names of tools that take a text."""
        _show_as_functions(fields, tools)
        self._mode, self._tools = _read_choice(fields.tool_choice, tools)
        self._parallel = fields.parallel_tool_calls is not False and self._mode != NAMED
        if self._mode != NAMED:
            _show_only(fields, self._tools)
        self._style, self._format = self._family()
        self._schemas = {tool.name: tool.parameters for tool in self._tools}

    @property
    def takes_apart(self) -> bool:
        """Whether an answer may be anything but plain text."""
        return self._format is not None or self._reasoning is not None

    def params(self, form: Form | None) -> dict[str, Any]:
        """Sampling parameters that follow from the tools: marks that are special tokens stay in the
        text, and calls that are required are the only thing that a grammar allows.

        `form` is what the request wants of an answer that is no call, if anything. Raises
        `InvalidRequestError` if calls and answers of that form cannot be told apart.
        """
        more: dict[str, Any] = {}
        marks = () if self._format is None else self._format.marks
        if self._reasoning is not None:
            marks = (*marks, *self._reasoning.tokens)
        if any(self._special_id(mark) is not None for mark in marks):
            more["skip_special_tokens"] = False
        schema = None if form is None else form.schema
        if form is not None and self._format is not None and self._mode == "auto":
            _check_beside_calls(form)
        grammar = self._grammar(schema)
        if grammar is not None:
            self.names = _NAMES
            with blamed_on_fields(_NAMES):
                more["structured_outputs"] = StructuredOutputsParams(grammar=grammar)
        elif form is not None:
            more["structured_outputs"] = form.params
        return more

    def begin(self, prompt: str, fields: ChatCompletionRequest) -> None:
        """The prompt is known, and with it whether answers begin within the reasoning."""
        form = self._reasoning
        if form is None:
            return
        self._is_open = open_after_text(form, prompt)
        last = fields.messages[-1]
        text = last.get("content")
        if fields.continue_final_message and isinstance(text, str):
            # The answer continues this text, whatever it has opened.
            self._is_open = text.rfind(form.start) > text.rfind(form.end)

    def tally(self) -> ReasoningTally | None:
        """Counts the tokens of reasoning; None where there is no reasoning."""
        markers = self._state.answers.markers
        return None if markers is None else ReasoningTally(markers, self._is_open)

    def parser(self) -> AnswerParser:
        """A parser for one answer."""
        options: dict[str, Any] = {
            "tools": self._format,
            "schemas": self._schemas,
            "max_calls": None if self._parallel else 1,
            "reasoning": self._reasoning,
            "is_open": self._is_open,
        }
        return CustomCallParser(self.custom, **options) if self.custom else AnswerParser(**options)

    def shown(self, events: list[Event]) -> list[Event]:
        """Those that the client wants."""
        if self._tells_reasoning:
            return events
        return [event for event in events if not isinstance(event, ReasoningPiece)]

    def finish_reason(self, reason: str | None, num_calls: int) -> str | None:
        """As clients expect it: calls that the model chose are a reason of their own."""
        if reason == "stop" and num_calls and self._mode != NAMED:
            return "tool_calls"
        return reason

    def _family(self) -> tuple[str, ToolFormat | None]:
        """Whose calls are written and read; no format where there are none."""
        settings = self._state.answers
        if not self._tools or self._mode == "none":
            return FORCED, None
        if self._mode == "auto" and not settings.auto_tools:
            raise InvalidRequestError(
                f"tools with tool_choice='auto' are not supported by this server:"
                f" {_why_no_auto(settings.tool_parser)}. Set tool_choice to 'required' or to one of"
                f" the tools to force a call, or to 'none' to show tools and get text.",
                parameter="tools",
            )
        if settings.tool_parser is None:
            return FORCED, FORCED_FORMAT
        style = style_of(settings.tool_parser, self._state.tokenizer.token_to_id)
        return style, TOOL_FORMATS[settings.tool_parser]

    def _grammar(self, response_schema: Mapping[str, Any] | None) -> str | None:
        if self._format is None:
            return None
        if self._mode != "auto":
            return forced_calls(self._tools, self._style, self._special_id, parallel=self._parallel)
        if response_schema is not None:
            return calls_or_json(
                self._tools, self._style, self._special_id, response_schema, parallel=self._parallel
            )
        if not any(tool.strict for tool in self._tools):
            return None
        grammar = lazy_calls(self._tools, self._style, self._special_id)
        if grammar is None:
            raise InvalidRequestError(
                f"tools with strict=true cannot be enforced while tool_choice is 'auto': calls of"
                f" this model's family ({self._style}) begin with no mark of their own. Set"
                f" tool_choice='required', or leave strict out.",
                parameter="tools",
            )
        return grammar

    def _special_id(self, text: str) -> int | None:
        tokenizer = self._state.tokenizer
        token = tokenizer.token_to_id(text)
        return token if token in tokenizer.special_token_ids else None


def _check_beside_calls(form: Form) -> None:
    """Raise `InvalidRequestError` for a form that cannot stand beside calls."""
    params = form.params
    if form.schema is None:
        raise InvalidRequestError(
            f"structured_outputs.{params.kind} and tools with tool_choice='auto' exclude each"
            f" other: only a JSON schema can be told from a call. Set tool_choice, or ask for"
            f" json_schema.",
            parameter="tools",
        )
    for name in ("disable_any_whitespace", "whitespace_pattern", "disable_additional_properties"):
        if getattr(params, name):
            raise InvalidRequestError(
                f"structured_outputs.{name} and tools with tool_choice='auto' exclude each other;"
                f" leave it out.",
                parameter=f"structured_outputs.{name}",
            )


def _why_no_auto(tool_parser: str | None) -> str:
    if tool_parser is not None:
        return "it was started with --no-enable-auto-tool-choice"
    return "it does not know how this model writes calls; its operator can set --tool-call-parser"


def _show_as_functions(fields: ChatCompletionRequest, tools: list[Tool]) -> None:
    """Custom tools are functions of a text in the prompt."""
    if any(tool.is_custom for tool in tools):
        assert fields.tools is not None
        fields.tools = [
            _as_function(given["custom"], tool) if tool.is_custom else given
            for given, tool in zip(fields.tools, tools, strict=True)
        ]


def _as_function(custom: dict[str, Any], tool: Tool) -> dict[str, Any]:
    described = {"description": custom["description"]} if custom.get("description") else {}
    function = {"name": tool.name, **described, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _show_only(fields: ChatCompletionRequest, tools: list[Tool]) -> None:
    """Leave in the request, and so in the prompt, what the choice allows."""
    if fields.tools is not None and len(tools) < len(fields.tools):
        names = {tool.name for tool in tools}
        fields.tools = [each for each in fields.tools if each["function"]["name"] in names]


def _read_tools(given: list[dict[str, Any]] | None) -> list[Tool]:
    if not given:
        return []
    if len(given) > MAX_TOOLS:
        raise invalid("tools", f"holds {len(given)} tools; the limit is {MAX_TOOLS}")
    tools = [_read_tool(each, f"tools[{i}]") for i, each in enumerate(given)]
    names: set[str] = set()
    for tool in tools:
        if tool.name in names:
            raise invalid(tool.place, f"has the name of another tool, {shown(tool.name)}")
        names.add(tool.name)
    return tools


def _read_tool(given: dict[str, Any], place: str) -> Tool:
    kind = given.get("type", "function")
    if kind not in ("function", "custom"):
        raise invalid(
            f"{place}.type", f"is {shown(kind)}; this server knows functions and custom tools"
        )
    function = given.get(kind)
    if not isinstance(function, dict):
        raise invalid(f"{place}.{kind}", "must be an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or _TOOL_NAME.fullmatch(name) is None:
        raise invalid(
            f"{place}.{kind}.name",
            f"must be a string of 1 to {MAX_NAME_LENGTH} letters, digits and _ - . : /",
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise invalid(f"{place}.{kind}.description", "must be a string")
    if kind == "custom":
        pattern = _pattern(function.get("format"), f"{place}.custom.format")
        schema, is_strict = custom_parameters(pattern), pattern is not None
        return Tool(name, schema, is_strict, place, is_custom=True)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(f"{place}.function.parameters", "must be an object, a JSON schema")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise invalid(f"{place}.function.strict", "must be true or false")
    return Tool(name, parameters, bool(strict), place)


def _pattern(form: Any, place: str) -> str | None:
    """The regular expression that a custom tool's input must match, if there is one."""
    kind = "text" if form is None else form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return None
    if kind != "grammar":
        raise invalid(f"{place}.type", f"is {shown(kind)}; it must be text or grammar")
    grammar = form.get("grammar")
    definition = grammar.get("definition") if isinstance(grammar, dict) else None
    if not isinstance(definition, str) or grammar.get("syntax") != "regex":
        raise invalid(
            f"{place}.grammar",
            "must have the syntax regex and a definition; others cannot be enforced within a call",
        )
    return definition


def _read_choice(choice: Any, tools: list[Tool]) -> tuple[str, list[Tool]]:
    """(mode, the tools that may be called)"""
    if choice is None:
        return ("auto" if tools else "none"), tools
    if isinstance(choice, str):
        if choice not in MODES:
            raise invalid(
                "tool_choice",
                f"is {shown(choice)}; it must be one of {', '.join(MODES)}, or an object",
            )
        if choice == "required" and not tools:
            raise invalid("tool_choice", "is 'required', but there are no tools")
        return choice, tools
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind in ("function", "custom"):
        return NAMED, [_named(_name_of(choice), tools)]
    if kind == "allowed_tools":
        return _allowed(choice.get("allowed_tools"), tools)
    raise invalid(
        "tool_choice", "must be a mode, or an object of type 'function' or 'allowed_tools'"
    )


def _name_of(choice: Any) -> Any:
    """The name in `{"type", type: {"name"}}`, or in its short form without the inner object."""
    if not isinstance(choice, dict):
        return None
    inner = choice.get("custom" if choice.get("type") == "custom" else "function", choice)
    return inner.get("name") if isinstance(inner, dict) else None


def _named(name: Any, tools: list[Tool]) -> Tool:
    for tool in tools:
        if tool.name == name:
            return tool
    raise invalid("tool_choice", f"names {shown(name)}, which is none of the tools")


def _allowed(allowed: Any, tools: list[Tool]) -> tuple[str, list[Tool]]:
    mode = allowed.get("mode") if isinstance(allowed, dict) else None
    listed = allowed.get("tools") if isinstance(allowed, dict) else None
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        raise invalid(
            "tool_choice.allowed_tools", "must have a mode, 'auto' or 'required', and tools"
        )
    wanted = {_named(_name_of(each), tools).name for each in listed}
    return mode, [tool for tool in tools if tool.name in wanted]
