"""OpenTelemetry: one span for each prompt that is generated for, on the server's side.

Names of attributes are those of vLLM. A client's trace goes on in the span (W3C Trace Context,
https://www.w3.org/TR/trace-context/). Spans leave in batches from a thread of the library's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from tokenmill.config.serve_args import ServeArgs
from tokenmill.entrypoints.http.auth import Headers
from tokenmill.entrypoints.http.progress import Progress
from tokenmill.entrypoints.http.record import RequestRecord
from tokenmill.errors import ConfigError, shown

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_PATH = "/v1/traces"
_HEADERS = (b"traceparent", b"tracestate")
_FLUSH_MS = 3_000
"""How long the last spans may take to leave when the server ends."""


class Traces(Protocol):
    """Is told of the prompts of all requests."""

    def context_of(self, headers: Headers) -> Any:
        """The trace that a client's request belongs to."""
        ...

    def end_of_prompt(self, progress: Progress, record: RequestRecord) -> None:
        """A prompt's generation has ended."""
        ...

    def close(self) -> None:
        """Let the last spans leave; takes a few seconds where nobody takes them."""
        ...


class NoTraces:
    """Nobody wants spans."""

    def context_of(self, headers: Headers) -> Any:
        return None

    def end_of_prompt(self, progress: Progress, record: RequestRecord) -> None:
        """It is not told."""

    def close(self) -> None:
        """There are none."""


def make_traces(args: ServeArgs, model_name: str) -> Traces:
    """Spans to where the settings say. Raises `ConfigError` as `check_traces` does."""
    endpoint = check_traces(args)
    if endpoint is None:
        return NoTraces()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OtlpTraces(OTLPSpanExporter(endpoint=endpoint), model_name)


def check_traces(args: ServeArgs) -> str | None:
    """Where spans go, if anywhere. Raises `ConfigError` for no URL, and without the library."""
    given = args.otlp_traces_endpoint
    if given is None:
        return None
    parts = urlsplit(given)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"otlp_traces_endpoint={shown(given)} must be the URL of a collector that takes OTLP"
            f" over HTTP (protobuf), such as http://localhost:4318{_PATH}."
        )
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint needs OpenTelemetry, and {error.name} is missing:"
            f" pip install 'tokenmill[otel]'."
        ) from error
    return given if parts.path.strip("/") else f"{given.rstrip('/')}{_PATH}"


class OtlpTraces:
    """Spans for an exporter. Sampling and the service's name are set by the library's environment
    variables (OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME, ...).
    """

    def __init__(self, exporter: SpanExporter, model_name: str) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        # It warns of a client's tracestate that is malformed, with all of its text.
        logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)
        name = Resource({"service.name": "tokenmill"})
        resource = Resource.create().merge(name).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tokenmill")
        self._propagator = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER
        self._error = Status(StatusCode.ERROR)
        self._model_name = model_name

    def context_of(self, headers: Headers) -> Any:
        found = {
            name.decode("ascii"): value.decode("latin-1")
            for name, value in headers
            if name in _HEADERS
        }
        return self._propagator.extract(found) if found else None

    def end_of_prompt(self, progress: Progress, record: RequestRecord) -> None:
        arrival = progress.arrival_time
        if arrival is None:  # nothing came of it
            return
        now = time.monotonic()
        epoch = time.time() - now
        span = self._tracer.start_span(
            "llm_request",
            context=record.trace_context,
            kind=self._kind,
            attributes=dict(_known(self._attributes(progress, record, now))),
            start_time=_ns(epoch + arrival),
        )
        if "error" in progress.finish_reasons:
            span.set_status(self._error)
        span.end(_ns(epoch + now))

    def close(self) -> None:
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()

    def _attributes(
        self, progress: Progress, record: RequestRecord, now: float
    ) -> Mapping[str, Any]:
        params, arrival = progress.params, progress.arrival_time
        scheduled, first = progress.first_scheduled_time, progress.first_token_time
        last = progress.last_token_time
        return {
            "gen_ai.response.model": self._model_name,
            "gen_ai.response.finish_reasons": progress.finish_reasons or None,
            "gen_ai.request.id": record.request_id,
            "gen_ai.request.n": params.n,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.num_sequences": params.n,
            "gen_ai.usage.prompt_tokens": progress.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": progress.num_output_tokens,
            "gen_ai.latency.time_in_queue": _between(arrival, scheduled),
            "gen_ai.latency.time_to_first_token": _between(arrival, first),
            "gen_ai.latency.e2e": _between(arrival, now),
            "gen_ai.latency.time_in_model_prefill": _between(scheduled, first),
            "gen_ai.latency.time_in_model_decode": _between(first, last),
            "gen_ai.latency.time_in_model_inference": _between(scheduled, last),
        }


def _known(attributes: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    return ((name, value) for name, value in attributes.items() if value is not None)


def _between(begin: float | None, end: float | None) -> float | None:
    """Seconds."""
    return None if begin is None or end is None else end - begin


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
