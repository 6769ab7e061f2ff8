"""POST /v1/chat/completions: messages in, an answer out."""

from __future__ import annotations

import pytest

from helpers.fake_engine import FakeEngine, tiny_tokenizer
from helpers.live_server import LiveServer, chunks_of
from tokenmill.entrypoints.chat.render import render_chat

HELLO = [{"role": "user", "content": "Hi"}]
PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def server():
    with LiveServer() as server:
        yield server


def prompt_of(server):
    """Text of the prompt that reached the engine last."""
    return server.engine.calls[-1][0].text


def test_shape(server):
    body = server.chat().json
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "user\nHi\nassistant\n",
        "refusal": None,
    }
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    expected = render_chat(tiny_tokenizer(), HELLO).token_ids
    assert body["usage"]["prompt_tokens"] == len(expected)
    assert body["usage"]["completion_tokens"] == len(expected) + 1


def test_b056_the_prompt_is_the_template_s_and_has_no_second_bos(server):
    reply = server.chat(return_token_ids=True).json
    assert reply["prompt_token_ids"] == tiny_tokenizer().encode(PROMPT, add_special_tokens=False)
    assert prompt_of(server) == PROMPT


def test_an_answer_may_fill_the_context_unless_told_otherwise(server):
    server.chat()
    assert server.engine.calls[-1][1].max_tokens is None
    server.chat(max_tokens=5)
    assert server.engine.calls[-1][1].max_tokens == 5
    server.chat(max_tokens=5, max_completion_tokens=7)
    assert server.engine.calls[-1][1].max_tokens == 7


def test_a_limit_of_the_model_s_own_counts():
    engine = FakeEngine()
    engine.default_params = engine.default_params.replace(max_tokens=99)
    with LiveServer(engine) as server:
        server.chat()
        assert engine.calls[-1][1].max_tokens == 99


def test_content_parts(server):
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
    server.chat(messages=[{"role": "user", "content": parts}])
    assert "user\nHi\nthere<|im_end|>" in prompt_of(server)
    image = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]
    reply = server.chat(messages=[{"role": "user", "content": image}])
    assert (reply.status, reply.error["param"]) == (400, "messages[0].content[0].type")


@pytest.mark.parametrize(
    "answer",
    [
        {"content": None},
        {"content": ""},
        {"content": []},
        {},
    ],
)
@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_b052_histories_as_clients_send_them(server, answer, arguments):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    history = [
        *HELLO,
        {"role": "assistant", "tool_calls": [call], **answer},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]},
    ]
    reply = server.chat(messages=history, return_token_ids=True)
    assert reply.status == 200
    reference = render_chat(
        tiny_tokenizer(),
        [
            *HELLO,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
        ],
    )
    assert reply.json["prompt_token_ids"] == reference.token_ids


@pytest.mark.parametrize(
    ("messages", "parameter"),
    [
        ([], "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "king", "content": "a"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"content": "a"}], "messages[0].role"),
        (["a"], "messages[0]"),
        ("a", "messages"),
        (None, "messages"),
    ],
)
def test_b052_invalid_structure_names_the_place(server, messages, parameter):
    for path in ("/v1/chat/completions", "/tokenize"):
        if path == "/tokenize" and messages is None:
            continue
        reply = server.post(path, {"messages": messages})
        assert (reply.status, reply.error["param"]) == (400, parameter)


def test_the_last_message_can_be_continued(server):
    messages = [*HELLO, {"role": "assistant", "content": "The answer"}]
    reply = server.chat(messages=messages, continue_final_message=True, echo=True)
    assert prompt_of(server).endswith("<|im_start|>assistant\nThe answer")
    assert reply.json["choices"][0]["message"]["content"].startswith("The answeruser")
    both = server.chat(messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert (both.status, both.error["param"]) == (400, "continue_final_message")
    server.chat(add_generation_prompt=False)
    assert prompt_of(server) == "<|im_start|>user\nHi<|im_end|>\n"


def test_variables_for_the_template():
    template = "{{ mood }}|{{ reasoning_effort }}|{{ documents[0].t }}|{{ messages[0].content }}"
    with LiveServer(chat_template=template) as server:
        server.chat(
            chat_template_kwargs={"mood": "good"},
            reasoning_effort="low",
            documents=[{"t": "doc"}],
        )
        assert prompt_of(server) == "good|low|doc|Hi"
        for name in ("messages", "add_generation_prompt", "chat_template", "_x", "range"):
            reply = server.chat(chat_template_kwargs={name: 1})
            assert reply.status == 400
            assert reply.error["param"] == f"chat_template_kwargs.{name}"


def test_b129_templates_of_clients_are_refused_unless_trusted():
    with LiveServer() as server:
        reply = server.chat(chat_template="{{ messages }}")
        assert (reply.status, reply.error["param"]) == (400, "chat_template")
    with LiveServer(trust_request_chat_template=True) as server:
        server.chat(chat_template="say {{ messages[0].content }}")
        assert prompt_of(server) == "say Hi"
        endless = "{% for i in range(9999) %}{% for j in range(9999) %}x{% endfor %}{% endfor %}"
        loops = server.chat(chat_template=endless)
        assert loops.status == 400
        for bad in ("{{ ''.__class__ }}", "{% include '/etc/passwd' %}", "{{ x", "/etc/passwd"):
            assert server.chat(chat_template=bad).status == 400
        assert server.get("/health").status == 200


def test_a_template_s_own_refusal_is_a_400_with_its_words():
    with LiveServer(chat_template="{{ raise_exception('roles must alternate') }}") as server:
        for stream in (False, True):
            reply = server.chat(stream=stream)
            assert reply.status == 400
            assert reply.error["code"] == "chat_template_error"
            assert "roles must alternate" in reply.error["message"]


def test_a_model_without_a_template_says_so():
    with LiveServer(FakeEngine(chat_template=False)) as server:
        reply = server.chat()
        assert reply.status == 400
        assert "no default chat template" in reply.error["message"]
        assert server.complete().status == 200


def test_logprobs(server):
    content = server.chat(logprobs=True, top_logprobs=2).json["choices"][0]["logprobs"]["content"]
    assert "".join(each["token"] for each in content) == PROMPT + "<|im_end|>"
    for each in content:
        assert bytes(each["bytes"]).decode() == each["token"]
        assert [best["token"] for best in each["top_logprobs"]] == ["(", ")"]
    alone = server.chat(logprobs=True).json["choices"][0]["logprobs"]["content"]
    assert all(each["top_logprobs"] == [] for each in alone)
    three = server.chat(logprobs=True, top_logprobs=3).json["choices"][0]["logprobs"]["content"]
    assert [best["token"] for best in three[1]["top_logprobs"]] == ["(", ")", three[1]["token"]]


def test_b027_top_logprobs_needs_logprobs_and_a_limit(server):
    assert server.chat(top_logprobs=2).error["param"] == "top_logprobs"
    reply = server.chat(logprobs=True, top_logprobs=21)
    assert reply.status == 400
    assert "20" in reply.error["message"]


def test_b053_everything_that_the_official_client_can_send(server):
    reply = server.chat(
        model="fake/model",
        messages=[{"role": "developer", "content": "be brief", "name": "x"}, *HELLO],
        audio=None,
        frequency_penalty=0,
        function_call="none",
        functions=[],
        logit_bias={},
        logprobs=False,
        max_completion_tokens=5,
        max_tokens=9,
        metadata={"a": "b"},
        modalities=["text"],
        moderation={"a": 1},
        n=1,
        parallel_tool_calls=True,
        prediction={"type": "content", "content": "x"},
        presence_penalty=0,
        prompt_cache_key="k",
        prompt_cache_options={"mode": "implicit"},
        prompt_cache_retention="24h",
        reasoning_effort="low",
        response_format={"type": "text"},
        safety_identifier="s",
        seed=1,
        service_tier="fast",
        stop=None,
        store=True,
        stream=False,
        stream_options=None,
        temperature=1,
        tool_choice="none",
        tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
        top_logprobs=None,
        top_p=1,
        user="u",
        verbosity="low",
        web_search_options=None,
        some_new_field={"a": [1]},
    )
    assert reply.status == 200, reply.body
    assert reply.json["usage"]["completion_tokens"] == 5  # max_completion_tokens wins
    assert prompt_of(server).startswith("<|im_start|>system\nbe brief")


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"web_search_options": {}}, "web_search_options"),
    ],
)
def test_what_would_change_an_answer_and_is_not_supported_is_named(server, fields, parameter):
    reply = server.chat(**fields)
    assert (reply.status, reply.error["param"]) == (400, parameter)
    assert server.chat(**dict.fromkeys(fields)).status == 200  # null asks for nothing


def test_n_answers(server):
    body = server.chat(n=2, temperature=1).json
    assert [choice["index"] for choice in body["choices"]] == [0, 1]


def test_first_the_role_last_an_empty_delta(server):
    first, *middle, last = chunks_of(server.chat(stream=True))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(list(chunk["choices"][0]["delta"]) == ["content"] for chunk in middle)
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in middle}) == 1


def test_b095_a_chat_of_megabytes_is_refused_before_it_is_rendered(server):
    reply = server.chat(messages=[{"role": "user", "content": "a " * 2**22}])
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert reply.error["param"] == "messages"


@pytest.mark.parametrize("stream", [False, True])
def test_b100_a_chat_that_does_not_fit_says_so_with_the_numbers(server, stream):
    messages = [{"role": "user", "content": "One two three four " * 200}]
    reply = server.chat(messages=messages, stream=stream)
    count = server.post("/tokenize", {"messages": messages}).json["count"]
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert reply.error["param"] == "messages"
    assert str(count) in reply.error["message"]
    assert "512" in reply.error["message"]
    short = server.chat(messages=messages, truncate_prompt_tokens=16, return_token_ids=True).json
    assert short["usage"]["prompt_tokens"] == 16
    assert (
        short["prompt_token_ids"]
        == (server.post("/tokenize", {"messages": messages}).json["tokens"][-16:])
    )
