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
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST as PLAIN_TYPE
from prometheus_client.exposition import generate_latest as generate_plain
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS_TYPE
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from tokenmill.engine.engine_stats import EngineStats
from tokenmill.entrypoints.http.admission import Admission
from tokenmill.entrypoints.http.engine import Engine
from tokenmill.entrypoints.http.progress import Progress
from tokenmill.entrypoints.http.record import RequestRecord

FINISH_REASONS = ("stop", "length", "repetition", "abort", "error")
_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_COUNTS = (1, 2, 5, 10, 20)
_OLDER_NAMES = {"inter_token_latency_seconds": "time_per_output_token_seconds"}
_LABELS = ("model_name", "engine")
_ENGINE = "0"

disable_created_metrics()  # type: ignore[no-untyped-call]  # a time stamp beside every counter, which nobody reads


class ServerMetrics:
    """One server's metrics, in a registry of their own."""

    def __init__(self, engine: Engine, admission: Admission, model_name: str) -> None:
        self._engine = engine
        self._admission = admission
        self._labels = (model_name, _ENGINE)
        self.registry = CollectorRegistry()
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self._make_token_metrics(1 + engine.config.model.max_model_len)
        self._make_request_metrics()
        self._scheduler = _SchedulerCollector(engine, admission, self._labels)
        self.registry.register(self._scheduler)
        ProcessCollector(registry=self.registry)

    def _make_token_metrics(self, longest: int) -> None:
        lengths = _one_two_five(longest)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests.")
        self._prompt_cached = self._counter(
            "prompt_tokens_cached", "Of these, tokens from the prefix cache."
        )
        by_source = Counter(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by where their KV came from.",
            (*_LABELS, "source"),
            registry=self.registry,
        )
        self._computed_tokens = by_source.labels(*self._labels, "local_compute")
        self._cached_tokens = by_source.labels(*self._labels, "local_cache_hit")
        self._first = self._histogram("time_to_first_token_seconds", _SECONDS)
        self._gaps = self._histogram("inter_token_latency_seconds", _TOKEN_SECONDS)
        self._per_token = self._histogram("request_time_per_output_token_seconds", _TOKEN_SECONDS)
        self._whole = self._histogram("e2e_request_latency_seconds", _SECONDS)
        self._queued = self._histogram("request_queue_time_seconds", _SECONDS)
        self._prefill = self._histogram("request_prefill_time_seconds", _SECONDS)
        self._decode = self._histogram("request_decode_time_seconds", _SECONDS)
        self._inference = self._histogram("request_inference_time_seconds", _SECONDS)
        self._prompt_lengths = self._histogram("request_prompt_tokens", lengths)
        self._computed = self._histogram("request_prefill_kv_computed_tokens", lengths)
        self._output_lengths = self._histogram("request_generation_tokens", lengths)
        self._n = self._histogram("request_params_n", _COUNTS)
        self._max_tokens = self._histogram("request_params_max_tokens", lengths)

    def _make_request_metrics(self) -> None:
        success = Counter(
            "vllm:request_success",
            "Sequences that have ended, by the reason.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._success = {reason: success.labels(*self._labels, reason) for reason in FINISH_REASONS}
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
            buckets=_SECONDS,
            registry=self.registry,
        )
        Gauge(
            "vllm:cache_config_info",
            "Settings of the KV cache.",
            (*_LABELS, "block_size", "num_gpu_blocks", "enable_prefix_caching"),
            registry=self.registry,
        ).labels(*self._labels, *_cache_labels(self._engine)).set(1)

    def new_tokens(self, progress: Progress, num_new: int, *, stream: bool) -> None:
        """Note an output that `progress` has just taken in. The only call per token."""
        if num_new == 0:
            return
        self.num_output_tokens += num_new
        last, previous = progress.last_token_time, progress.previous_token_time
        if previous is None:
            self._note_prompt(progress)
        elif stream and last is not None:
            self._gaps.observe(last - previous)

    def pooled(self, progress: Progress) -> None:
        """Note a prompt that has ended with a result in place of tokens."""
        self._note_prompt(progress)

    def _note_prompt(self, progress: Progress) -> None:
        num_computed = progress.num_prompt_tokens - progress.num_cached_tokens
        self.num_prompt_tokens += progress.num_prompt_tokens
        self._prompt_tokens.inc(progress.num_prompt_tokens)
        self._prompt_cached.inc(progress.num_cached_tokens)
        self._cached_tokens.inc(progress.num_cached_tokens)
        self._computed_tokens.inc(num_computed)
        self._prompt_lengths.observe(progress.num_prompt_tokens)
        self._computed.observe(num_computed)
        _observe(self._first, progress.arrival_time, progress.first_token_time)

    def end_of_prompt(self, progress: Progress) -> None:
        """A prompt's generation has ended, well or not; called once for each."""
        missing = progress.params.n - len(progress.finish_reasons)
        for reason in progress.finish_reasons + ["abort"] * missing:
            self._success[reason].inc()
        self._n.observe(progress.params.n)
        if progress.params.max_tokens is not None:
            self._max_tokens.observe(progress.params.max_tokens)
        if progress.arrival_time is None:
            return
        now = time.monotonic()
        self._admission.finished(now - progress.arrival_time)
        self._whole.observe(now - progress.arrival_time)
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

    def count_request(self, record: RequestRecord, handler: str) -> None:
        """Note an HTTP request that has ended; `handler` is its route, not its path."""
        method = record.method if record.method in ("GET", "POST", "OPTIONS", "HEAD") else "other"
        self._http.labels(method, handler, str(record.status)).inc()
        self._http_seconds.labels(method, handler).observe(time.monotonic() - record.started)

    async def exposition(self, accept: str) -> tuple[bytes, str]:
        """All metrics as text, and its content type."""
        self._scheduler.stats = await self._engine.stats()
        if "application/openmetrics-text" in accept:
            text = generate_openmetrics(self.registry)  # type: ignore[no-untyped-call]
            return text, OPENMETRICS_TYPE
        return generate_plain(self.registry), PLAIN_TYPE

    def _counter(self, name: str, text: str) -> Counter:
        family = Counter(f"vllm:{name}", text, _LABELS, registry=self.registry)
        return family.labels(*self._labels)

    def _histogram(self, name: str, buckets: Sequence[float]) -> Histogram:
        text = name.replace("_", " ").capitalize() + "."
        family = Histogram(f"vllm:{name}", text, _LABELS, buckets=buckets, registry=self.registry)
        if name in _OLDER_NAMES:
            self.registry.register(_Alias(family, f"vllm:{_OLDER_NAMES[name]}"))
        return family.labels(*self._labels)


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


class _SchedulerCollector(Collector):
    """The engine's own numbers, set before each scrape."""

    def __init__(self, engine: Engine, admission: Admission, labels: tuple[str, str]) -> None:
        self.stats = EngineStats()
        self._engine = engine
        self._admission = admission
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        stats = self.stats
        gauges = {
            "num_requests_running": (stats.num_running, "Sequences that run."),
            "num_requests_waiting": (stats.num_waiting, "Sequences that wait."),
            "kv_cache_usage_perc": (stats.kv_cache_usage, "Share of the KV cache in use, 0 to 1."),
            "gpu_cache_usage_perc": (stats.kv_cache_usage, "Older name of kv_cache_usage_perc."),
        }
        counters = {
            "prefix_cache_queries": (stats.prefix_cache_queries, "Prompt tokens looked up."),
            "prefix_cache_hits": (stats.prefix_cache_hits, "Of these, tokens found."),
            "gpu_prefix_cache_queries": (stats.prefix_cache_queries, "Older name."),
            "gpu_prefix_cache_hits": (stats.prefix_cache_hits, "Older name."),
            "generation_tokens": (stats.num_output_tokens, "Generated tokens."),
            "num_preemptions": (stats.num_preemptions, "Times that a sequence lost its blocks."),
            "corrupted_requests": (stats.num_errors, "Sequences that failed in the engine."),
        }
        if self._engine.config.speculation is not None:
            counters |= {
                "spec_decode_num_drafts": (stats.num_drafts, "Steps that checked drafts."),
                "spec_decode_num_draft_tokens": (stats.num_draft_tokens, "Drafts checked."),
                "spec_decode_num_accepted_tokens": (stats.num_accepted_tokens, "Drafts kept."),
            }
            yield self._accepted_per_position(stats.num_accepted_tokens_per_pos)
        refused = stats.num_refused + self._admission.num_refused
        for name, (value, text) in gauges.items():
            yield self._gauge(f"vllm:{name}", text, value)
        for name, (count, text) in counters.items():
            yield self._counter(f"vllm:{name}", text, count)
        yield self._counter("tokenmill:requests_refused", "Requests answered 429.", refused)
        yield self._counter(
            "tokenmill:core_restarts", "Times that the core was started again.", stats.num_restarts
        )
        yield self._gauge(
            "tokenmill:engine_ready", "Whether requests are taken.", float(self._engine.is_ready)
        )
        lora = self._engine.config.lora
        if lora is not None:
            yield self._adapters(lora.max_loras)
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Why they wait.", labels=(*_LABELS, "reason")
        )
        waiting.add_metric((*self._labels, "capacity"), stats.num_waiting)
        yield waiting

    def _adapters(self, max_loras: int) -> GaugeMetricFamily:
        labels = (*_LABELS, "max_lora", "running_lora_adapters", "waiting_lora_adapters")
        family = GaugeMetricFamily(
            "vllm:lora_requests_info", "Adapters with unfinished requests, and when.", labels=labels
        )
        names = (self.stats.running_adapters, self.stats.waiting_adapters)
        values = (*self._labels, str(max_loras), *(",".join(each) for each in names))
        family.add_metric(values, time.time())
        return family

    def _accepted_per_position(self, counts: Sequence[int]) -> CounterMetricFamily:
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts kept, by their place behind the known tokens.",
            labels=(*_LABELS, "position"),
        )
        for position, count in enumerate(counts):
            family.add_metric((*self._labels, str(position)), count)
        return family

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family


def _cache_labels(engine: Engine) -> tuple[str, str, str]:
    cache = engine.config.cache
    return str(cache.block_size), str(cache.num_blocks), str(cache.enable_prefix_caching)


def _observe(histogram: Histogram, start: float | None, end: float | None) -> None:
    if start is not None and end is not None:
        histogram.observe(end - start)


def _one_two_five(longest: int) -> list[float]:
    """1, 2, 5, 10, ... up to the first that is not below `longest`."""
    buckets: list[float] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            buckets.append(step * scale)
            if step * scale >= longest:
                return buckets
        scale *= 10
