"""Grammars for calls: what a model may write where a call is required, or once one has begun.

They are Lark in the dialect of llguidance: `%json {...}` is a JSON schema, `<[7]>` a special token.
Each family's calls are written as its models were trained to write them, so that its parser reads
them back; arguments satisfy the tool's schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenmill.entrypoints.parsers import harmony
from tokenmill.entrypoints.parsers.grammar_writer import (
    ANY_OBJECT,
    ANY_TEXT,
    CallStyle,
    GrammarWriter,
    Keywords,
    Mark,
    Parameters,
    Part,
    Pattern,
    Schema,
    SpecialId,
    Tool,
)
from tokenmill.entrypoints.parsers.section_calls import DEEPSEEK, KIMI
from tokenmill.entrypoints.parsers.xml_calls import CODER_MARKS, GLM_MARKS


def _object(key: str) -> Callable[[Tool, Mapping[str, Any]], list[Part]]:
    def call(tool: Tool, schema: Mapping[str, Any]) -> list[Part]:
        # In pieces as JSON has them: where a document may stand as well, both begin alike.
        head = ["{", '"name"', ": ", json.dumps(tool.name), ", ", f'"{key}"', ": "]
        return [*head, Schema(schema, tool.place), "}"]

    return call


def _hermes(tool: Tool, schema: Mapping[str, Any]) -> list[Part]:
    inner = _object("arguments")(tool, schema)
    return [Mark("<tool_call>"), "\n", *inner, "\n", Mark("</tool_call>")]


def _internlm(tool: Tool, schema: Mapping[str, Any]) -> list[Part]:
    inner = _object("parameters")(tool, schema)
    return [Mark("<|action_start|>"), Mark("<|plugin|>"), "\n", *inner, Mark("<|action_end|>")]


def _deepseek_v3(tool: Tool, schema: Mapping[str, Any]) -> list[Part]:
    head: list[Part] = [Mark(DEEPSEEK.call_begin), "function", Mark(DEEPSEEK.separator)]
    fence = f"{tool.name}\n```json\n"
    return [*head, fence, Schema(schema, tool.place), "\n```", Mark(DEEPSEEK.call_end)]


def _deepseek_v31(tool: Tool, schema: Mapping[str, Any]) -> list[Part]:
    head: list[Part] = [Mark(DEEPSEEK.call_begin), tool.name, Mark(DEEPSEEK.separator)]
    return [*head, Schema(schema, tool.place), Mark(DEEPSEEK.call_end)]


def _kimi(tool: Tool, schema: Mapping[str, Any]) -> list[Part]:
    number = Pattern("[0-9]|[1-9][0-9]")
    head: list[Part] = [Mark(KIMI.call_begin), f"functions.{tool.name}:", number]
    return [*head, Mark(KIMI.separator), Schema(schema, tool.place), Mark(KIMI.call_end)]


def _harmony(tool: Tool, schema: Mapping[str, Any]) -> list[Part]:
    return [
        Mark(harmony.CHANNEL),
        f"commentary to=functions.{tool.name} ",
        Mark("<|constrain|>"),
        "json",
        Mark(harmony.MESSAGE),
        Schema(schema, tool.place),
    ]


def _mistral_args(tool: Tool, schema: Mapping[str, Any]) -> list[Part]:
    return [Mark("[TOOL_CALLS]"), tool.name, Mark("[ARGS]"), Schema(schema, tool.place)]


def _pythonic(tool: Tool, schema: Mapping[str, Any]) -> list[Part]:
    return [f"{tool.name}(", Keywords(tool, schema), ")"]


def _coder(tool: Tool, schema: Mapping[str, Any]) -> list[Part]:
    head: list[Part] = [Mark("<tool_call>"), f"\n<function={tool.name}>\n"]
    inner = Parameters(tool, schema, CODER_MARKS)
    return [*head, inner, "</function>\n", Mark("</tool_call>")]


def _glm(tool: Tool, schema: Mapping[str, Any]) -> list[Part]:
    head: list[Part] = [Mark("<tool_call>"), f"{tool.name}\n"]
    return [*head, Parameters(tool, schema, GLM_MARKS), Mark("</tool_call>")]


_DEEPSEEK_MARKS = ((Mark(DEEPSEEK.calls_begin),), (Mark(DEEPSEEK.calls_end),))
MISTRAL_ARGS = "mistral_args"
"""How those of Mistral's models write calls whose vocabulary has a token for it."""
STYLES: dict[str, CallStyle] = {
    "deepseek_v3": CallStyle(
        _deepseek_v3, _DEEPSEEK_MARKS[0], ("\n",), _DEEPSEEK_MARKS[1], DEEPSEEK.calls_begin
    ),
    "deepseek_v31": CallStyle(
        _deepseek_v31, _DEEPSEEK_MARKS[0], (), _DEEPSEEK_MARKS[1], DEEPSEEK.calls_begin
    ),
    "glm45": CallStyle(_glm, between=("\n",), trigger="<tool_call>"),
    "granite": CallStyle(
        _object("arguments"), (Mark("<|tool_call|>"), "["), (", ",), ("]",), "<|tool_call|>"
    ),
    "hermes": CallStyle(_hermes, between=("\n",), trigger="<tool_call>"),
    "internlm": CallStyle(_internlm, trigger="<|action_start|>"),
    "jamba": CallStyle(
        _object("arguments"),
        (Mark("<tool_calls>"), "["),
        (", ",),
        ("]", Mark("</tool_calls>")),
        "<tool_calls>",
    ),
    "json": CallStyle(_object("parameters"), ("[",), (", ",), ("]",)),
    "kimi_k2": CallStyle(
        _kimi, (Mark(KIMI.calls_begin),), (), (Mark(KIMI.calls_end),), KIMI.calls_begin
    ),
    "llama3_json": CallStyle(_object("parameters"), between=("; ",)),
    "llama4_json": CallStyle(_object("parameters"), between=("; ",)),
    "llama4_pythonic": CallStyle(_pythonic, ("[",), (", ",), ("]",)),
    "mistral": CallStyle(
        _object("arguments"), (Mark("[TOOL_CALLS]"), "["), (", ",), ("]",), "[TOOL_CALLS]"
    ),
    MISTRAL_ARGS: CallStyle(_mistral_args, trigger="[TOOL_CALLS]"),
    "openai": CallStyle(_harmony),
    "phi4_mini_json": CallStyle(
        _object("arguments"), (Mark("functools"), "["), (", ",), ("]",), "functools"
    ),
    "pythonic": CallStyle(_pythonic, ("[",), (", ",), ("]",)),
    "qwen3_coder": CallStyle(_coder, between=("\n",), trigger="<tool_call>"),
    "qwen3_xml": CallStyle(_coder, between=("\n",), trigger="<tool_call>"),
}
"""By the names of parsers; `json` is for models that have none."""


def style_of(parser: str, token_id: SpecialId) -> str:
    """The style of a parser's family. `token_id` gives the id of any token."""
    return MISTRAL_ARGS if parser == "mistral" and token_id("[ARGS]") is not None else parser


def forced_calls(
    tools: Sequence[Tool], style: str, special_id: SpecialId, *, parallel: bool = True
) -> str:
    """A grammar of nothing but calls of these tools: one, or with `parallel` any number.

    Raises `InvalidRequestError` for a tool that the family's calls cannot express.
    """
    writer = GrammarWriter(special_id)
    writer.rule("start", writer.calls(tools, STYLES[style], parallel=parallel))
    return writer.text()


def calls_or_json(
    tools: Sequence[Tool],
    style: str,
    special_id: SpecialId,
    schema: Mapping[str, Any],
    *,
    parallel: bool = True,
) -> str:
    """A grammar of either calls or one JSON value of a schema. Raises as `forced_calls` does."""
    writer = GrammarWriter(special_id)
    calls = writer.calls(tools, STYLES[style], parallel=parallel)
    writer.rule("start", f"{calls} | {writer.parts([Schema(schema, 'response_format')])}")
    return writer.text()


def lazy_calls(tools: Sequence[Tool], style: str, special_id: SpecialId) -> str | None:
    """A grammar of any text in which whatever begins like a call is one, with the arguments of a
    strict tool as its schema says. None for a family whose calls begin with no mark of their own.
    """
    form = STYLES[style]
    trigger = form.trigger
    if trigger is None:
        return None
    writer = GrammarWriter(special_id)
    loose = [tool if tool.strict else _loosened(tool) for tool in tools]
    calls = writer.calls(loose, form, parallel=True, skip=trigger)
    token = special_id(trigger)
    if token is None:
        writer.rule("opening[lazy]", f"TEXT {json.dumps(trigger)}")
    else:
        writer.rule("opening", f"TEXT <[{token}]>")
    writer.rule("start", f"(opening {calls})* TEXT")
    writer.rule("TEXT", ANY_TEXT)
    return writer.text()


def _loosened(tool: Tool) -> Tool:
    """A tool that is not strict: its arguments are an object, and that is all."""
    return Tool(tool.name, ANY_OBJECT, place=tool.place)
