"""What an `LLM` has done, in the numbers of a server's metrics, and by their names."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from tokenmill.config.engine_config import EngineConfig
from tokenmill.contracts.request import SchedulerStats
from tokenmill.engine.input_processor import RequestParams
from tokenmill.observe.metrics import (
    COUNTS,
    SECONDS,
    TOKEN_SECONDS,
    Buckets,
    Counter,
    Gauge,
    Metric,
    Vector,
    one_two_five,
)
from tokenmill.outputs import RequestOutput
from tokenmill.sampling_params import SamplingParams

_REASONS = ("stop", "length", "repetition", "abort", "error")


class OfflineMetrics:
    """Counts requests when they have ended."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        lengths = one_two_five(1 + config.model.max_model_len)
        self._num_prompt = self._num_cached = self._num_output = 0
        self._reasons = dict.fromkeys(_REASONS, 0)
        self._histograms = {
            "time_to_first_token_seconds": Buckets(SECONDS),
            "request_time_per_output_token_seconds": Buckets(TOKEN_SECONDS),
            "e2e_request_latency_seconds": Buckets(SECONDS),
            "request_queue_time_seconds": Buckets(SECONDS),
            "request_prefill_time_seconds": Buckets(SECONDS),
            "request_decode_time_seconds": Buckets(SECONDS),
            "request_inference_time_seconds": Buckets(SECONDS),
            "request_prompt_tokens": Buckets(lengths),
            "request_generation_tokens": Buckets(lengths),
            "request_params_n": Buckets(COUNTS),
            "request_params_max_tokens": Buckets(lengths),
        }

    def note(self, output: RequestOutput, params: RequestParams) -> None:
        """Count a request by its last output, with all its sequences."""
        num_prompt = len(output.prompt_token_ids)
        num_output = sum(len(sequence.token_ids) for sequence in output.outputs)
        self._num_prompt += num_prompt
        self._num_cached += output.num_cached_tokens
        self._num_output += num_output
        for sequence in output.outputs:
            if sequence.finish_reason in self._reasons:
                self._reasons[sequence.finish_reason] += 1
        self._observe("request_prompt_tokens", num_prompt)
        if isinstance(params, SamplingParams):
            self._observe("request_generation_tokens", num_output)
            self._observe("request_params_n", params.n)
            self._observe("request_params_max_tokens", params.max_tokens)
        self._note_times(output, num_output)

    def _note_times(self, output: RequestOutput, num_output: int) -> None:
        times = output.metrics
        arrival, scheduled = times.arrival_time, times.first_scheduled_time
        first, last = times.first_token_time, times.last_token_time
        self._observe("e2e_request_latency_seconds", time.monotonic() - arrival)
        for name, begin, end in (
            ("time_to_first_token_seconds", arrival, first),
            ("request_queue_time_seconds", arrival, scheduled),
            ("request_prefill_time_seconds", scheduled, first),
            ("request_decode_time_seconds", first, last),
            ("request_inference_time_seconds", scheduled, last),
        ):
            if begin is not None and end is not None:
                self._observe(name, end - begin)
        num_later = num_output // max(len(output.outputs), 1) - 1
        if first is not None and last is not None and num_later > 0:
            self._observe("request_time_per_output_token_seconds", (last - first) / num_later)

    def _observe(self, name: str, value: float | None) -> None:
        if value is not None:
            self._histograms[name].observe(value)

    def snapshot(self, stats: Sequence[SchedulerStats]) -> list[Metric]:
        """All metrics as of now; `stats` are those of each core."""
        model = {"model_name": self._config.model.name}
        one = {"engine": "0"} if len(stats) == 1 else {}  # nobody notes who has computed a request
        return [
            *self._requests({**model, **one}),
            *(
                metric
                for rank, each in enumerate(stats)
                for metric in self._core({**model, "engine": str(rank)}, each)
            ),
        ]

    def _requests(self, labels: Mapping[str, str]) -> Iterator[Metric]:
        yield Counter("vllm:prompt_tokens", labels, self._num_prompt)
        yield Counter("vllm:prompt_tokens_cached", labels, self._num_cached)
        yield Counter("vllm:generation_tokens", labels, self._num_output)
        for reason, count in self._reasons.items():
            yield Counter("vllm:request_success", {**labels, "finished_reason": reason}, count)
        for name, buckets in self._histograms.items():
            yield buckets.histogram(f"vllm:{name}", labels)

    def _core(self, labels: Mapping[str, str], stats: SchedulerStats) -> Iterator[Metric]:
        yield Gauge("vllm:num_requests_running", labels, stats.num_running)
        yield Gauge("vllm:num_requests_waiting", labels, stats.num_waiting)
        yield Gauge("vllm:kv_cache_usage_perc", labels, stats.kv_cache_usage)
        yield Counter("vllm:prefix_cache_queries", labels, stats.prefix_cache_queries)
        yield Counter("vllm:prefix_cache_hits", labels, stats.prefix_cache_hits)
        yield Counter("vllm:num_preemptions", labels, stats.num_preemptions)
        yield Counter("vllm:corrupted_requests", labels, stats.num_errors)
        if self._config.kv_transfer is not None:
            queries, hits = stats.external_prefix_cache_queries, stats.external_prefix_cache_hits
            yield Counter("vllm:external_prefix_cache_queries", labels, queries)
            yield Counter("vllm:external_prefix_cache_hits", labels, hits)
        if self._config.speculation is not None:
            accepted = stats.num_accepted_tokens
            places = list(stats.num_accepted_tokens_per_pos)
            yield Counter("vllm:spec_decode_num_drafts", labels, stats.num_drafts)
            yield Counter("vllm:spec_decode_num_draft_tokens", labels, stats.num_draft_tokens)
            yield Counter("vllm:spec_decode_num_accepted_tokens", labels, accepted)
            yield Vector("vllm:spec_decode_num_accepted_tokens_per_pos", labels, places)
