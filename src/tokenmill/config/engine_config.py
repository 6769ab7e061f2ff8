"""What the engine runs with. Frozen and complete; made by `resolve.py` only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenmill.config.kv_events import KVEventsConfig
from tokenmill.config.kv_transfer import KVTransferConfig
from tokenmill.config.multimodal import MultiModalConfig
from tokenmill.config.parallel import ParallelConfig
from tokenmill.config.speculation import SpeculativeConfig, max_drafts
from tokenmill.config.structured_outputs import StructuredOutputsConfig

LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
"""Which numbers a request's log-probabilities are."""


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """How hidden states become vectors or scores."""

    tasks: tuple[str, ...]
    """Of `pooling_params.POOLING_TASKS`, what the model can do; the first is what it is for."""
    pooling_type: str
    """`last`, `cls` or `mean`: which hidden states stand for the prompt."""
    is_causal: bool
    """Whether a token sees those before it only."""
    use_activation: bool
    """Unless a request says otherwise."""
    activation: str
    """`normalize` of embeddings; `sigmoid`, `softmax` or `identity` of scores."""
    size: int
    """Values of a result: of the hidden states, or classes."""
    labels: tuple[str, ...] = ()
    """Names of the classes."""
    is_matryoshka: bool = False
    """Whether the first values of an embedding are one as well."""
    matryoshka_dimensions: tuple[int, ...] = ()
    """How many of them; empty is any number."""

    @property
    def embeds(self) -> bool:
        """Whether results are embeddings; else they are scores."""
        return "embed" in self.tasks


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model, as far as the engine needs to know it."""

    name: str
    """As the user named it."""
    path: str
    """Directory or GGUF file on this machine."""
    architecture: str
    """Key of the model registry, such as `LlamaForCausalLM`."""
    hf_config: Mapping[str, Any]
    """The model's own parameters under the names of a Hugging Face config.json, whatever the file
    format; the model's file reads from it what it needs."""
    dtype: str
    """`float32`, `bfloat16` or `float16`: activations, and KV if nothing else was asked for."""
    max_model_len: int
    vocab_size: int
    """Width of the logits."""
    pooling: PoolingConfig | None = None
    """None for a model that generates."""
    implementation: str = "tokenmill"
    """Whose code it runs on: `tokenmill`, or `transformers`."""
    takes_images: bool = True
    """Whether a tower beside the decoder is loaded, if the model has one."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int
    num_blocks: int
    """Including block 0, the null block."""
    enable_prefix_caching: bool
    dtype: str
    """`float32`, `bfloat16`, `float16` or `int8`."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Who computes how much in a step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    long_prefill_token_threshold: int
    """0 is off."""
    enable_chunked_prefill: bool
    policy: str
    """`fcfs` or `priority`."""
    max_steps_in_flight: int
    """1: a step is planned when the one before has settled; 2: one step ahead."""
    attention_cost: float = 0.0
    """What a key costs that a token sees in one layer, in parts of the token's products; 0 cuts no
    chunk for its past."""
    shared_tokens: int = 0
    """Tokens, or as much work, of a step in which requests decode; 0 cuts no chunk for them."""
    num_stages: int = 1
    """Of a pipeline: with several, a request that samples is in one step at a time."""


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """What is the same for the sampling of all requests."""

    logprobs_mode: str = "raw_logprobs"
    """One of `LOGPROBS_MODES`."""
    logits_processors: tuple[Any, ...] = ()
    """What `contracts.logits_processor.load_processors` takes."""
    stream_interval: int = 1
    """Least number of tokens between two outputs of a stream."""


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """Low-rank adapters."""

    max_loras: int
    """Most adapters at work at the same time."""
    max_lora_rank: int
    max_cpu_loras: int
    """Most adapters kept in the host's memory, at least `max_loras`."""
    dtype: str
    """Of their matrices."""
    target_modules: tuple[str, ...] = ()
    """Last parts of the names of modules that adapters may change; empty: any."""


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """What makes embeddings of images, counted in embeddings."""

    max_num_encoder_input_tokens: int
    """Most of one step, unless it encodes a single item."""
    encoder_cache_size: int
    """Most that are kept; larger items are refused."""
    num_levels: int = 0
    """Layers of the decoder that an embedding has values for, besides the hidden_size of its own
    that go in front of the first."""
    is_bidirectional: bool = False
    """Whether tokens of an item see all of it, so that they are computed in one step."""


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """Where the memory goes, in bytes, by arithmetic (`memory.py`)."""

    available: int
    """What the machine or its container had free at start."""
    weights: int
    workspace: int
    reserve: int
    kv_pool: int
    kv_tokens: int
    """Tokens that the pool holds."""
    states: int = 0
    """Of state-space layers."""
    num_state_blocks: int = 0
    """Their blocks, the null block included."""
    adapters: int = 0

    draft: int = 0
    """Of a model that drafts: weights and buffers; its K and V are in the pool's blocks. Or of the
    tables that drafts are looked up in."""
    encoder_cache: int = 0

    @property
    def left(self) -> int:
        """Bytes that nobody has a claim on."""
        taken = self.weights + self.workspace + self.reserve + self.states + self.kv_pool
        return self.available - taken - self.adapters - self.draft - self.encoder_cache


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a setting that was left open has its value."""

    setting: str
    value: str
    why: str


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything one engine is built from."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    device: str
    """`cpu` or `cuda`: where the model runs."""
    exact: bool
    """Whether a request's bits do not depend on how it is run; always so on a CPU."""
    quantization: str | None
    """Format that matrices are quantised to while they are loaded: `fp8`, `int4`, or none."""
    attention_backend: str
    """Name of the backend, or `auto`: selection knows the machine and says why."""
    kernels: str
    """`amx`, `avx512`, `avx2`, `portable`, `i8mm`, `dotprod`, `neon`, `triton`, or `reference` for
    those of torch."""
    graphs: str
    """`replay`, `check` (replay and compare) or `off`."""
    num_threads: int
    max_logprobs: int
    """-1 is no limit."""
    seed: int
    ledger: MemoryLedger
    sampling: SamplingConfig = SamplingConfig()
    reasoning_parser: str = "auto"
    """`auto`, `none` or the name of a family; `tokenizer.reasoning` makes marks of it."""
    structured_outputs: StructuredOutputsConfig = field(default_factory=StructuredOutputsConfig)
    speculation: SpeculativeConfig | None = None
    """None makes no drafts."""
    lora: LoRAConfig | None = None
    """None takes no adapters."""
    multimodal: MultiModalConfig = field(default_factory=MultiModalConfig)
    encoder: EncoderConfig | None = None
    """None takes text only."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Of memory, heads and threads, the numbers here are those of the rank with most."""
    kv_transfer: KVTransferConfig | None = None
    """None keeps KV in the pool only."""
    kv_events: KVEventsConfig | None = None
    """None tells nobody of cached blocks."""
    enable_sleep_mode: bool = False
    """Whether memory may be given back while the engine lives."""
    data_parallel_size: int = 1
    """Replicas; all other numbers are those of one."""
    reasons: tuple[Reason, ...] = ()

    @property
    def num_speculative_tokens(self) -> int:
        """Most drafts of a request in a step."""
        return max_drafts(self.speculation)

    @property
    def num_lookahead_tokens(self) -> int:
        """Slots behind a request's tokens that drafting writes."""
        return 0 if self.speculation is None else self.speculation.num_lookahead_tokens

    @property
    def max_num_sampled(self) -> int:
        """Most tokens that are sampled in a step."""
        num_seqs, budget = self.scheduler.max_num_seqs, self.scheduler.max_num_batched_tokens
        return min(num_seqs * (1 + self.num_speculative_tokens), max(num_seqs, budget))
