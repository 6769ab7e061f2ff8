"""Chats with tools against a scripted model, and answers as a client has them in the end."""

from __future__ import annotations

import pytest

from helpers.fake_engine import FakeEngine, Script, tiny_tokenizer
from helpers.live_server import LiveServer, chunks_of
from tokenmill.contracts.request import FinishReason

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
NAMED = {"type": "function", "function": {"name": "get_weather"}}
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


def calling_until_answered(call, tool_result):
    """A model that says `call` until its prompt has `tool_result`, then `Warm.`; not yet served."""

    def answer(prompt_token_ids, params):
        has_it = tool_result in tiny_tokenizer().decode(prompt_token_ids)
        return Script(tiny_tokenizer().encode("Warm." if has_it else call))

    engine = FakeEngine(answer, reasoning_parser="qwen3", max_model_len=4096)
    return LiveServer(engine, tool_call_parser="hermes")


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
        return [whole(choice) for choice in reply.json["choices"]], reply.json["usage"]
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


def whole(given):
    """A choice of an answer that was not streamed."""
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


def grammar_of(server):
    params = server.engine.calls[-1][1]
    return None if params.structured_outputs is None else params.structured_outputs.grammar
