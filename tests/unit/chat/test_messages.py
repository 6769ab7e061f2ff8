"""Histories as clients send them, and what is refused."""

from __future__ import annotations

import enum
from collections import UserDict

import pytest

from helpers.chat_templates import CHATML, LLAMA_LIKE, MISTRAL_LIKE
from helpers.timing import in_time
from tokenmill.entrypoints.chat.call_forms import CallForms, call_forms
from tokenmill.entrypoints.chat.messages import normalise_messages, plain
from tokenmill.entrypoints.chat.templates import ChatTemplate
from tokenmill.errors import InvalidRequestError

TEMPLATE = ChatTemplate(CHATML)
ARGUMENTS = {"city": "Bern", "days": 2}


def call(arguments=ARGUMENTS, **extra):
    return {"id": "c1", "type": "function", **extra} | {
        "function": {"name": "weather", "arguments": arguments}
    }


def history(content="missing", arguments=ARGUMENTS, result="sunny", **extra):
    assistant = {"role": "assistant", "tool_calls": [call(arguments)], **extra}
    if content != "missing":
        assistant["content"] = content
    return [
        {"role": "user", "content": "Weather?"},
        assistant,
        {"role": "tool", "tool_call_id": "c1", "content": result},
    ]


VARIANTS = [
    history(),
    history(content=None),
    history(content=""),
    history(content=[]),
    history(content=[{"type": "text", "text": ""}]),
    history(arguments='{"city": "Bern", "days": 2}'),
    history(arguments='  {"city":"Bern","days":2}\n'),
    history(result=[{"type": "text", "text": "sunny"}]),
    history(result=["sunny"]),
    history(name=None, refusal=None),
    tuple(history()),
    [UserDict(message) for message in history()],
]


@pytest.mark.parametrize("source", [CHATML, LLAMA_LIKE, MISTRAL_LIKE])
def test_b052_variants_that_mean_the_same_render_the_same(source):
    template = ChatTemplate(source)
    rendered = {
        template.render(
            {"messages": normalise_messages(variant, template), "tools": None, "bos_token": ""}
            | {"eos_token": "", "add_generation_prompt": True}
        )
        for variant in VARIANTS
    }
    assert len(rendered) == 1
    assert "Bern" in rendered.pop()


@pytest.mark.parametrize("arguments", [None, "", " ", "{}", {}])
def test_a_call_without_arguments(arguments):
    normal = normalise_messages(history(arguments=arguments), TEMPLATE)
    assert normal[1]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("calls", [None, []])
def test_no_calls_are_absent(calls):
    message = {"role": "assistant", "content": "x", "tool_calls": calls}
    assert normalise_messages([message], TEMPLATE) == [{"role": "assistant", "content": "x"}]


def test_parts_of_text_are_joined_by_line_breaks():
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
    (message,) = normalise_messages([{"role": "user", "content": parts}], TEMPLATE)
    assert message["content"] == "a\nb\nc"


def test_further_keys_reach_the_template():
    message = {"role": "assistant", "content": "x", "mood": "y", "name": "z"}
    assert normalise_messages([message], TEMPLATE) == [message]


@pytest.mark.parametrize(
    "given",
    [
        {"reasoning_content": "y"},
        {"reasoning": "y"},
        {"reasoning": "y", "reasoning_content": None},
        {"reasoning": "y", "reasoning_content": "y"},
    ],
)
def test_reasoning_has_all_its_names(given):
    message = {"role": "assistant", "content": "x", **given}
    (normal,) = normalise_messages([message], TEMPLATE)
    names = {"reasoning": "y", "reasoning_content": "y"}
    assert normal == {"role": "assistant", "content": "x", **names}
    (harmony,) = normalise_messages([message], ChatTemplate("{{ messages[0].thinking }}"))
    assert harmony == {**normal, "thinking": "y"}


def test_reasoning_is_text():
    message = {"role": "assistant", "content": "x", "reasoning": ["y"]}
    with pytest.raises(InvalidRequestError) as caught:
        normalise_messages([message], TEMPLATE)
    assert caught.value.parameter == "messages[0].reasoning"


def test_b053_developer_is_system_unless_the_template_knows_it():
    messages = [{"role": "developer", "content": "x"}]
    assert normalise_messages(messages, TEMPLATE)[0]["role"] == "system"
    knows = ChatTemplate("{% if messages[0].role == 'developer' %}{% endif %}")
    assert normalise_messages(messages, knows)[0]["role"] == "developer"


def test_a_role_of_the_templates_own():
    messages = [{"role": "ipython", "content": "x"}]
    assert normalise_messages(messages, ChatTemplate('{{ "ipython" }}'))[0]["role"] == "ipython"


def test_the_callers_messages_are_left_alone():
    messages = history(arguments="{}")
    normalise_messages(messages, TEMPLATE)
    assert messages == history(arguments="{}")


def nested(depth):
    return {"a": nested(depth - 1)} if depth else 1


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ({"role": "user", "content": "x"}, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": None, "content": "x"}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user<|im_end|>", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {"type": "text"}}], "messages[0].content"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", "tool_calls": [call()]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [5]}], "messages[0].tool_calls[0].function"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}],
            "messages[0].tool_calls[0].function.name",
        ),
        (history(arguments="{"), "messages[1].tool_calls[0].function.arguments"),
        (history(arguments="[1]"), "messages[1].tool_calls[0].function.arguments"),
        (history(arguments="[" * 100_000), "messages[1].tool_calls[0].function.arguments"),
        ([{"role": "user", "content": "x", "file": b"x"}], "messages[0].file"),
        ([{"role": "user", "content": "x", "file": object()}], "messages[0].file"),
    ],
)
def test_b052_invalid_structure_is_refused_by_name(messages, where):
    with pytest.raises(InvalidRequestError) as raised:
        normalise_messages(messages, TEMPLATE)
    assert raised.value.parameter == where
    assert where in str(raised.value)


def test_data_nested_too_deep_is_refused():
    with pytest.raises(InvalidRequestError, match="nested deeper"):
        normalise_messages([{"role": "user", "content": "x", "more": nested(80)}], TEMPLATE)


def test_plain_leaves_no_types_but_those_of_json():
    class Colour(enum.StrEnum):
        RED = "red"

    class Number(int):
        def secret(self):
            return "secret"

    copied = plain({"a": (Colour.RED, Number(3), True, None, 1.5), 7: []}, "x")
    assert copied == {"a": ["red", 3, True, None, 1.5], "7": []}
    assert [type(item) for item in copied["a"]] == [str, int, bool, type(None), float]


JOINED = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ '<call>' + call['function']['name'] + ' ' + call['function']['arguments'] + '</call>' }}"
    "{% endfor %};{% endfor %}"
)
WRITTEN = JOINED.replace("+ call['function']['arguments'] +", "+ call.function.arguments|string +")
OBJECTS_AS_TAGS = JOINED.replace(
    "{{ '<call>' + call['function']['name'] + ' ' + call['function']['arguments'] + '</call>' }}",
    "{% if call.function.arguments is mapping %}{% for k, v in call.function.arguments|items %}"
    "<{{ k }}>{{ v }}{% endfor %}{% else %}{{ call.function.arguments }}{% endif %}",
)
TWICE = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}<a>{{ call.function|tojson }}"
    "{% endfor %}{% if m.content is not none %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)


def rendered(source, messages):
    template = ChatTemplate(source)
    return template.render({"messages": normalise_messages(messages, template)})


@pytest.mark.parametrize("source", [JOINED, WRITTEN])
def test_arguments_are_text_for_templates_that_join_them_to_text(source):
    (text,) = {rendered(source, variant) for variant in VARIANTS}
    assert '<call>weather {"city": "Bern", "days": 2}</call>' in text
    assert call_forms(source).text_arguments


def test_calls_without_content_are_no_message_of_their_own():
    (text,) = {rendered(TWICE, variant) for variant in VARIANTS}
    assert "<assistant>" not in text
    assert text.endswith("<tool>sunny")
    assert "<assistant>Ok" in rendered(TWICE, history(content="Ok"))


@pytest.mark.parametrize(
    "source", [CHATML, LLAMA_LIKE, MISTRAL_LIKE, OBJECTS_AS_TAGS, "{{ messages[9].x }}", "x"]
)
def test_other_templates_get_objects_and_text(source):
    assert call_forms(source) == CallForms(text_arguments=False, null_content=False)


SYSTEM = [
    {"role": "system", "content": "one"},
    {"role": "developer", "content": "two"},
    {"role": "user", "content": "a"},
    {"role": "system", "content": "three"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "system", "content": "four"},
]
FIRST_ONLY = """{% for m in messages %}{% if m.role == 'system' and not loop.first %}
{{ raise_exception('The system message must be the first one.') }}{% endif %}
[{{ m.role }}]{{ m.content }}{% endfor %}"""
FORGETS = """{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}{% endif %}
{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endif %}
{% endfor %}"""


def shape(template, messages=SYSTEM):
    return [
        (each["role"], each["content"])
        for each in normalise_messages(messages, ChatTemplate(template))
    ]


def test_system_messages_stay_where_a_template_takes_them():
    assert [role for role, _ in shape(CHATML)] == [
        "system", "system", "user", "system", "assistant", "user", "system"
    ]  # fmt: skip


@pytest.mark.parametrize("template", [FIRST_ONLY, FORGETS])
def test_system_messages_that_a_template_refuses_or_forgets_are_parts_of_others(template):
    assert shape(template) == [
        ("system", "one\n\ntwo"),
        ("user", "a\n\nthree"),
        ("assistant", "b"),
        ("user", "c\n\nfour"),
    ]
    text = ChatTemplate(template).render(
        {
            "messages": [
                dict(zip(("role", "content"), each, strict=True)) for each in shape(template)
            ]
        }
    )
    assert all(word in text for word in ("one", "two", "three", "four"))
    alone = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, SYSTEM[3]]
    assert shape(template, alone)[-1] == ("user", "three")
    # One message at the beginning is nobody else's business.
    assert shape(template, SYSTEM[1:3]) == [("system", "two"), ("user", "a")]


def test_contents_that_are_parts_are_joined_as_parts():
    template = """{% for m in messages %}{% if m.role == 'system' and not loop.first %}
    {{ raise_exception('no') }}{% endif %}{% for part in m.content %}{{ part.text }}{% endfor %}
    {% endfor %}"""
    first = shape(template, SYSTEM[:3])[0]
    assert first == ("system", [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])


def test_thousands_of_texts_are_joined_at_once():
    parts = [{"type": "text", "text": "x" * 500}] * 20_000
    systems = [{"role": "system", "content": "x" * 500}] * 10_000
    messages = [{"role": "user", "content": parts}]

    def joined():
        (user,) = normalise_messages(messages, TEMPLATE)
        first, _ = normalise_messages([*systems, *messages], ChatTemplate(FIRST_ONLY))
        return user["content"], first["content"]

    content, system = in_time(joined, 10.0)
    assert content == "\n".join(["x" * 500] * 20_000)
    assert system == "\n\n".join(["x" * 500] * 10_000)
