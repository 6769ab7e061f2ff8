"""What Prometheus sees of a router. No label has values that clients choose."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenmill.entrypoints.http.metrics import exposed
from tokenmill.entrypoints.http.record import RequestRecord
from tokenmill.entrypoints.router.backend import Backend
from tokenmill.entrypoints.router.policies import Pick, Picker
from tokenmill.entrypoints.router.routing_keys import BLOCK_BYTES, RoutingKeys
from tokenmill.entrypoints.router.upstream import UpstreamError

_PREFIX = "tokenmill_router"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 1000)


class RouterMetrics:
    """In a registry of their own."""

    def __init__(self, backends: Sequence[Backend], picker: Picker) -> None:
        self.registry = CollectorRegistry()
        self._requests = self._counter("requests", "Answers to clients.", "handler", "status")
        self._seconds = self._histogram("request_seconds", "Until the end of an answer.", "handler")
        self._answers = self._counter(
            "backend_answers", "Answers of backends to what was sent.", "backend", "status"
        )
        self._errors = self._counter(
            "backend_errors", "Connections that failed, by how.", "backend", "kind"
        )
        self._picks = self._counter("picks", "Requests sent, by why there.", "backend", "reason")
        self._prompt = self._counter(
            "prompt_bytes", "Bytes of prompts, in whole pieces.", "backend"
        )
        self._matched = self._counter(
            "prompt_bytes_matched", "Of these, those that it was sent before.", "backend"
        )
        self._head = self._histogram(
            "backend_first_byte_seconds", "Until an answer begins.", "backend"
        )
        self.registry.register(_BackendCollector(backends, picker))
        ProcessCollector(registry=self.registry)

    def count_request(self, record: RequestRecord, handler: str) -> None:
        """A client's request has ended; 499 is one that left."""
        self._requests.labels(handler, str(record.status)).inc()
        self._seconds.labels(handler).observe(time.monotonic() - record.started)

    def count_pick(self, pick: Pick, keys: RoutingKeys) -> None:
        """A request is sent."""
        url = pick.backend.url
        self._picks.labels(url, pick.reason).inc()
        self._prompt.labels(url).inc(BLOCK_BYTES * len(keys.blocks))
        self._matched.labels(url).inc(BLOCK_BYTES * pick.num_matched)

    def count_answer(self, backend: Backend, status: int, seconds: float) -> None:
        """An answer begins."""
        self._answers.labels(backend.url, str(status)).inc()
        self._head.labels(backend.url).observe(seconds)

    def count_error(self, backend: Backend, error: UpstreamError) -> None:
        """A connection failed."""
        self._errors.labels(backend.url, error.kind).inc()

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """All metrics as text, and its content type."""
        return exposed(self.registry, accept)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{_PREFIX}:{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(
            f"{_PREFIX}:{name}", text, labels, buckets=_SECONDS, registry=self.registry
        )


class _BackendCollector(Collector):
    """The backends as they are when somebody scrapes."""

    def __init__(self, backends: Sequence[Backend], picker: Picker) -> None:
        self._backends = backends
        self._picker = picker

    def collect(self) -> Iterable[Metric]:
        yield self._gauge("in_flight", "Requests under way.", lambda each: each.in_flight)
        yield self._gauge(
            "backend_available", "Whether requests are sent there.", lambda each: each.is_available
        )
        yield self._gauge(
            "index_blocks", "Pieces of prompts that are remembered.", self._picker.num_blocks
        )
        family = CounterMetricFamily(
            f"{_PREFIX}:ejections", "Times that it was left alone.", labels=("backend",)
        )
        for each in self._backends:
            family.add_metric((each.url,), each.num_ejections)
        yield family

    def _gauge(
        self, name: str, text: str, value_of: Callable[[Backend], float]
    ) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"{_PREFIX}:{name}", text, labels=("backend",))
        for each in self._backends:
            family.add_metric((each.url,), value_of(each))
        return family
