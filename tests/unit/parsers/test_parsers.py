"""Parsers of calls and reasoning: what they find does not depend on how the text is cut."""

from __future__ import annotations

import itertools
import json
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.answers import BROKEN, GOOD, PARIS, Message, make_parser, parse
from tokenmill.entrypoints.parsers.registry import TOOL_FORMATS
from tokenmill.tokenizer.reasoning import REASONING_FORMATS

EXAMPLES = GOOD + BROKEN
THINK = "<think>\nHm, <tool_call> or not?\n</think>\n\n"


def cut(text, places):
    """The text in pieces, cut at these places."""
    ends = [0, *sorted(places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(ends)]


def every_cut(text):
    """Whole, every character alone, in two at every place, and in three if it is short."""
    yield [text]
    yield list(text)
    for i in range(len(text)):
        yield cut(text, [i])
    if len(text) <= 64:
        for places in itertools.combinations(range(1, len(text)), 2):
            yield cut(text, places)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{e.tools}: {e.text[:50]!r}")
def test_b047_b049_every_cut_gives_the_same_message(example):
    for pieces in every_cut(example.text):
        message = parse(pieces, tools=example.tools)
        assert message.content == example.content
        assert message.calls == example.calls
        assert message.reasoning == ""


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_b049_random_cuts_of_several_examples_behind_one_another(data):
    name = data.draw(st.sampled_from(sorted(TOOL_FORMATS)))
    of_name = [e.text for e in EXAMPLES if e.tools == name] or [EXAMPLES[0].text]
    text = "".join(data.draw(st.lists(st.sampled_from([*of_name, THINK, "text "]), max_size=4)))
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    reasoning = data.draw(st.sampled_from([None, "qwen3", "deepseek_r1", "openai_gptoss"]))
    options = {
        "tools": data.draw(st.sampled_from([name, None])),
        "reasoning": reasoning,
        "is_open": data.draw(st.sampled_from([None, True, False])),
        "max_calls": data.draw(st.sampled_from([None, 1])),
    }
    whole = parse([text], **options)
    assert parse(cut(text, places), **options).parts == whole.parts
    assert parse(list(text), **options).parts == whole.parts


@given(
    st.sampled_from(sorted(TOOL_FORMATS)),
    st.text(alphabet='<>[]{}()":,;= \n\\_|anowt', max_size=60),
    st.integers(0, 60),
)
@settings(max_examples=500, deadline=None)
def test_b049_whatever_the_text_is(name, text, place):
    mark = TOOL_FORMATS[name].marks[0]
    text = text.replace("_", mark)
    pieces = cut(text, [min(place, len(text))])
    whole, cut_message = parse([text], tools=name), parse(pieces, tools=name)
    assert cut_message.parts == whole.parts
    assert parse(list(text), tools=name).parts == whole.parts
    if not whole.calls and name != "openai":
        assert whole.content == text  # nothing is lost


@pytest.mark.parametrize("example", GOOD, ids=lambda e: f"{e.tools}: {e.text[:40]!r}")
def test_arguments_of_good_calls_are_json_objects(example):
    for name, arguments in parse([example.text], tools=example.tools).calls:
        assert name
        assert isinstance(json.loads(arguments), dict)


def test_arguments_come_as_they_are_written():
    parser, message = make_parser("hermes"), Message()
    message.add(parser.push('Ok. <tool_call>{"name": "now", "arguments": {'))
    assert message.parts == ("Ok.", "", [])  # not certain yet
    message.add(parser.push('"'))
    assert message.calls == [("now", '{"')]
    for text in ("city", '": "Par', "is"):
        (event,) = parser.push(text)
        assert (event.index, event.text) == (0, text)


def test_ids_are_unique_and_of_the_family_s_shape():
    for name in ("hermes", "mistral"):
        two = next(e for e in GOOD if e.tools == name and len(e.calls) == 2)
        ids = parse([two.text], tools=name).ids + parse(list(two.text), tools=name).ids
        assert len(set(ids)) == 4
        shape = r"[A-Za-z0-9]{9}" if name == "mistral" else r"call_[0-9a-f]{24}"
        assert all(re.fullmatch(shape, each) for each in ids)


def test_ids_of_the_model_s_own_are_kept():
    two = next(e for e in GOOD if e.tools == "kimi_k2" and len(e.calls) == 2)
    for pieces in every_cut(two.text):
        assert parse(pieces, tools="kimi_k2").ids == ["functions.get_weather:0", "functions.now:1"]


def test_no_more_calls_than_wanted():
    two = next(e for e in GOOD if e.tools == "hermes" and len(e.calls) == 2)
    assert parse([two.text], tools="hermes", max_calls=1).calls == two.calls[:1]


REASONED = [
    # text, is_open, reasoning, content
    ("<think>\nHm.\n</think>\n\nYes.", None, "Hm.", "Yes."),
    ("Hm.\n\nWell.</think>Yes.\n", True, "Hm.\n\nWell.", "Yes.\n"),
    ("<think>Hm.</think>Yes.", True, "Hm.", "Yes."),
    ("Yes. <think> is a mark.", None, "", "Yes. <think> is a mark."),
    ("<think>Yes.</think>", False, "", "<think>Yes.</think>"),
    ("<think>\n\n</think>\n\nYes.", None, "", "Yes."),
    ("<think>Cut off\n", None, "Cut off", ""),
    ("Cut off </thi", True, "Cut off </thi", ""),
    ("<thin", None, "", "<thin"),
    ("\n <think>a < b</think> c", None, "a < b", "c"),
    ("<think>a</think>b</think>c<think>d", None, "a", "b</think>c<think>d"),
    ("  \n", None, "", "  \n"),
    ("", True, "", ""),
]


@pytest.mark.parametrize("tools", [None, "hermes"])
@pytest.mark.parametrize(("text", "is_open", "reasoning", "content"), REASONED)
def test_b049_reasoning(text, is_open, reasoning, content, tools):
    for pieces in every_cut(text):
        message = parse(pieces, tools=tools, reasoning="qwen3", is_open=is_open)
        assert message.parts == (content, reasoning, [])


@pytest.mark.parametrize("name", [n for n in REASONING_FORMATS if n != "openai_gptoss"])
def test_b049_every_family_of_reasoning(name):
    form = REASONING_FORMATS[name]
    text = f"{form.start}\nIt is\n\nso. {form.end}\n\nYes."
    for is_open, cut_off in ((None, 0), (True, 0), (True, len(form.start))):
        for pieces in every_cut(text[cut_off:]):
            message = parse(pieces, reasoning=name, is_open=is_open)
            assert message.parts == ("Yes.", "It is\n\nso.", [])


def test_marks_around_the_answer_are_left_out():
    answer = "<|START_RESPONSE|>Yes.<|END_RESPONSE|>"
    for text, reasoning in (
        (answer, ""),
        (f"<|START_THINKING|>So.<|END_THINKING|>{answer}", "So."),
        ("<|START_THINKING|>So.<|END_THINKING|>Yes.", "So."),
    ):
        for pieces in every_cut(text):
            message = parse(pieces, reasoning="cohere_command3")
            assert message.parts == ("Yes.", reasoning, [])


def test_b049_reasoning_and_calls():
    text = THINK + 'Ok. <tool_call>{"name": "get_weather", "arguments": ' + PARIS + "}</tool_call>"
    for pieces in every_cut(text):
        message = parse(pieces, tools="hermes", reasoning="qwen3")
        assert message.parts == (
            "Ok.",
            "Hm, <tool_call> or not?",
            [("get_weather", PARIS)],
        )


def test_b049_reasoning_and_calls_of_harmony():
    text = (
        "<|channel|>analysis<|message|>The user\nasks. <|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json"
        f"<|message|>{PARIS}<|call|>"
    )
    for pieces in every_cut(text):
        message = parse(pieces, tools="openai", reasoning="openai_gptoss")
        assert message.parts == ("", "The user\nasks.", [("get_weather", PARIS)])
    without = parse([text], reasoning="openai_gptoss")
    assert without.parts == (PARIS, "The user\nasks.", [])


OPENERS = {
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n",
    ),
    "hermes": ("<tool_call>", '<tool_call>{"', '<tool_call>{"name": "now", "arguments": {"a":'),
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.now:"),
    "llama3_json": ("{", "<|python_tag|>", '{"name": "now", "parameters": [', "["),
    "mistral": ("[TOOL_CALLS]", "[TOOL_CALLS]now[ARGS]{", "["),
    "openai": ("<|channel|>", "<|channel|>analysis<|message|>", "<|start|>"),
    "pythonic": ("[", "[now(", "[now(a=[", "("),
    "glm45": ("<tool_call>", "<tool_call>now\n", "<arg_key>", "<tool_call>now<arg_key>a"),
    "qwen3_coder": (
        "<tool_call>",
        "<function=",
        "<function=now>",
        "<tool_call><function=get_weather><parameter=city>",
        "<function=now><parameter=a>",
    ),
}


@pytest.mark.parametrize("by_character", [False, True])
@pytest.mark.parametrize(
    ("name", "opener"), [(name, opener) for name, all_ in OPENERS.items() for opener in all_]
)
def test_b135_repeated_openers_take_linear_time(name, opener, by_character):
    def seconds(num_characters):
        text = (opener * (num_characters // len(opener) + 1))[:num_characters]
        pieces = list(text) if by_character else [text]
        parser = make_parser(name, reasoning="qwen3")
        start = time.thread_time()
        for piece in pieces:
            parser.push(piece)
        parser.finish()
        return time.thread_time() - start

    num_characters = 20_000 if by_character else 50_000
    # In pairs, the best of which counts, since the machine's speed moves; what is not linear is
    # so in each of them.
    for _ in range(10):
        short, long = seconds(num_characters), seconds(2 * num_characters)
        if short < 0.1 and long < 3 * short + 0.01:
            return
    raise AssertionError(f"{num_characters} in {short} s, twice as many in {long} s")


def test_b135_deep_nesting_is_a_broken_call_not_an_error():
    deep = '{"name": "now", "arguments": ' + '{"a":' * 50_000
    assert parse(["<tool_call>" + deep], tools="hermes").calls[0][0] == "now"
    listed = "[now(a=" + "[" * 50_000
    assert parse([listed], tools="pythonic").parts == (listed, "", [])
