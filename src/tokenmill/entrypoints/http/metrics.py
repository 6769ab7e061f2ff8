"""What Prometheus sees: vLLM's names where they apply, the older ones that dashboards still use,
and the server's own requests.

Token counts and times are noted as outputs come; the scheduler's numbers are read from the engine
when somebody scrapes. No label has values that clients choose.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST as PLAIN_TYPE
from prometheus_client.exposition import generate_latest as generate_plain
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS_TYPE
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from tokenmill.entrypoints.http.admission import Admission
from tokenmill.entrypoints.http.engine import Engine
from tokenmill.entrypoints.http.progress import Progress
from tokenmill.entrypoints.http.record import RequestRecord
from tokenmill.entrypoints.http.scheduler_metrics import LABELS, SchedulerCollector
from tokenmill.observe.metrics import COUNTS, SECONDS, TOKEN_SECONDS, one_two_five

FINISH_REASONS = ("stop", "length", "repetition", "abort", "error")
_METHODS = frozenset(("GET", "POST", "DELETE", "OPTIONS", "HEAD"))
_OLDER_NAMES = {"inter_token_latency_seconds": "time_per_output_token_seconds"}

disable_created_metrics()  # type: ignore[no-untyped-call]  # a time stamp beside every counter, which nobody reads


class ServerMetrics:
    """One server's metrics, in a registry of their own."""

    def __init__(self, engine: Engine, admission: Admission, model_name: str) -> None:
        self._engine = engine
        self._admission = admission
        self.registry = CollectorRegistry()
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        families = _Families(self.registry, 1 + engine.config.model.max_model_len)
        labels = [(model_name, str(rank)) for rank in range(engine.config.data_parallel_size)]
        self._engines = [_EngineMetrics(families, each) for each in labels]
        self._make_http_metrics()
        info = Gauge(
            "vllm:cache_config_info",
            "Settings of the KV cache.",
            (*LABELS, "block_size", "num_gpu_blocks", "enable_prefix_caching"),
            registry=self.registry,
        )
        for each in labels:
            info.labels(*each, *_cache_labels(engine)).set(1)
        self._scheduler = SchedulerCollector(engine, admission, labels)
        self.registry.register(self._scheduler)
        ProcessCollector(registry=self.registry)

    def _make_http_metrics(self) -> None:
        self._http = Counter(
            "http_requests",
            "HTTP requests; 499 is a client that left.",
            ("method", "handler", "status"),
            registry=self.registry,
        )
        self._http_seconds = Histogram(
            "http_request_duration_seconds",
            "Until the end of the answer.",
            ("method", "handler"),
            buckets=SECONDS,
            registry=self.registry,
        )

    def new_tokens(self, progress: Progress, num_new: int, *, stream: bool) -> None:
        """Note an output that `progress` has just taken in. The only call per token."""
        if num_new == 0:
            return
        self.num_output_tokens += num_new
        last, previous = progress.last_token_time, progress.previous_token_time
        if previous is None:
            self._note_prompt(progress)
        elif stream and last is not None:
            self._engines[progress.data_parallel_rank].gaps.observe(last - previous)

    def pooled(self, progress: Progress) -> None:
        """Note a prompt that has ended with a result in place of tokens."""
        self._note_prompt(progress)

    def _note_prompt(self, progress: Progress) -> None:
        self.num_prompt_tokens += progress.num_prompt_tokens
        self._engines[progress.data_parallel_rank].note_prompt(progress)

    def end_of_prompt(self, progress: Progress) -> None:
        """A prompt's generation has ended, well or not; called once for each."""
        if progress.arrival_time is not None:
            self._admission.finished(time.monotonic() - progress.arrival_time)
        self._engines[progress.data_parallel_rank].note_end(progress)

    def count_request(self, record: RequestRecord, handler: str) -> None:
        """Note an HTTP request that has ended; `handler` is its route, not its path."""
        method = record.method if record.method in _METHODS else "other"
        self._http.labels(method, handler, str(record.status)).inc()
        self._http_seconds.labels(method, handler).observe(time.monotonic() - record.started)

    async def exposition(self, accept: str) -> tuple[bytes, str]:
        """All metrics as text, and its content type."""
        self._scheduler.stats = await self._engine.stats()
        return exposed(self.registry, accept)


def exposed(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """A registry's metrics as text of the kind that `Accept` asks for, and its content type."""
    if "application/openmetrics-text" in accept:
        text = generate_openmetrics(registry)  # type: ignore[no-untyped-call]
        return text, OPENMETRICS_TYPE
    return generate_plain(registry), PLAIN_TYPE


class _Families:
    """Metrics of requests, without the labels of an engine."""

    def __init__(self, registry: CollectorRegistry, longest: int) -> None:
        """`longest` is the most tokens of a request."""
        self._registry = registry
        lengths = one_two_five(longest)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests.")
        self.prompt_cached = self._counter(
            "prompt_tokens_cached", "Of these, tokens from the prefix cache."
        )
        self.by_source = self._counter(
            "prompt_tokens_by_source", "Prompt tokens by where their KV came from.", "source"
        )
        self.success = self._counter(
            "request_success", "Sequences that have ended, by the reason.", "finished_reason"
        )
        self.first = self._histogram("time_to_first_token_seconds", SECONDS)
        self.gaps = self._histogram("inter_token_latency_seconds", TOKEN_SECONDS)
        self.per_token = self._histogram("request_time_per_output_token_seconds", TOKEN_SECONDS)
        self.whole = self._histogram("e2e_request_latency_seconds", SECONDS)
        self.queued = self._histogram("request_queue_time_seconds", SECONDS)
        self.prefill = self._histogram("request_prefill_time_seconds", SECONDS)
        self.decode = self._histogram("request_decode_time_seconds", SECONDS)
        self.inference = self._histogram("request_inference_time_seconds", SECONDS)
        self.prompt_lengths = self._histogram("request_prompt_tokens", lengths)
        self.computed = self._histogram("request_prefill_kv_computed_tokens", lengths)
        self.output_lengths = self._histogram("request_generation_tokens", lengths)
        self.n = self._histogram("request_params_n", COUNTS)
        self.max_tokens = self._histogram("request_params_max_tokens", lengths)

    def _counter(self, name: str, text: str, *more_labels: str) -> Counter:
        return Counter(f"vllm:{name}", text, (*LABELS, *more_labels), registry=self._registry)

    def _histogram(self, name: str, buckets: Sequence[float]) -> Histogram:
        text = name.replace("_", " ").capitalize() + "."
        family = Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=self._registry)
        if name in _OLDER_NAMES:
            self._registry.register(_Alias(family, f"vllm:{_OLDER_NAMES[name]}"))
        return family


class _EngineMetrics:
    """The same with the labels of one replica."""

    def __init__(self, families: _Families, labels: tuple[str, str]) -> None:
        self._prompt_tokens = families.prompt_tokens.labels(*labels)
        self._prompt_cached = families.prompt_cached.labels(*labels)
        self._computed_tokens = families.by_source.labels(*labels, "local_compute")
        self._cached_tokens = families.by_source.labels(*labels, "local_cache_hit")
        self._loaded_tokens = families.by_source.labels(*labels, "external_kv_transfer")
        self._success = {
            reason: families.success.labels(*labels, reason) for reason in FINISH_REASONS
        }
        self._first = families.first.labels(*labels)
        self.gaps = families.gaps.labels(*labels)
        self._per_token = families.per_token.labels(*labels)
        self._whole = families.whole.labels(*labels)
        self._queued = families.queued.labels(*labels)
        self._prefill = families.prefill.labels(*labels)
        self._decode = families.decode.labels(*labels)
        self._inference = families.inference.labels(*labels)
        self._prompt_lengths = families.prompt_lengths.labels(*labels)
        self._computed = families.computed.labels(*labels)
        self._output_lengths = families.output_lengths.labels(*labels)
        self._n = families.n.labels(*labels)
        self._max_tokens = families.max_tokens.labels(*labels)

    def note_prompt(self, progress: Progress) -> None:
        """A prompt has been computed."""
        num_computed = progress.num_prompt_tokens - progress.num_cached_tokens
        self._prompt_tokens.inc(progress.num_prompt_tokens)
        self._prompt_cached.inc(progress.num_cached_tokens)
        self._cached_tokens.inc(progress.num_cached_tokens - progress.num_external_tokens)
        self._loaded_tokens.inc(progress.num_external_tokens)
        self._computed_tokens.inc(num_computed)
        self._prompt_lengths.observe(progress.num_prompt_tokens)
        self._computed.observe(num_computed)
        _observe(self._first, progress.arrival_time, progress.first_token_time)

    def note_end(self, progress: Progress) -> None:
        """A prompt's generation has ended."""
        missing = progress.params.n - len(progress.finish_reasons)
        for reason in progress.finish_reasons + ["abort"] * missing:
            self._success[reason].inc()
        self._n.observe(progress.params.n)
        if progress.params.max_tokens is not None:
            self._max_tokens.observe(progress.params.max_tokens)
        if progress.arrival_time is None:
            return
        self._whole.observe(time.monotonic() - progress.arrival_time)
        self._output_lengths.observe(progress.num_output_tokens)
        scheduled, first = progress.first_scheduled_time, progress.first_token_time
        last = progress.last_token_time
        _observe(self._queued, progress.arrival_time, scheduled)
        _observe(self._prefill, scheduled, first)
        _observe(self._decode, first, last)
        _observe(self._inference, scheduled, last)
        num_later = progress.num_output_tokens // progress.params.n - 1
        if first is not None and last is not None and num_later > 0:
            self._per_token.observe((last - first) / num_later)


class _Alias(Collector):
    """A metric once more under an older name, at no cost before somebody scrapes."""

    def __init__(self, family: Histogram, name: str) -> None:
        self._family = family
        self._name = name

    def collect(self) -> Iterable[Metric]:
        for metric in self._family.collect():
            alias = Metric(self._name, metric.documentation, metric.type)
            for sample in metric.samples:
                alias.samples.append(
                    sample._replace(name=sample.name.replace(metric.name, self._name))
                )
            yield alias


def _cache_labels(engine: Engine) -> tuple[str, str, str]:
    cache = engine.config.cache
    return str(cache.block_size), str(cache.num_blocks), str(cache.enable_prefix_caching)


def _observe(histogram: Histogram, start: float | None, end: float | None) -> None:
    if start is not None and end is not None:
        histogram.observe(end - start)
