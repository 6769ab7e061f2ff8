"""Tools and reasoning in chats: what is asked for, and how answers are taken apart."""

from __future__ import annotations

import json
import re
import time

import pytest

from helpers import tiny_text
from helpers.answers import BROKEN, GOOD
from helpers.fake_engine import FakeEngine, Script, tiny_tokenizer
from helpers.live_server import LiveServer, chunks_of
from tokenmill.contracts.request import FinishReason
from tokenmill.engine.input_processor import InputProcessor
from tokenmill.engine.output_processor import OutputProcessor
from tokenmill.errors import ConfigError
from tokenmill.tokenizer.tokenizer import Tokenizer

TEMPLATE = """
{%- if tools %}Tools: {{ tools | tojson }}, called as <tool_call>{"name": "f", "arguments": {}}
</tool_call>{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined %}{{ '<think>' if enable_thinking else '<think></think>' }}
{% endif %}{% endif %}
"""


def tool(name, parameters=None, **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


WEATHER = tool("get_weather", {"type": "object", "properties": {"city": {"type": "string"}}})
TOOLS = [WEATHER, tool("now"), tool("add")]
PARIS = '{"city": "Paris"}'
ONE = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TWO = "I look. " + ONE + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


class Says:
    """Writes the text that it was given."""

    def __init__(self):
        self.text = ""
        self.reason = FinishReason.STOP

    def __call__(self, prompt_token_ids, params):
        return Script(tiny_tokenizer().encode(self.text), self.reason)


def serving(chat_template=TEMPLATE, *, engine=None, **args):
    engine = FakeEngine(Says(), max_model_len=8192, **(engine or {}))
    return LiveServer(engine, chat_template=chat_template, **args)


@pytest.fixture(scope="module")
def server():
    with serving(engine={"reasoning_parser": "qwen3"}) as server:
        yield server


class Choice:
    """A choice as a client has it in the end, streamed or not."""

    def __init__(self, index):
        self.index = index
        self.message = {"content": None, "calls": []}
        self.finish_reason = None
        self.stop_reason = None
        self.logprobs = []
        self.token_ids = []

    def add_delta(self, delta):
        for name, value in delta.items():
            if name in ("content", "reasoning", "reasoning_content") and value:
                self.message[name] = (self.message.get(name) or "") + value
        for piece in delta.get("tool_calls", []):
            calls = self.message["calls"]
            if "id" in piece:
                assert piece["index"] == len(calls)
                assert piece["type"] == "function"
                assert piece["function"]["arguments"] == ""
                calls.append([piece["id"], piece["function"]["name"], ""])
            else:
                assert set(piece) == {"index", "function"}
                assert set(piece["function"]) == {"arguments"}
                calls[piece["index"]][2] += piece["function"]["arguments"]


def ask(server, text, *, stream, reason=FinishReason.STOP, **fields):
    """The choices of an answer, and its usage."""
    says = server.engine.author
    says.text, says.reason = text, reason
    if stream:
        fields["stream_options"] = {"include_usage": True}
    reply = server.chat(stream=stream, **fields)
    assert reply.status == 200, reply.body
    if not stream:
        return [_whole(choice) for choice in reply.json["choices"]], reply.json["usage"]
    *chunks, last = chunks_of(reply)
    choices = {}
    for chunk in chunks:
        (piece,) = chunk["choices"]
        choice = choices.get(piece["index"])
        if choice is None:
            choice = choices[piece["index"]] = Choice(piece["index"])
            assert piece["delta"] == {"role": "assistant", "content": piece["delta"]["content"]}
        assert choice.finish_reason is None
        choice.add_delta(piece["delta"])
        choice.finish_reason = piece["finish_reason"]
        choice.stop_reason = piece["stop_reason"]
        choice.logprobs += (piece["logprobs"] or {"content": []})["content"]
        choice.token_ids += piece.get("token_ids", [])
    assert last["choices"] == []
    return [choices[index] for index in sorted(choices)], last["usage"]


def _whole(given):
    choice = Choice(given["index"])
    message = dict(given["message"])
    assert message.pop("role") == "assistant"
    assert message.pop("refusal") is None
    calls = message.pop("tool_calls", [])
    assert all(call["type"] == "function" for call in calls)
    choice.message = {
        **message,
        "calls": [[c["id"], c["function"]["name"], c["function"]["arguments"]] for c in calls],
    }
    choice.finish_reason, choice.stop_reason = given["finish_reason"], given["stop_reason"]
    choice.logprobs = (given["logprobs"] or {"content": []})["content"]
    choice.token_ids = given.get("token_ids", [])
    return choice


def calls_of(choice):
    return [(name, arguments) for _, name, arguments in choice.message["calls"]]


BOTH = pytest.mark.parametrize("stream", [False, True])


@BOTH
def test_b047_two_calls(server, stream):
    (choice,), usage = ask(server, TWO, stream=stream, tools=TOOLS)
    assert choice.message["content"] == "I look."
    assert calls_of(choice) == [("get_weather", PARIS), ("now", "{}")]
    ids = [call[0] for call in choice.message["calls"]]
    assert len(set(ids)) == 2
    assert all(re.fullmatch("call_[0-9a-f]{24}", each) for each in ids)
    assert choice.finish_reason == "tool_calls"
    assert usage["completion_tokens"] == len(tiny_tokenizer().encode(TWO)) + 1


@BOTH
def test_content_is_null_beside_calls_alone(server, stream):
    (choice,), _ = ask(server, ONE, stream=stream, tools=TOOLS)
    assert choice.message["content"] is None
    (choice,), _ = ask(server, "No call.\n", stream=stream, tools=TOOLS)
    assert choice.message == {"content": "No call.\n", "calls": []}
    assert choice.finish_reason == "stop"


NAMED = {"type": "function", "function": {"name": "get_weather"}}
LENGTH = FinishReason.LENGTH


@BOTH
@pytest.mark.parametrize(
    ("choice", "text", "reason", "expected"),
    [
        ("auto", ONE, FinishReason.STOP, "tool_calls"),
        (None, ONE, FinishReason.STOP, "tool_calls"),
        ("auto", "None.", FinishReason.STOP, "stop"),
        ("auto", ONE, LENGTH, "length"),
        ("auto", "None.", LENGTH, "length"),
        ("required", ONE, FinishReason.STOP, "tool_calls"),
        ("required", TWO, FinishReason.STOP, "tool_calls"),
        ("required", ONE[:58], LENGTH, "length"),
        (NAMED, ONE, FinishReason.STOP, "stop"),
        (NAMED, ONE, LENGTH, "length"),
        ("none", ONE, FinishReason.STOP, "stop"),
    ],
)
def test_b050_finish_reasons(server, stream, choice, text, reason, expected):
    fields = {} if choice is None else {"tool_choice": choice}
    (answer,), _ = ask(server, text, stream=stream, reason=reason, tools=TOOLS, **fields)
    assert answer.finish_reason == expected
    has_calls = "<tool_call>" in text and choice != "none"
    assert bool(answer.message["calls"]) == has_calls
    if choice == "none":
        assert answer.message["content"] == text


@pytest.mark.parametrize(
    "example", [e for e in GOOD + BROKEN if e.tools == "hermes"], ids=lambda e: e.text[:40]
)
def test_b049_streamed_or_not_is_the_same(server, example):
    parts = []
    for stream in (False, True):
        (choice,), _ = ask(server, example.text, stream=stream, tools=TOOLS)
        parts.append((choice.message["content"], calls_of(choice), choice.finish_reason))
    assert parts[0] == parts[1]
    assert parts[0][0] == (example.content or None)
    assert parts[0][1] == example.calls


@BOTH
def test_a_call_is_never_cut_by_chance_of_a_stop_string(server, stream):
    """Stop strings are looked for in all that the model writes, calls included."""
    (choice,), _ = ask(server, ONE, stream=stream, tools=TOOLS, stop=["Paris"])
    assert calls_of(choice) == [("get_weather", '{"city": "')]
    assert (choice.finish_reason, choice.stop_reason) == ("tool_calls", "Paris")


@BOTH
def test_logprobs_and_ids_cover_every_token(server, stream):
    text = f"<think>Hm.</think>{TWO}"
    (choice,), _ = ask(
        server, text, stream=stream, tools=TOOLS, logprobs=True, return_token_ids=True
    )
    assert "".join(each["token"] for each in choice.logprobs) == text + "<|im_end|>"
    assert choice.token_ids == [*tiny_tokenizer().encode(text), 2]
    assert len(choice.message["calls"]) == 2


@BOTH
def test_b039_n_answers_have_their_own_calls(server, stream):
    choices, usage = ask(server, TWO, stream=stream, tools=TOOLS, n=3, temperature=1)
    assert [choice.index for choice in choices] == [0, 1, 2]
    assert all(len(choice.message["calls"]) == 2 for choice in choices)
    ids = [call[0] for choice in choices for call in choice.message["calls"]]
    assert len(set(ids)) == 6
    assert usage["completion_tokens"] == 3 * (len(tiny_tokenizer().encode(TWO)) + 1)


@BOTH
def test_one_call_at_most(server, stream):
    (choice,), _ = ask(server, TWO, stream=stream, tools=TOOLS, parallel_tool_calls=False)
    assert calls_of(choice) == [("get_weather", PARIS)]
    assert choice.finish_reason == "tool_calls"


THOUGHT = "<think>\nIt rains, I\n\nguess. \n</think>\n\nTake an umbrella.\n"


@BOTH
def test_reasoning(server, stream):
    (choice,), usage = ask(server, THOUGHT, stream=stream)
    thought = "It rains, I\n\nguess."
    assert choice.message == {
        "content": "Take an umbrella.\n",
        "reasoning": thought,
        "reasoning_content": thought,
        "calls": [],
    }
    marks = [len(tiny_tokenizer().encode(mark)) for mark in ("<think>", "</think>")]
    inner = tiny_tokenizer().encode(THOUGHT.split("Take")[0])
    most = len(inner) - sum(marks)
    assert most - 2 <= usage["completion_tokens_details"]["reasoning_tokens"] <= most


@BOTH
def test_reasoning_may_be_left_out(server, stream):
    (choice,), usage = ask(server, THOUGHT, stream=stream, include_reasoning=False)
    assert choice.message == {"content": "Take an umbrella.\n", "calls": []}
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 5


@BOTH
def test_reasoning_that_is_all_there_is(server, stream):
    (choice,), _ = ask(server, "<think>Hm", stream=stream, reason=LENGTH)
    assert choice.message["content"] is None
    assert choice.message["reasoning"] == "Hm"
    assert choice.finish_reason == "length"


@BOTH
def test_a_prompt_may_have_opened_or_closed_the_reasoning(server, stream):
    opened = {"chat_template_kwargs": {"enable_thinking": True}}
    (choice,), usage = ask(server, "Hm.</think>Yes.", stream=stream, **opened)
    assert choice.message["reasoning"] == "Hm."
    assert choice.message["content"] == "Yes."
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 0
    closed = {"chat_template_kwargs": {"enable_thinking": False}}
    (choice,), usage = ask(server, "<think>Yes.", stream=stream, **closed)
    assert choice.message == {"content": "<think>Yes.", "calls": []}
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


@BOTH
def test_a_continued_answer_goes_on_in_its_reasoning(server, stream):
    for begun, reasoning, content in (
        ("<think>Well,", " so.", "Yes."),
        ("<think>Hm.</think>Well,", None, " so.</think>Yes."),
    ):
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": begun}]
        (choice,), _ = ask(
            server,
            " so.</think>Yes.",
            stream=stream,
            messages=messages,
            continue_final_message=True,
        )
        # Blanks at the beginning of reasoning are left out.
        assert choice.message.get("reasoning") == (reasoning and reasoning.strip())
        assert choice.message["content"] == content


@BOTH
def test_reasoning_and_calls(server, stream):
    (choice,), _ = ask(server, f"<think>Hm.</think>\n\n{ONE}", stream=stream, tools=TOOLS)
    assert choice.message["reasoning_content"] == "Hm."
    assert choice.message["content"] is None
    assert calls_of(choice) == [("get_weather", PARIS)]


@BOTH
def test_channels(stream):
    thought = "<|channel|>analysis<|message|>Hm, well.<|end|>"
    families = {"tool_call_parser": "openai"}
    with serving(engine={"reasoning_parser": "openai_gptoss"}, **families) as server:
        final = f"{thought}<|start|>assistant<|channel|>final<|message|>Yes."
        (choice,), usage = ask(server, final, stream=stream)
        assert choice.message["content"] == "Yes."
        assert choice.message["reasoning"] == "Hm, well."
        count = usage["completion_tokens_details"]["reasoning_tokens"]
        assert abs(count - len(tiny_tokenizer().encode("Hm, well."))) <= 2
        call = (
            f"{thought}<|start|>assistant<|channel|>commentary to=functions.get_weather "
            f"<|constrain|>json<|message|>{PARIS}<|call|>"
        )
        (choice,), usage = ask(server, call, stream=stream, tools=TOOLS)
        assert calls_of(choice) == [("get_weather", PARIS)]
        assert choice.message["content"] is None
        assert usage["completion_tokens_details"] == {"reasoning_tokens": count}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_one_name_for_reasoning(name):
    with serving(engine={"reasoning_parser": "qwen3"}, reasoning_field=name) as server:
        for stream in (False, True):
            (choice,), _ = ask(server, THOUGHT, stream=stream)
            assert set(choice.message) == {"content", "calls", name}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_histories_bring_reasoning_by_either_name(server, name):
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho", name: "Hm."},
        {"role": "user", "content": "Hi"},
    ]
    ask(server, "Ho", stream=False, messages=messages)
    assert "<think>Hm.</think>Ho" in server.engine.calls[-1][0].text
    reply = server.chat(messages=[*messages[:1], {**messages[1], name: 5}])
    assert (reply.status, reply.error["param"]) == (400, f"messages[1].{name}")


def test_without_a_parser_reasoning_is_text():
    with serving(engine={"reasoning_parser": "none"}) as server:
        (choice,), usage = ask(server, THOUGHT, stream=False)
        assert choice.message == {"content": THOUGHT, "calls": []}
        assert "completion_tokens_details" not in usage


def test_b097_tools_count_as_in_tokenize(server):
    messages = [{"role": "user", "content": "Hi"}]
    _, usage = ask(server, "Ho", stream=False, messages=messages, tools=TOOLS)
    count = server.post("/tokenize", {"messages": messages, "tools": TOOLS}).json["count"]
    assert usage["prompt_tokens"] == count
    assert "get_weather" in server.engine.calls[-1][0].text
    none = ask(server, "Ho", stream=False, messages=messages, tools=[])[1]["prompt_tokens"]
    assert none == ask(server, "Ho", stream=False, messages=messages)[1]["prompt_tokens"]


def test_allowed_tools_are_the_only_ones_that_the_model_sees(server):
    for mode in ("auto", "required"):
        allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "now"}}]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        ask(server, ONE, stream=False, tools=TOOLS, tool_choice=choice)
        prompt, params = server.engine.calls[-1][:2]
        assert '"now"' in prompt.text
        assert "get_weather" not in prompt.text
        assert (params.structured_outputs is not None) == (mode == "required")


def function(**fields):
    return {"type": "function", "function": fields}


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [WEATHER, {"type": "function"}]}, "tools[1].function"),
        ({"tools": [function(name="")]}, "tools[0].function.name"),
        ({"tools": [function(name=5)]}, "tools[0].function.name"),
        ({"tools": [function(name="a b")]}, "tools[0].function.name"),
        ({"tools": [function(name="a" * 257)]}, "tools[0].function.name"),
        ({"tools": [function(name="a", description=5)]}, "tools[0].function.description"),
        ({"tools": [function(name="a", parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [function(name="a", strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1]"),
        ({"tools": [WEATHER] * 1025}, "tools"),
        ({"tools": ["a"]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "x"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": function(name="other")}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
            "tool_choice.allowed_tools",
        ),
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"name": "other"}]},
                },
            },
            "tool_choice",
        ),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": [tool("a", {"type": 5})], "tool_choice": "required"}, "tools[0]"),
        ({"tools": [tool("a", {"not": {}}, strict=True)]}, "tools[0]"),
    ],
)
def test_b059_what_cannot_be_is_a_400_that_names_the_field(server, fields, parameter):
    for stream in (False, True):
        reply = server.chat(stream=stream, **fields)
        assert reply.status == 400
        assert reply.error["param"] == parameter
    assert server.get("/health").status == 200


DEEP: dict = {"type": "array"}
for _ in range(300):
    DEEP = {"type": "array", "items": DEEP}
WIDE = {"enum": [f"value {i}" for i in range(90_000)]}


@pytest.mark.parametrize(
    "properties",
    [{"a": DEEP}, {"a": WIDE}, {"a": WIDE, "b": WIDE}, {"a": {"const": "x" * 1_000_000}}],
    ids=["deep", "wide", "wider", "long"],
)
def test_b065_schemas_beyond_all_measure(server, properties):
    tools = [tool("f", {"properties": properties})]
    for choice in ("required", "auto"):
        start = time.perf_counter()
        reply = server.chat(tools=tools, tool_choice=choice)
        assert time.perf_counter() - start < 5
        assert reply.status == 400
        assert reply.error["param"].startswith(("tools", "messages"))
    assert server.get("/health").status == 200


def grammar_of(server):
    params = server.engine.calls[-1][1]
    return None if params.structured_outputs is None else params.structured_outputs.grammar


def test_calls_that_are_required_are_all_that_the_grammar_allows(server):
    ask(server, ONE, stream=False, tools=TOOLS, tool_choice="required")
    grammar = grammar_of(server)
    assert all(name in grammar for name in ("get_weather", "now", "add", "<tool_call>"))
    ask(server, ONE, stream=False, tools=TOOLS, tool_choice=NAMED)
    assert "get_weather" in grammar_of(server)
    assert "now" not in grammar_of(server)
    for fields in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        ask(server, ONE, stream=False, tools=TOOLS, **fields)
        assert grammar_of(server) is None
    strict = tool("now", {"type": "object", "properties": {}}, strict=True)
    ask(server, ONE, stream=False, tools=[WEATHER, strict])
    assert "opening" in grammar_of(server)


def test_b055_either_a_call_or_a_document(server):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    for stream in (False, True):
        (choice,), _ = ask(server, "{}", stream=stream, tools=TOOLS, response_format=form)
        assert choice.message == {"content": "{}", "calls": []}
        assert "<tool_call>" in grammar_of(server)
        (choice,), _ = ask(server, ONE, stream=stream, tools=TOOLS, response_format=form)
        assert calls_of(choice) == [("get_weather", PARIS)]
    for fields in ({"structured_outputs": {"regex": "a+"}}, {"guided_choice": ["a", "b"]}):
        reply = server.chat(tools=TOOLS, **fields)
        assert (reply.status, reply.error["param"]) == (400, "tools")
        assert server.chat(tools=TOOLS, tool_choice="none", **fields).status == 200
    compact = {"json": {"type": "object"}, "disable_any_whitespace": True}
    reply = server.chat(tools=TOOLS, structured_outputs=compact)
    assert reply.error["param"] == "structured_outputs.disable_any_whitespace"
    ask(server, ONE, stream=False, tools=TOOLS, response_format=form, tool_choice="required")
    assert "<tool_call>" in grammar_of(server)


@BOTH
def test_a_model_whose_calls_nobody_knows_can_be_forced(stream):
    with serving("{{ messages[0].content }}") as server:
        reply = server.chat(tools=TOOLS, stream=stream)
        assert (reply.status, reply.error["param"]) == (400, "tools")
        assert "--tool-call-parser" in reply.error["message"]
        text = '[{"name": "get_weather", "parameters": ' + PARIS + "}]"
        (choice,), _ = ask(server, text, stream=stream, tools=TOOLS, tool_choice="required")
        assert calls_of(choice) == [("get_weather", PARIS)]
        assert choice.finish_reason == "tool_calls"
        (choice,), _ = ask(server, text, stream=stream, tools=TOOLS, tool_choice=NAMED)
        assert calls_of(choice) == [("get_weather", PARIS)]
        assert choice.finish_reason == "stop"
        (choice,), _ = ask(server, text, stream=stream, tools=TOOLS, tool_choice="none")
        assert choice.message == {"content": text, "calls": []}


def test_calls_of_the_model_s_own_choice_can_be_switched_off():
    with serving(enable_auto_tool_choice=False) as server:
        reply = server.chat(tools=TOOLS)
        assert (reply.status, reply.error["param"]) == (400, "tools")
        assert "--no-enable-auto-tool-choice" in reply.error["message"]
        assert server.chat(tools=TOOLS, tool_choice="required").status == 200


@BOTH
def test_a_parser_that_the_operator_chose(stream):
    with serving("{{ messages[0].content }}", tool_call_parser="pythonic") as server:
        text = '[get_weather(city="Paris"), now()]'
        (choice,), _ = ask(server, text, stream=stream, tools=TOOLS)
        assert calls_of(choice) == [("get_weather", PARIS), ("now", "{}")]
        reply = server.chat(tools=[tool("a", strict=True)])
        assert (reply.status, reply.error["param"]) == (400, "tools")
        assert "strict" in reply.error["message"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"tool_call_parser": "hermess"}, "Did you mean 'hermes'"),
        ({"enable_auto_tool_choice": True}, "needs a tool_call_parser"),
        ({"enable_auto_tool_choice": True, "tool_call_parser": "none"}, "needs a tool_call_parser"),
    ],
)
def test_settings_that_cannot_work(args, message):
    from tokenmill.config.serve_args import ServeArgs
    from tokenmill.entrypoints.http.state import make_state

    with pytest.raises(ConfigError, match=message):
        make_state(FakeEngine(), ServeArgs(**args))


MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


def engine_of_marks():
    """An engine whose model has the marks as special tokens; its template tells the family."""
    backend = tiny_text.tiny_tokenizer()
    backend.add_special_tokens(list(MARKS))
    special = {"eos_token": tiny_text.EOS}
    tokenizer = Tokenizer(backend, special_tokens=special, chat_templates={"default": TEMPLATE})
    assert tokenizer.special_token_ids.issuperset(map(tokenizer.token_to_id, MARKS))
    engine = FakeEngine(max_model_len=8192, hf_overrides={"vocab_size": tokenizer.vocab_size})
    text = f"<think>Hm, well.</think>\n\n{TWO}"
    engine.author = lambda prompt, params: Script(tokenizer.encode(text))
    engine.tokenizer = tokenizer
    engine._input = InputProcessor(engine.config, tokenizer, (2,))
    engine._output = OutputProcessor(tokenizer)
    return engine


@BOTH
def test_marks_that_are_special_tokens_are_seen(stream):
    """Both families are recognised; the marks stay in the text for the parsers, and only there."""
    with LiveServer(engine_of_marks()) as server:
        tokenizer = server.engine.tokenizer
        fields = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        reply = server.chat(tools=TOOLS, **fields)
        assert reply.status == 200, reply.body
        assert not server.engine.calls[-1][1].skip_special_tokens
        if stream:
            *chunks, last = chunks_of(reply)
            choice = Choice(0)
            for chunk in chunks:
                choice.add_delta(chunk["choices"][0]["delta"])
            usage = last["usage"]
        else:
            choice, usage = _whole(reply.json["choices"][0]), reply.json["usage"]
        assert choice.message["reasoning"] == "Hm, well."
        assert choice.message["content"] == "I look."
        assert calls_of(choice) == [("get_weather", PARIS), ("now", "{}")]
        num_reasoning = len(tokenizer.encode("Hm, well."))
        assert usage["completion_tokens_details"] == {"reasoning_tokens": num_reasoning}
        server.chat(tools=TOOLS, tool_choice="required")
        for mark in MARKS[:2]:
            assert f"<[{tokenizer.token_to_id(mark)}]>" in grammar_of(server)


def test_special_tokens_stay_hidden_where_they_mark_nothing(server):
    ask(server, "Ho", stream=False)
    assert server.engine.calls[-1][1].skip_special_tokens


def test_arguments_are_json_for_clients(server):
    (choice,), _ = ask(server, TWO, stream=True, tools=TOOLS, tool_choice="required")
    assert [json.loads(arguments) for _, arguments in calls_of(choice)] == [{"city": "Paris"}, {}]
