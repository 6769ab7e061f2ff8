"""How a server takes its model's answers apart: settled once, from flags and the model's files."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec

from tokenmill.config.serve_args import NO_PARSER, ServeArgs
from tokenmill.entrypoints.chat.render import TOOL_TEMPLATE
from tokenmill.entrypoints.parsers import harmony
from tokenmill.entrypoints.parsers.registry import (
    TOOL_FORMATS,
    check_tool_parser,
    recognise_tool_parser,
)
from tokenmill.errors import ConfigError
from tokenmill.tokenizer.reasoning import (
    ReasoningMarkers,
    check_reasoning_parser,
    reasoning_format,
    reasoning_markers,
    resolve_reasoning_parser,
)
from tokenmill.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_REASONING_FIELDS = {
    "both": ("reasoning_content", "reasoning"),
    "reasoning_content": ("reasoning_content",),
    "reasoning": ("reasoning",),
}


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """What applies to all answers of a server."""

    tool_parser: str | None
    """Name of the family whose calls are read; None if it is not known."""
    auto_tools: bool
    """Whether models may choose to call."""
    reasoning_parser: str | None
    """Name of the family whose reasoning is split off; None for no reasoning."""
    markers: ReasoningMarkers | None
    """Marks as token ids, between which tokens of reasoning are counted."""
    reasoning_fields: tuple[str, ...]
    """Names under which messages have the reasoning."""


def check_answer_settings(args: ServeArgs, reasoning_setting: str) -> None:
    """Raise `ConfigError` for names that nobody knows, before a model is loaded."""
    if args.tool_call_parser not in (None, NO_PARSER):
        check_tool_parser(args.tool_call_parser)
    check_reasoning_parser(reasoning_setting)


def answer_settings(
    args: ServeArgs, reasoning_setting: str, tokenizer: Tokenizer, chat_template: str | None
) -> AnswerSettings:
    """Settle what was left open. `chat_template` is the server's own, if it has one.

    Raises `ConfigError` for a name that nobody knows, or if tools are to be called and nobody knows
    how the model does it.
    """
    tool_parser = _tool_parser(args, tokenizer, chat_template)
    if args.enable_auto_tool_choice and tool_parser is None:
        raise ConfigError(
            f"enable_auto_tool_choice needs a tool_call_parser, and the chat template is none that"
            f" is recognised; choose one of: {', '.join(TOOL_FORMATS)}."
        )
    reasoning = resolve_reasoning_parser(reasoning_setting, tokenizer)
    if reasoning is not None:
        logger.info("reasoning_parser=%s", reasoning)
    return AnswerSettings(
        tool_parser=tool_parser,
        auto_tools=tool_parser is not None and args.enable_auto_tool_choice is not False,
        reasoning_parser=reasoning,
        markers=None if reasoning is None else _counted_between(tokenizer, reasoning),
        reasoning_fields=_REASONING_FIELDS[args.reasoning_field],
    )


def _counted_between(tokenizer: Tokenizer, reasoning: str) -> ReasoningMarkers:
    """The marks between which tokens of reasoning are counted."""
    markers = reasoning_markers(tokenizer, reasoning)
    if not reasoning_format(reasoning).is_harmony:
        return markers
    # A message of reasoning ends before the one with the answer begins, or one with a call.
    end_ids = tokenizer.encode(harmony.END, add_special_tokens=False)
    return msgspec.structs.replace(markers, end_ids=tuple(end_ids))


def _tool_parser(args: ServeArgs, tokenizer: Tokenizer, chat_template: str | None) -> str | None:
    given = args.tool_call_parser
    if given == NO_PARSER:
        return None
    if given is not None:
        return check_tool_parser(given)
    templates = tokenizer.chat_templates
    if chat_template is not None:
        template = templates.get(chat_template, chat_template)
    else:
        template = templates.get(TOOL_TEMPLATE) or tokenizer.chat_template or ""
    found = recognise_tool_parser(template)
    if found is not None:
        logger.info("tool_call_parser=%s: recognised by the chat template", found)
    return found
