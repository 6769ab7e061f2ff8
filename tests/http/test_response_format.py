"""What form a request wants its answer in: which fields say so, and what reaches the engine."""

from __future__ import annotations

import json

import pytest

from helpers.live_server import LiveServer

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": 1}}}


@pytest.fixture(scope="module")
def server():
    with LiveServer() as server:
        yield server


def form_of(server):
    """What the engine was asked for last."""
    return server.engine.calls[-1][1].structured_outputs


FIELDS = [
    ({"response_format": {"type": "json_object"}}, ("json_object", True)),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            }
        },
        ("json", SCHEMA),
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": False, "description": "d"},
            }
        },
        ("json", SCHEMA),
    ),
    ({"structured_outputs": {"json": SCHEMA}}, ("json", SCHEMA)),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, ("json", SCHEMA)),
    ({"structured_outputs": {"json_object": True}}, ("json_object", True)),
    ({"structured_outputs": {"regex": "a+"}}, ("regex", "a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, ("choice", ["a", "b"])),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, ("grammar", 'root ::= "a"')),
    ({"guided_json": SCHEMA}, ("json", SCHEMA)),
    ({"guided_json": json.dumps(SCHEMA)}, ("json", SCHEMA)),
    ({"guided_regex": "a+"}, ("regex", "a+")),
    ({"guided_choice": ["a", "b"]}, ("choice", ["a", "b"])),
    ({"guided_grammar": 'root ::= "a"'}, ("grammar", 'root ::= "a"')),
]


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize(("fields", "expected"), FIELDS, ids=str)
def test_every_way_to_say_it_means_the_same(server, endpoint, fields, expected):
    reply = getattr(server, endpoint)(**fields)
    assert reply.status == 200, reply.body
    form = form_of(server)
    value = json.loads(form.source) if expected[0] == "json" else getattr(form, expected[0])
    assert (form.kind, value) == expected
    if expected[0] == "json":
        assert list(value["properties"]) == ["b", "a"], "the order of properties is kept"


def test_a_structural_tag_in_either_notation(server):
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}
    old = {
        "type": "structural_tag",
        "triggers": ["<"],
        "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}],
    }
    for response_format in (tag, old):
        assert server.chat(response_format=response_format).status == 200
        assert json.loads(form_of(server).structural_tag) == response_format


def test_options_go_along(server):
    assert server.chat(guided_json={}, guided_whitespace_pattern="[ ]").status == 200
    assert form_of(server).whitespace_pattern == "[ ]"
    given = {"json": {}, "disable_any_whitespace": True, "disable_additional_properties": True}
    assert server.complete(structured_outputs=given).status == 200
    assert form_of(server).disable_any_whitespace
    assert form_of(server).disable_additional_properties
    assert server.chat(guided_json={}, guided_decoding_backend="guidance").status == 200


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None, "structured_outputs": None, "guided_json": None},
    ],
    ids=str,
)
def test_free_text_is_the_default(server, endpoint, fields):
    assert getattr(server, endpoint)(**fields).status == 200
    assert form_of(server) is None


REFUSED = [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": ["text"]}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": 3}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": "{}"}}},
        "response_format.json_schema.schema",
    ),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"regexp": "a"}}, "regexp"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
    (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
    ),
    ({"structured_outputs": {"regex": "a", "backend": "outlines"}}, "structured_outputs.backend"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"guided_regex": "a", "guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
    ({"guided_regex": "a", "guided_json": {}}, "guided_json"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format"),
    ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "structured_outputs"),
]


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize(("fields", "parameter"), REFUSED, ids=str)
def test_what_is_wrong_is_named_as_the_client_sent_it(server, endpoint, fields, parameter):
    num_calls = len(server.engine.calls)
    reply = getattr(server, endpoint)(**fields)
    assert (reply.status, reply.error["param"]) == (400, parameter), reply.body
    assert len(server.engine.calls) == num_calls or parameter.endswith("backend")


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_b065_deep_nesting_is_a_400(server, endpoint):
    deep = '{"items":' * 60_000 + "{}" + "}" * 60_000
    path = "/v1/chat/completions" if endpoint == "chat" else "/v1/completions"
    start = '{"messages": [{"role": "user", "content": "x"}], "prompt": "x", '
    for field in (
        f'"response_format": {{"type": "json_schema", "json_schema": {{"schema": {deep}}}}}',
        f'"structured_outputs": {{"json": {deep}}}',
        f'"structured_outputs": {{"json": {json.dumps(deep)}}}',
        f'"guided_json": {deep}',
        f'"guided_regex": "{"(" * 60_000}a{")" * 60_000}"',
        f'"guided_grammar": "root ::= {"(" * 60_000}[a]{")" * 60_000}"',
    ):
        reply = server.request("POST", path, f"{start}{field}}}".encode())
        assert reply.status == 400, reply.body[:200]
        assert len(reply.body) < 2_000
    assert server.get("/health").status == 200
