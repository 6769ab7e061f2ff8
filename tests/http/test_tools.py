"""Tools and reasoning in chats: how answers are taken apart, streamed or not."""

from __future__ import annotations

import json
import re

import pytest

from helpers import tiny_text
from helpers.answers import BROKEN, GOOD
from helpers.fake_engine import FakeEngine, Script, tiny_tokenizer
from helpers.live_server import LiveServer, chunks_of
from helpers.tool_chats import (
    BOTH,
    NAMED,
    ONE,
    PARIS,
    TEMPLATE,
    TOOLS,
    TWO,
    Choice,
    ask,
    calls_of,
    grammar_of,
    serving,
    whole,
)
from tokenmill.contracts.request import FinishReason
from tokenmill.engine.input_processor import InputProcessor
from tokenmill.engine.output_processor import OutputProcessor
from tokenmill.tokenizer.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def server():
    with serving(engine={"reasoning_parser": "qwen3"}) as server:
        yield server


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
            choice, usage = whole(reply.json["choices"][0]), reply.json["usage"]
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
