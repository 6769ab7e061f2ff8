"""Spans of requests, as a collector gets them."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from helpers.fake_engine import FakeEngine, Script
from helpers.live_server import LiveServer
from tokenmill.config.serve_args import ServeArgs
from tokenmill.contracts.request import FinishReason
from tokenmill.entrypoints.http.traces import NoTraces, check_traces
from tokenmill.errors import ConfigError

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SERVER_KIND, ERROR = 2, 2


@contextmanager
def collector():
    """A collector's URL, and the messages that it has taken."""
    taken = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            taken.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args):
            """Quietly."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", taken
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def run(*requests, author=None, path="/v1/traces"):
    """Spans of these requests, each (path, body, headers); and their attributes."""
    engine = FakeEngine() if author is None else FakeEngine(author)
    with collector() as (url, taken):
        with LiveServer(engine, otlp_traces_endpoint=f"{url}{path}") as server:
            for target, body, headers in requests:
                server.request("POST", target, body, headers)
            server.state.traces.close()
        return [
            (resource, span)
            for where, message in taken
            if where == "/v1/traces"
            for resource in message.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


def attributes(owner):
    values = {}
    for each in owner.attributes:
        value = each.value
        kind = value.WhichOneof("value")
        values[each.key] = (
            [v.string_value for v in value.array_value.values]
            if kind == "array_value"
            else getattr(value, kind)
        )
    return values


COMPLETION = {"prompt": "one two", "max_tokens": 7, "temperature": 0.5, "top_p": 0.9}


@pytest.mark.parametrize("path", ["/v1/traces", "", "/"])
def test_a_request_is_a_span_with_the_names_of_vllm(path):
    before = time.time_ns()
    headers = {"x-request-id": "mine", "traceparent": f"00-{TRACE}-{PARENT}-01"}
    ((resource, span),) = run(("/v1/completions", COMPLETION, headers), path=path)
    assert attributes(resource.resource)["service.name"] == "tokenmill"
    assert (span.name, span.kind) == ("llm_request", SERVER_KIND)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert before <= span.start_time_unix_nano <= span.end_time_unix_nano <= time.time_ns()
    found = attributes(span)
    times = {name: found.pop(name) for name in list(found) if ".latency." in name}
    assert found == {
        "gen_ai.response.model": "fake/model",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.request.id": "mine",
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.usage.prompt_tokens": found["gen_ai.usage.prompt_tokens"],
        "gen_ai.usage.completion_tokens": found["gen_ai.usage.prompt_tokens"] + 1,  # the end
    }
    assert found["gen_ai.usage.prompt_tokens"] > 1
    assert {name.removeprefix("gen_ai.latency.") for name in times} == {
        "time_in_queue",
        "time_to_first_token",
        "e2e",
        "time_in_model_prefill",
        "time_in_model_decode",
        "time_in_model_inference",
    }
    assert times["gen_ai.latency.e2e"] >= times["gen_ai.latency.time_to_first_token"] >= 0


def test_each_prompt_has_a_span_in_the_trace_of_its_request():
    body = {**COMPLETION, "prompt": ["one", "two", "three"], "stream": True, "n": 2}
    chat = {"messages": [{"role": "user", "content": "one"}]}
    spans = run(
        ("/v1/completions", body, {"traceparent": f"00-{TRACE}-{PARENT}-01"}),
        ("/v1/chat/completions", chat, {}),
        ("/v1/chat/completions", chat, {"traceparent": "nonsense"}),
    )
    traces = [span.trace_id.hex() for _, span in spans]
    assert traces[:3] == [TRACE] * 3
    assert len({*traces[3:], TRACE}) == 3
    assert [bool(span.parent_span_id) for _, span in spans] == [True] * 3 + [False] * 2
    assert attributes(spans[0][1])["gen_ai.usage.num_sequences"] == 2


def test_headers_that_are_no_trace_context_are_passed_over_in_silence(caplog):
    given = [
        {"traceparent": "00-" + "z" * 5000},
        {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "to be told to nobody"},
    ]
    spans = run(*(("/v1/completions", COMPLETION, each) for each in given))
    first, second = [span for _, span in spans]
    assert (first.parent_span_id, second.parent_span_id.hex()) == (b"", PARENT)
    assert second.trace_state == ""
    assert "told" not in caplog.text


def test_a_client_that_wants_no_trace_gets_none():
    assert run(("/v1/completions", COMPLETION, {"traceparent": f"00-{TRACE}-{PARENT}-00"})) == []


def test_a_refused_request_is_no_span_and_a_failed_one_says_so():
    def fails(token_ids, params):
        return Script(token_ids, FinishReason.ERROR, "it broke")

    spans = run(
        ("/v1/completions", {"prompt": "x", "max_tokens": -1}, {}),
        ("/v1/completions", COMPLETION, {}),
        author=fails,
    )
    ((_, span),) = spans
    assert span.status.code == ERROR
    assert attributes(span)["gen_ai.response.finish_reasons"] == ["error"]


def test_a_collector_that_is_not_there_holds_nobody_up():
    with LiveServer(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces") as server:
        assert server.post("/v1/completions", COMPLETION).status == 200


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://localhost:4317", "http://"])
def test_what_is_no_url_of_a_collector_is_refused(endpoint):
    with pytest.raises(ConfigError, match="otlp_traces_endpoint"):
        check_traces(ServeArgs(otlp_traces_endpoint=endpoint))


def test_off_is_an_object():
    with LiveServer() as server:
        assert isinstance(server.state.traces, NoTraces)
