"""Tool parsers by the names that `--tool-call-parser` takes, and which one a model needs."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tokenmill.entrypoints.parsers import harmony, xml_calls
from tokenmill.entrypoints.parsers.events import EventSink
from tokenmill.entrypoints.parsers.harmony import HarmonyParser
from tokenmill.entrypoints.parsers.json_calls import JsonCallParser, JsonStyle, MistralCallParser
from tokenmill.entrypoints.parsers.pythonic import PythonicCallParser
from tokenmill.entrypoints.parsers.reader import Steps, TextReader
from tokenmill.entrypoints.parsers.section_calls import (
    DEEPSEEK,
    KIMI,
    DeepSeekCallParser,
    KimiCallParser,
)
from tokenmill.entrypoints.parsers.xml_calls import CoderCallParser, GlmCallParser, Schemas
from tokenmill.errors import ConfigError, did_you_mean, shown

_ALPHANUMERIC = string.ascii_letters + string.digits


class Parser(Protocol):
    """Reads one answer and tells its sink what it finds."""

    def read(self, reader: TextReader) -> Steps[None]:
        """The whole answer; it yields where it has to wait for more."""
        ...


MakeParser = Callable[[EventSink, Schemas], Parser]
"""Takes the request's tools as well."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes its calls."""

    make: MakeParser
    marks: tuple[str, ...]
    """Texts that stand for the family, some of them special tokens of its models: those must not
    be left out of the text."""
    short_ids: bool = False
    """Ids of calls have nine letters and digits, as the family's templates want them."""

    def new_call_id(self) -> str:
        """A name for a call; no other call has it."""
        if self.short_ids:
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def _json(style: JsonStyle) -> MakeParser:
    return lambda sink, tools: JsonCallParser(sink, style, tools.keys())


HERMES = JsonStyle("<tool_call>", "</tool_call>")
LLAMA = JsonStyle("<|python_tag|>", bare=True)
MISTRAL = JsonStyle("[TOOL_CALLS]")
GRANITE = JsonStyle("<|tool_call|>", "<|/tool_call|>")
JAMBA = JsonStyle("<tool_calls>", "</tool_calls>")
PHI = JsonStyle("functools")
INTERNLM = JsonStyle("<|action_start|><|plugin|>", "<|action_end|>")
_DEEPSEEK = ToolFormat(lambda sink, tools: DeepSeekCallParser(sink), DEEPSEEK.all)
_PYTHONIC = ToolFormat(
    lambda sink, tools: PythonicCallParser(sink, tools.keys()),
    ("<|python_start|>", "<|python_end|>"),
)
_CODER = ToolFormat(CoderCallParser, (xml_calls.CALL_BEGIN, xml_calls.CALL_END))
_GLM = ToolFormat(
    GlmCallParser,
    (
        xml_calls.CALL_BEGIN,
        xml_calls.CALL_END,
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ),
)

TOOL_FORMATS: dict[str, ToolFormat] = {
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "glm45": _GLM,
    "granite": ToolFormat(_json(GRANITE), ("<|tool_call|>", "<|/tool_call|>")),
    "hermes": ToolFormat(_json(HERMES), ("<tool_call>", "</tool_call>")),
    "internlm": ToolFormat(_json(INTERNLM), ("<|action_start|>", "<|plugin|>", "<|action_end|>")),
    "jamba": ToolFormat(_json(JAMBA), ("<tool_calls>", "</tool_calls>")),
    "kimi_k2": ToolFormat(lambda sink, tools: KimiCallParser(sink), KIMI.all),
    "llama3_json": ToolFormat(_json(LLAMA), ("<|python_tag|>",)),
    "llama4_json": ToolFormat(_json(LLAMA), ("<|python_tag|>",)),
    "llama4_pythonic": _PYTHONIC,
    "mistral": ToolFormat(
        lambda sink, tools: MistralCallParser(sink, MISTRAL, tools.keys()),
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        short_ids=True,
    ),
    "openai": ToolFormat(
        lambda sink, tools: HarmonyParser(sink),
        (
            harmony.START,
            harmony.CHANNEL,
            harmony.MESSAGE,
            harmony.END,
            harmony.CALL,
            harmony.RETURN,
            "<|constrain|>",
        ),
    ),
    "phi4_mini_json": ToolFormat(_json(PHI), ("functools",)),
    "pythonic": _PYTHONIC,
    "qwen3_coder": _CODER,
    "qwen3_xml": _CODER,
}
"""Value of `tool_call_parser` to its format."""

FORCED = "json"
"""Format of models without one: only for calls that a grammar forces."""
FORCED_FORMAT = ToolFormat(_json(JsonStyle("<|tool_calls|>", bare=True)), ())

_RECOGNISED: dict[str, tuple[str, ...]] = {
    "openai": ("<|channel|>", "<|message|>", "to=functions"),
    "deepseek_v3": (DEEPSEEK.call_begin, "```json"),
    "deepseek_v31": (DEEPSEEK.call_begin,),
    "kimi_k2": (KIMI.call_begin, KIMI.separator),
    "mistral": ("[TOOL_CALLS]",),
    "llama4_pythonic": ("<|python_start|>",),
    "llama3_json": ("ipython", '"parameters"'),
    "granite": ("<|tool_call|>",),
    "qwen3_coder": ("<tool_call>", xml_calls.FUNCTION_BEGIN, "<parameter="),
    "glm45": ("<tool_call>", "<arg_key>", "<arg_value>"),
    "jamba": ("<tool_calls>", '"name"', '"arguments"'),
    "hermes": ("<tool_call>", '"name"', '"arguments"'),
}
"""Families by what their chat templates contain, the more special ones first."""
_OTHER_FORMATS = ("<invoke", "<tool_sep>")
"""In templates whose calls only look like those of a family above."""


def check_tool_parser(name: str) -> str:
    """The name, if it is one. Raises `ConfigError` for others."""
    if name not in TOOL_FORMATS:
        raise ConfigError(
            f"tool_call_parser={shown(name)} is not one of: {', '.join(TOOL_FORMATS)}."
            f"{did_you_mean(name, TOOL_FORMATS)}"
        )
    return name


def recognise_tool_parser(template: str) -> str | None:
    """The family whose calls a chat template describes; None if it is none, or not certain."""
    bare_function = xml_calls.FUNCTION_BEGIN in template and "<parameter=" not in template
    if bare_function or any(other in template for other in _OTHER_FORMATS):
        return None
    flat = template.replace('\\"', '"').replace("'", '"')
    for name, words in _RECOGNISED.items():
        if all(word in flat or word in template for word in words):
            return name
    return None
