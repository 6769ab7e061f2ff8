"""Messages between the front end and the engine core.

They are msgspec structs, so that the same objects serve in one process and, as msgpack arrays
without field names and defaults, between processes.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from tokenmill.sampling_params import SamplingParams
from tokenmill.tokenizer.reasoning import ReasoningMarkers


class FinishReason(enum.IntEnum):
    """Why a request ended; `str()` gives the word that users see."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4
    """The output repeats itself: `repetition_detection`."""

    def __str__(self) -> str:
        return self.name.lower()


class TensorData(msgspec.Struct, array_like=True, frozen=True):
    """A tensor on its way between processes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class MultiModalFeature(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """An image or a sound that stands for `length` placeholder tokens from `offset` on."""

    content_hash: str
    """Hex SHA-256 of the content and of how it was processed; part of the block hashes."""
    modality: str
    offset: int
    length: int
    inputs: dict[str, TensorData] = {}
    """What the model's encoder takes, by the names of its family."""
    embed_spans: list[tuple[int, int]] = []
    """Which placeholders take embeddings of the encoder: (start, count) from `offset` on, in order
    and apart. The others are tokens like any (row breaks, marks of the ends). Empty: all of them.
    """

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The same, without the short form for all."""
        return self.embed_spans or [(0, self.length)]

    @property
    def runs(self) -> list[tuple[int, int]]:
        """The same as positions in the prompt: (begin, end)."""
        return [(self.offset + start, self.offset + start + n) for start, n in self.spans]

    @property
    def num_embeds(self) -> int:
        """Embeddings that the encoder makes of it."""
        return sum(count for _, count in self.spans)

    @property
    def embeds_end(self) -> int:
        """Position behind the last placeholder that takes an embedding."""
        start, count = self.spans[-1]
        return self.offset + start + count


class AdapterRef(msgspec.Struct, array_like=True, frozen=True):
    """A LoRA adapter, by a key of its weights."""

    name: str
    load_id: str
    """Hex SHA-256 of its content: part of the block hashes, so that other weights under the same
    name share no blocks, and the same weights do."""
    path: str = ""
    """The directory that it is read from where the core does not have it any more."""


class AdapterInfo(msgspec.Struct, array_like=True, frozen=True):
    """What loading an adapter has shown."""

    load_id: str
    rank: int
    """The largest one of its matrices."""
    num_modules: int
    """Projections of the model that it changes."""


class TokenRules(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """Sampling parameters that are text, as the ids that the front end has made of them."""

    bad_words: list[list[int]] = []
    """Sequences of at least one id that must not be completed."""
    reasoning: ReasoningMarkers | None = None
    """The marks that `thinking_token_budget` goes by."""


class PoolingRequest(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """What a pooling model is to make of a prompt; nothing is left open."""

    task: str
    """One of `pooling_params.POOLING_TASKS`."""
    use_activation: bool
    """Whether vectors are normalised, and scores go through the model's activation."""
    dimensions: int | None = None
    """Values of an embedding to keep; None keeps all."""
    second_text_start: int | None = None
    """Place of the first token of a pair's second text; None for a text alone."""


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """A validated request. Nothing in it can be refused any more for what the user wrote."""

    request_id: str
    """The engine's own key, never the client's."""
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    """64 bits; always set, by the user or by the input processor."""
    max_tokens: int
    """`sampling_params.max_tokens` with the context length applied."""
    arrival_time: float
    """Seconds on the monotonic clock."""
    eos_token_id: int | None = None
    """Stops with reason `stop` and no stop_reason; None with `ignore_eos`."""
    stop_token_ids: list[int] = []
    """The user's stop ids and, without `ignore_eos`, the model's further end ids."""
    min_tokens_mask_ids: list[int] = []
    """Every id that could end a request: the model's end ids (also with `ignore_eos`) and the
    user's stop ids. Masked until `min_tokens` are generated; empty if there is no minimum."""
    task: str = "generate"
    initial_output_ids: list[int] = []
    """Tokens generated before, when a request is taken up again: they count as output."""
    priority: int = 0
    """Smaller is earlier; used by the priority policy."""
    cache_salt: str | None = None
    """Part of the first block's hash: only requests with the same salt share blocks."""
    deadline: float | None = None
    """On the monotonic clock; a request that is still unfinished then is aborted."""
    mm_features: list[MultiModalFeature] = []
    adapter: AdapterRef | None = None
    kv_transfer_params: dict[str, Any] = {}
    token_rules: TokenRules | None = None
    pooling: PoolingRequest | None = None
    """Set for a request that ends at its prompt, with a vector in place of tokens."""


class TokenLogprobs(msgspec.Struct, array_like=True, omit_defaults=True):
    """Log-probabilities at one position: the chosen token first, then the k best in order, or ids
    that the request has named.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of the chosen token: entries with a value at least its own, so 1 is best."""
    ranks: list[int] = []
    """Of the others, where they are not the best ones but ids that somebody named."""


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    """What one step brought for one request."""

    request_id: str
    new_token_ids: list[int] = []
    new_logprobs: list[TokenLogprobs] | None = None
    """One per new token, if asked for."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """For prompt tokens 1 to the last; comes once, with the first token."""
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    """The stop id that ended the request."""
    error: str | None = None
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    """Of these, tokens whose KV was loaded from outside the pool."""
    first_scheduled_time: float | None = None
    num_preemptions: int = 0
    pooled: TensorData | None = None
    """float32, the result of a pooling request; it has finished."""
    num_draft_tokens: int = 0
    """Drafts that were checked so far, and of these, those that held."""
    num_accepted_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    """What another engine needs to go on with the prompt's KV, if the request asked for that."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class SchedulerStats(msgspec.Struct, array_like=True, omit_defaults=True):
    """The scheduler's state after a step. Counters only grow."""

    num_running: int = 0
    num_waiting: int = 0
    num_used_blocks: int = 0
    num_blocks: int = 0
    prefix_cache_queries: int = 0
    """Prompt tokens looked up, counted when a request is admitted."""
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_errors: int = 0
    num_drafts: int = 0
    """Steps of a request that checked drafts."""
    num_draft_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = []
    """How often the first, second, ... draft of a request held; empty without speculation."""
    encoder_cache_queries: int = 0
    """Images and the like that steps have asked for, and of these, those that need not be encoded
    since another request has."""
    encoder_cache_hits: int = 0
    external_prefix_cache_queries: int = 0
    """Prompt tokens looked up outside the pool, where they were not found in it, and of these,
    tokens that were loaded."""
    external_prefix_cache_hits: int = 0

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts that held."""
        return sum(self.num_accepted_tokens_per_pos)

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV blocks in use, 0 to 1."""
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True):
    """What one step brought."""

    outputs: list[EngineCoreOutput] = []
    stats: SchedulerStats | None = None
    """Set in messages of a core in its own process; others are asked: `Scheduler.make_stats`."""
