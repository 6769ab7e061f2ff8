"""Answers of models with calls and reasoning, and what parsers must make of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill.entrypoints.parsers.answer import AnswerParser
from tokenmill.entrypoints.parsers.events import (
    CallArguments,
    CallStart,
    ContentPiece,
    ReasoningPiece,
)
from tokenmill.entrypoints.parsers.registry import TOOL_FORMATS
from tokenmill.tokenizer.reasoning import REASONING_FORMATS

SCHEMAS = {
    "get_weather": {"properties": {"city": {"type": "string"}}},
    "now": None,
    "add": {
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": ["array", "string"]},
            "c": {"enum": ["x", "5"]},
            "d": {"anyOf": [{"type": "object"}, {"type": "null"}]},
            "e": {"const": True},
        }
    },
}


@dataclass
class Message:
    """What pieces amount to."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    def add(self, events):
        for event in events:
            match event:
                case ContentPiece(text):
                    assert text
                    self.content += text
                case ReasoningPiece(text):
                    assert text
                    self.reasoning += text
                case CallStart(index, call_id, name):
                    assert index == len(self.calls)
                    self.calls.append((name, ""))
                    self.ids.append(call_id)
                case CallArguments(index, text):
                    assert text
                    assert index == len(self.calls) - 1
                    name, arguments = self.calls[-1]
                    self.calls[-1] = (name, arguments + text)

    @property
    def parts(self):
        return self.content, self.reasoning, self.calls


def make_parser(tools=None, reasoning=None, is_open=None, max_calls=None):
    return AnswerParser(
        tools=None if tools is None else TOOL_FORMATS[tools],
        schemas=SCHEMAS,
        max_calls=max_calls,
        reasoning=None if reasoning is None else REASONING_FORMATS[reasoning],
        is_open=is_open,
    )


def parse(pieces, **options):
    """The message that these pieces of text amount to."""
    parser, message = make_parser(**options), Message()
    for piece in pieces:
        message.add(parser.push(piece))
    message.add(parser.finish())
    assert parser.push("") == []
    return message


@dataclass(frozen=True)
class Example:
    tools: str
    text: str
    content: str
    calls: list[tuple[str, str]]


PARIS = '{"city": "Paris"}'
TWO = [("get_weather", PARIS), ("now", "{}")]
ODD = '{"city": "a\\"}</tool_call>[TOOL_CALLS]{{", "n": [1, -2.5e3, true, null, {"é": "😀"}]}'
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"


def _hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def _v3(template, *calls):
    inner = "\n".join(template.replace("{}", "%s") % call for call in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def _kimi(*calls):
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def _xml(name, **values):
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def _glm(name, **values):
    inner = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in values.items()
    )
    return f"<tool_call>{name}\n{inner}</tool_call>"


def _harmony_call(name, arguments):
    return (
        f"<|start|>assistant<|channel|>commentary to=functions.{name} "
        f"<|constrain|>json<|message|>{arguments}<|call|>"
    )


GOOD = [
    Example("hermes", _hermes("get_weather", PARIS), "", TWO[:1]),
    Example("hermes", "\n".join(_hermes(*call) for call in TWO), "", TWO),
    Example("hermes", "Let me see.\n" + _hermes(*TWO[0]) + "\n", "Let me see.", TWO[:1]),
    Example("hermes", _hermes("get_weather", ODD), "", [("get_weather", ODD)]),
    Example("hermes", _hermes(*TWO[0]) + "\n\nDone. \n", "Done.", TWO[:1]),
    Example("hermes", f"a {_hermes(*TWO[1])} b <b> c", "a b <b> c", TWO[1:]),
    Example("hermes", '<tool_call>{"name": "now"}</tool_call>', "", TWO[1:]),
    Example("hermes", '<tool_call>{"arguments": {}, "name": "now"}</tool_call>', "", TWO[1:]),
    Example(
        "hermes",
        '<tool_call>{"id": [1, {"x": "}"}], "arguments": {"city": "Paris"}, "name":'
        ' "get_weather", "more": null} </tool_call>',
        "",
        TWO[:1],
    ),
    Example("hermes", '<tool_call>{"name": "now", "parameters": null}', "", TWO[1:]),
    Example(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
        "",
        TWO[:1],
    ),
    Example(
        "hermes",
        '<tool_call>[{"name": "get_weather", "arguments": {"city": "Paris"}},'
        ' {"name": "now", "arguments": {}}]</tool_call>',
        "",
        TWO,
    ),
    # One brace too few, one too many, no end mark between calls.
    Example("hermes", '<tool_call>{"name": "now", "arguments": {}</tool_call>', "", TWO[1:]),
    Example("hermes", '<tool_call>{"name": "now", "arguments": {}}}</tool_call>', "", TWO[1:]),
    Example(
        "hermes",
        f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}\n'
        f'<tool_call>{{"name": "now", "arguments": {{}}}}',
        "",
        TWO,
    ),
    # A function that the request has not is a call all the same: its client can say so.
    Example("hermes", _hermes("other", "{}"), "", [("other", "{}")]),
    Example(
        "llama3_json",
        f'{{"name": "get_weather", "parameters": {PARIS}}}',
        "",
        TWO[:1],
    ),
    Example(
        "llama3_json",
        f'\n<|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}};'
        f' {{"name": "now", "parameters": {{}}}}',
        "",
        TWO,
    ),
    Example(
        "llama3_json",
        'I look: <|python_tag|>{"type": "function", "name": "get_weather", '
        f'"parameters": {PARIS}}}',
        "I look:",
        TWO[:1],
    ),
    Example(
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}},'
        f' {{"name": "now", "arguments": {{}}, "id": "abcdefghi"}}]',
        "",
        TWO,
    ),
    Example("mistral", f"Hm.[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]now{{}}", "Hm.", TWO),
    Example("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS] {PARIS}\n", "", TWO[:1]),
    Example("granite", '<|tool_call|>[{"name": "now", "arguments": {}}]', "", TWO[1:]),
    Example(
        "granite", '<|tool_call|>{"name": "now", "arguments": {}}<|/tool_call|> ok', "ok", TWO[1:]
    ),
    Example(
        "jamba", '<tool_calls>[\n{"name": "now", "arguments": {}}\n]</tool_calls>', "", TWO[1:]
    ),
    Example("phi4_mini_json", 'functools[{"name": "now", "arguments": {}}]', "", TWO[1:]),
    Example(
        "internlm",
        'Ok.<|action_start|><|plugin|>\n{"name": "now", "parameters": {}}<|action_end|>',
        "Ok.",
        TWO[1:],
    ),
    Example("pythonic", '[get_weather(city="Paris"), now()]', "", TWO),
    Example(
        "llama4_pythonic",
        "<|python_start|>[get_weather(city='Paris')]<|python_end|>",
        "",
        TWO[:1],
    ),
    Example(
        "pythonic",
        "[add(a=-1, b=[1.5, {'k': (True, None)}], c='it\\'s ]) \\u00e9', d=false,)]",
        "",
        [("add", '{"a": -1, "b": [1.5, {"k": [true, null]}], "c": "it\'s ]) é", "d": false}')],
    ),
    Example("pythonic", '[add(s="\\ud83d\\ude00")]', "", [("add", '{"s": "😀"}')]),
    Example("deepseek_v3", _v3(V3, *TWO), "", TWO),
    Example("deepseek_v3", "First. " + _v3(V3, TWO[0]), "First.", TWO[:1]),
    Example("deepseek_v31", _v3(V31, *TWO), "", TWO),
    Example("deepseek_v31", _v3(V31, ("get_weather", ODD)), "", [("get_weather", ODD)]),
    Example("kimi_k2", _kimi(*TWO), "", TWO),
    Example(
        "kimi_k2", "Hm. " + _kimi(("get_weather", ODD)) + "So.", "Hm. So.", [("get_weather", ODD)]
    ),
    Example("openai", _harmony_call(*TWO[0]), "", TWO[:1]),
    Example("qwen3_coder", _xml("get_weather", city="Paris"), "", TWO[:1]),
    Example(
        "qwen3_coder",
        f"Ok.\n{_xml('get_weather', city='Paris')}\n{_xml('now')}\n",
        "Ok.",
        TWO,
    ),
    Example(
        "qwen3_coder",
        _xml("get_weather", city='"a"\n\n<b> </parameter \\ ☃\n'),
        "",
        [("get_weather", '{"city": "\\"a\\"\\n\\n<b> </parameter \\\\ ☃\\n"}')],
    ),
    Example(
        "qwen3_xml",
        _xml("add", a="5", b="[1, 2]", c="5", d="None", e="True", f="6"),
        "",
        [("add", '{"a": 5, "b": [1, 2], "c": "5", "d": null, "e": true, "f": "6"}')],
    ),
    Example(
        "qwen3_xml", _xml("add", a="much", b="x y"), "", [("add", '{"a": "much", "b": "x y"}')]
    ),
    Example("glm45", _glm("get_weather", city="Paris"), "", TWO[:1]),
    Example("glm45", f"Ok.\n{_glm('get_weather', city='Paris')}\n{_glm('now')}", "Ok.", TWO),
    Example(
        "glm45",
        _glm("add", a="5", b='["x"]', c="x\n</arg>", d="{}"),
        "",
        [("add", '{"a": 5, "b": ["x"], "c": "x\\n</arg>", "d": {}}')],
    ),
    Example(
        "glm45",
        "<tool_call>now</tool_call><tool_call>get_weather<arg_key>city</arg_key>"
        "<arg_value>Paris</arg_value></tool_call>",
        "",
        TWO[::-1],
    ),
    # Without the outer marks, and with values on the line of their names.
    Example(
        "qwen3_coder",
        "Hm. <function=get_weather><parameter=city>Paris</parameter></function> So.",
        "Hm. So.",
        TWO[:1],
    ),
    Example(
        "openai",
        "<|channel|>commentary<|message|>I look.<|end|>" + "".join(_harmony_call(*c) for c in TWO),
        "I look.",
        TWO,
    ),
    Example("openai", "<|channel|>final<|message|>Hello <b>", "Hello <b>", []),
]
"""Answers as they should be, and with the slips that models make."""

BROKEN = [
    Example("hermes", "<tool_call>", "<tool_call>", []),
    Example("hermes", "Just <tool text", "Just <tool text", []),
    Example("hermes", "<tool_call>\nno json</tool_call>", "<tool_call>\nno json</tool_call>", []),
    Example(
        "hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []
    ),
    Example("hermes", '<tool_call>{"x": 1}</tool_call>!', '<tool_call>{"x": 1}</tool_call>!', []),
    Example("hermes", '<tool_call>{"name": "now"', '<tool_call>{"name": "now"', []),
    Example(
        "hermes",
        "<tool_call>{'name': 'now'}</tool_call>",
        "<tool_call>{'name': 'now'}</tool_call>",
        [],
    ),
    Example(
        "hermes",
        '<tool_call>{"name": "now", "arguments": {bad}}</tool_call>',
        '<tool_call>{"name": "now", "arguments": {bad}}</tool_call>',
        [],
    ),
    Example(
        "hermes", f"<tool_call><tool_call>{_hermes(*TWO[1])}", "<tool_call><tool_call>", TWO[1:]
    ),
    # Cut off, or no JSON, within arguments that have begun: they are what the model wrote.
    Example(
        "hermes",
        '<tool_call>{"name": "now", "arguments": {"a": "un',
        "",
        [("now", '{"a": "un')],
    ),
    Example(
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1, b: 2}}</tool_call>' + _hermes(*TWO[1]),
        "",
        [("add", '{"a": 1, b: 2}}'), TWO[1]],
    ),
    Example(
        "llama3_json", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []
    ),
    Example("llama3_json", '{"name": "now"}', '{"name": "now"}', []),
    Example("llama3_json", '{"answer": 42} is it', '{"answer": 42} is it', []),
    Example("llama3_json", "[1, 2]", "[1, 2]", []),
    Example("llama3_json", "\n\n Plain {} text.\n", "\n\n Plain {} text.\n", []),
    Example(
        "llama3_json",
        '<|python_tag|>brave.search(query="x")',
        '<|python_tag|>brave.search(query="x")',
        [],
    ),
    Example(
        "llama3_json",
        '{"name": "now", "parameters": {}}; and more',
        "; and more",
        TWO[1:],
    ),
    Example("mistral", "[TOOL_CALLS] hm?", "[TOOL_CALLS] hm?", []),
    Example("mistral", "[TOOL_CALLS]now[ARGS]hm", "[TOOL_CALLS]now[ARGS]hm", []),
    Example("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", []),
    Example("pythonic", "[x for x in y]", "[x for x in y]", []),
    Example("pythonic", "Well, [now()]", "Well, [now()]", []),
    Example("pythonic", "[now(5)]", "[now(5)]", []),
    Example("pythonic", "[now(a=open('x'))]", "[now(a=open('x'))]", []),
    Example("pythonic", "[now(), other()]", ", other()]", TWO[1:]),
    Example("pythonic", "[now(a='", "[now(a='", []),
    Example("pythonic", "[now(a=(]", "[now(a=(]", []),
    Example("deepseek_v3", "<｜tool▁calls▁begin｜>hm", "<｜tool▁calls▁begin｜>hm", []),
    Example("deepseek_v31", "<｜tool▁call▁begin｜>now{}", "<｜tool▁call▁begin｜>now{}", []),
    Example("kimi_k2", "<|tool_call_begin|>now {}", "<|tool_call_begin|>now {}", []),
    Example("openai", "<|channel|>fin", "<|channel|>fin", []),
    Example("qwen3_coder", "<tool_call>\nhm", "<tool_call>\nhm", []),
    Example("glm45", "<tool_call>now", "<tool_call>now", []),
    Example("glm45", '<tool_call>{"name": "now"}', '<tool_call>{"name": "now"}', []),
    Example(
        "glm45", "<tool_call>add\n<arg_key>c</arg_key>\n<arg_value>x", "", [("add", '{"c": "x')]
    ),
    Example("qwen3_coder", "<tool_call><function=now", "<tool_call><function=now", []),
    Example("qwen3_coder", "<function=>", "<function=>", []),
    Example("qwen3_coder", "<function=now>", "", [("now", "")]),
    Example("qwen3_coder", "<function=now>so what", "so what", TWO[1:]),
    Example(
        "qwen3_coder", "<function=add><parameter=c>\nx\n</par", "", [("add", '{"c": "x\\n</par')]
    ),
    Example("qwen3_coder", "<function=add><parameter=a>\n5", "", [("add", '{"a": ')]),
    Example("openai", "no channel", "no channel", []),
]
"""Answers that are no calls, or only in part."""
