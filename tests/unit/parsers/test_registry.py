"""Which family a chat template belongs to."""

from __future__ import annotations

import pytest

from helpers.chat_templates import CHATML
from helpers.tiny_text import CHATML as PLAIN
from tokenmill.entrypoints.parsers.grammar import MISTRAL_ARGS, STYLES, style_of
from tokenmill.entrypoints.parsers.registry import (
    FORCED,
    TOOL_FORMATS,
    check_tool_parser,
    recognise_tool_parser,
)
from tokenmill.errors import ConfigError

HERMES = (
    '{{- \'<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}'
    "\\n</tool_call><|im_end|>' }}"
)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (HERMES, "hermes"),
        (
            """{{ 'Environment: ipython' }}{{ '{"name": "' + name + '", "parameters": ' }}""",
            "llama3_json",
        ),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("{{ '<|python_start|>' }}", "llama4_pythonic"),
        ("{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + '\\n' + '```json'}}", "deepseek_v3"),
        ("{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name}}", "deepseek_v31"),
        ("<|start|>assistant<|channel|>commentary to=functions.f<|message|>", "openai"),
        ("{{ '<|tool_call|>' }}", "granite"),
        ("<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>{{ arguments }}", "kimi_k2"),
        ('as <tool_call></tool_call>: <tool_calls>[{"name": 1, "arguments": 2}]', "jamba"),
        # The mark of Hermes around other forms.
        ('<tool_call>\n<function=example>\n<parameter=a> "name" "arguments"', "qwen3_coder"),
        ('<tool_call>\n<function=example>{"name": 1, "arguments": 2}', None),
        ("<tool_call>{function}<arg_key>{key}</arg_key><arg_value>", "glm45"),
        ("<tool_call><invoke name=", None),
        (CHATML, None),
        (PLAIN, None),
        ("", None),
    ],
)
def test_recognised_by_what_nothing_else_has(template, name):
    assert recognise_tool_parser(template) == name


def test_every_family_has_a_grammar():
    assert set(STYLES) == {*TOOL_FORMATS, FORCED, MISTRAL_ARGS}


def test_mistral_s_later_vocabularies_have_another_form():
    assert style_of("mistral", lambda text: None) == "mistral"
    assert style_of("mistral", lambda text: 7 if text == "[ARGS]" else None) == MISTRAL_ARGS
    assert style_of("hermes", lambda text: 7) == "hermes"


def test_a_wrong_name_is_refused_with_the_nearest_one():
    assert check_tool_parser("hermes") == "hermes"
    with pytest.raises(ConfigError, match="Did you mean 'llama3_json'"):
        check_tool_parser("llama3-json")
