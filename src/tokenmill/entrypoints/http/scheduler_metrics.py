"""What the engine's schedulers count, for Prometheus: read when somebody scrapes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenmill.engine.engine_stats import EngineStats
from tokenmill.entrypoints.http.admission import Admission
from tokenmill.entrypoints.http.engine import Engine

if TYPE_CHECKING:
    from tokenmill.features.multimodal.images import Images

LABELS = ("model_name", "engine")
"""The second is a replica's rank, so 0 for most engines."""

_Rows = tuple[tuple[str, Callable[[EngineStats], float], str], ...]
"""Names without their beginning, what they are, and what they tell."""
_GAUGES: _Rows = (
    ("num_requests_running", lambda s: s.num_running, "Sequences that run."),
    ("num_requests_waiting", lambda s: s.num_waiting, "Sequences that wait."),
    ("kv_cache_usage_perc", lambda s: s.kv_cache_usage, "Share of the KV cache in use, 0 to 1."),
    ("gpu_cache_usage_perc", lambda s: s.kv_cache_usage, "Older name of kv_cache_usage_perc."),
)
_COUNTERS: _Rows = (
    ("prefix_cache_queries", lambda s: s.prefix_cache_queries, "Prompt tokens looked up."),
    ("prefix_cache_hits", lambda s: s.prefix_cache_hits, "Of these, tokens found."),
    ("gpu_prefix_cache_queries", lambda s: s.prefix_cache_queries, "Older name."),
    ("gpu_prefix_cache_hits", lambda s: s.prefix_cache_hits, "Older name."),
    ("generation_tokens", lambda s: s.num_output_tokens, "Generated tokens."),
    ("num_preemptions", lambda s: s.num_preemptions, "Times that a sequence lost its blocks."),
    ("corrupted_requests", lambda s: s.num_errors, "Sequences that failed in the engine."),
)
_ENCODER_COUNTERS: _Rows = (
    ("encoder_cache_queries", lambda s: s.encoder_cache_queries, "Images that steps asked for."),
    ("encoder_cache_hits", lambda s: s.encoder_cache_hits, "Of these, images encoded before."),
)
_EXTERNAL_COUNTERS: _Rows = (
    (
        "external_prefix_cache_queries",
        lambda s: s.external_prefix_cache_queries,
        "Prompt tokens looked up outside the pool.",
    ),
    (
        "external_prefix_cache_hits",
        lambda s: s.external_prefix_cache_hits,
        "Of these, tokens whose KV was loaded.",
    ),
)
_DRAFT_COUNTERS: _Rows = (
    ("spec_decode_num_drafts", lambda s: s.num_drafts, "Steps that checked drafts."),
    ("spec_decode_num_draft_tokens", lambda s: s.num_draft_tokens, "Drafts checked."),
    ("spec_decode_num_accepted_tokens", lambda s: s.num_accepted_tokens, "Drafts kept."),
)


class SchedulerCollector(Collector):
    """The engine's own numbers, set before each scrape."""

    def __init__(
        self, engine: Engine, admission: Admission, labels: Sequence[tuple[str, str]]
    ) -> None:
        """`labels` are those of each replica."""
        self.stats = EngineStats()
        self._engine = engine
        self._admission = admission
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        engine, stats = self._engine, self.stats
        drafts = _DRAFT_COUNTERS if engine.config.speculation is not None else ()
        for name, value_of, text in _GAUGES:
            yield self._filled(GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS), value_of)
        external = _EXTERNAL_COUNTERS if engine.config.kv_transfer is not None else ()
        for name, value_of, text in (*_COUNTERS, *external, *drafts):
            yield self._filled(CounterMetricFamily(f"vllm:{name}", text, labels=LABELS), value_of)
        for name, value_of, text in _ENCODER_COUNTERS if engine.config.encoder is not None else ():
            family = CounterMetricFamily(f"tokenmill:{name}", text, labels=LABELS)
            yield self._filled(family, value_of)
        if engine.images is not None:
            yield from self._images(engine.images)
        if drafts:
            yield self._accepted_per_position()
        yield self._filled(
            CounterMetricFamily(
                "tokenmill:core_restarts", "Times that the core was started again.", labels=LABELS
            ),
            lambda each: each.num_restarts,
        )
        is_open = engine.is_ready
        yield self._filled(
            GaugeMetricFamily(
                "tokenmill:engine_ready", "Whether requests are taken.", labels=LABELS
            ),
            lambda each: is_open and each.is_healthy,
        )
        yield self._sleep_state()
        refused = CounterMetricFamily(
            "tokenmill:requests_refused", "Requests answered 429.", labels=LABELS
        )
        refused.add_metric(self._labels[0], stats.num_refused + self._admission.num_refused)
        yield refused
        if engine.config.lora is not None:
            yield self._adapters(engine.config.lora.max_loras)
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Why they wait.", labels=(*LABELS, "reason")
        )
        for labels, part in self._parts():
            waiting.add_metric((*labels, "capacity"), part.num_waiting)
        yield waiting

    def _parts(self) -> Iterable[tuple[tuple[str, str], EngineStats]]:
        """Each replica's labels and numbers."""
        return zip(self._labels, self.stats.replicas or [self.stats], strict=True)

    def _filled(self, family: Metric, value_of: Callable[[EngineStats], float]) -> Metric:
        assert isinstance(family, GaugeMetricFamily | CounterMetricFamily)
        for labels, part in self._parts():
            family.add_metric(labels, value_of(part))
        return family

    def _sleep_state(self) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            "vllm:engine_sleep_state",
            "1 for what the engine is: awake, or asleep without KV or without weights as well.",
            labels=(*LABELS, "sleep_state"),
        )
        level = self._engine.operations.state.level or 0
        for labels in self._labels:
            for at, name in enumerate(("awake", "weights_offloaded", "discard_all")):
                family.add_metric((*labels, name), level == at)
        return family

    def _adapters(self, max_loras: int) -> GaugeMetricFamily:
        labels = (*LABELS, "max_lora", "running_lora_adapters", "waiting_lora_adapters")
        family = GaugeMetricFamily(
            "vllm:lora_requests_info", "Adapters with unfinished requests, and when.", labels=labels
        )
        names = (self.stats.running_adapters, self.stats.waiting_adapters)
        values = (*self._labels[0], str(max_loras), *(",".join(each) for each in names))
        family.add_metric(values, time.time())
        return family

    def _images(self, images: Images) -> Iterable[Metric]:
        for name, value, text in (
            ("queries", images.num_queries, "Images looked up among those that are kept."),
            ("hits", images.num_hits, "Of these, images found."),
        ):
            family = CounterMetricFamily(f"vllm:mm_cache_{name}", text, labels=LABELS)
            family.add_metric(self._labels[0], value)
            yield family

    def _accepted_per_position(self) -> CounterMetricFamily:
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts kept, by their place behind the known tokens.",
            labels=(*LABELS, "position"),
        )
        for labels, part in self._parts():
            for position, count in enumerate(part.num_accepted_tokens_per_pos):
                family.add_metric((*labels, str(position)), count)
        return family
