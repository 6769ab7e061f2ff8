"""What a user may set about an engine: the keywords of `LLM` and the flags of the command line.

Flags are derived from this class: a field `max_model_len` is `--max-model-len`, its string below
it is the help text. None means "choose for me" (`resolve.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tokenmill.config.argument_types import convert_fields


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """Settings of one engine. Raises `ConfigError` for a value of another type."""

    model: str = "smollm2-135m"
    """A directory with config.json and safetensors, a GGUF file, a hub id, or an alias (see
    `tokenmill models`)."""
    tokenizer: str | None = None
    """Where the tokenizer comes from, if not from the model: a directory or a hub id."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    """Values that replace those of the model's config.json, as JSON on the command line."""
    model_impl: str = "auto"
    """Whose code the model runs on: tokenmill (its native families), transformers (that library's,
    for every other decoder), or auto: native where there is a family (see docs/models.md)."""
    runner: str = "auto"
    """generate (tokens), pooling (vectors and scores), or auto: by the model's architecture and
    files (see docs/pooling.md)."""
    convert: str = "auto"
    """What a model is made into: embed (vectors), classify (scores), none, or auto."""
    pooler_config: dict[str, Any] = field(default_factory=dict)
    """How a pooling model pools, in place of what its files say, as JSON on the command line:
    pooling_type (last, cls or mean) and use_activation."""
    load_format: str = "auto"
    """auto (the model's weights) or dummy: random ones, drawn from the engine's seed, so that a
    directory with a config.json is enough."""
    device: str = "auto"
    """auto (a GPU if there is one), cuda or cpu."""
    exact: bool | None = None
    """On a GPU: the same bits however a request is batched, cut or resumed, at some cost in speed.
    On a CPU results are always so."""
    dtype: str = "auto"
    """Type of activations: auto, bfloat16, float16 or float32 (the reference)."""
    quantization: str | None = None
    """Quantise matrices while they are loaded: int8 or int4 on a CPU, fp8 or int4 on a GPU (see
    docs/formats.md)."""
    kv_cache_dtype: str = "auto"
    """Type of the KV cache: bfloat16, float16, float32, fp8 on a GPU, or int8 with a scale per
    token and head on the native kernels of a CPU, both half of bfloat16; auto is int8 on a CPU for
    Llama models with weights in 4 or 8 bits, and otherwise as dtype."""
    max_model_len: int | None = None
    """Most tokens of one request, prompt and output; -1 takes what fits the memory."""
    max_num_seqs: int | None = None
    """Most requests that run at the same time."""
    max_num_batched_tokens: int | None = None
    """Most tokens computed in one step. On a CPU prompts take fewer behind a long past, so that
    attention to it does not hold up the others; and fewer beside requests that decode, unless this
    is set."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt computed in one step; 0 is no limit but the step's."""
    enable_chunked_prefill: bool = True
    """Compute long prompts over several steps, beside the others' tokens."""
    scheduling_policy: str = "fcfs"
    """fcfs (in order of arrival) or priority (smaller first)."""
    async_scheduling: bool | None = None
    """Plan the next step while one runs; by default on a GPU."""
    block_size: int | None = None
    """Tokens in one block of the KV cache."""
    num_kv_blocks: int | None = None
    """Size of the KV cache in blocks; overrides the two below."""
    kv_cache_memory_bytes: int | None = None
    """Size of the KV cache in bytes; overrides the one below."""
    kv_cache_memory_fraction: float | None = None
    """Share of the memory left after the weights that the KV cache may take; by default 0.5, and
    0.9 of a GPU's."""
    enable_prefix_caching: bool = True
    """Reuse the KV of prompts that begin alike."""
    attention_backend: str = "auto"
    """auto, cpu or reference; on a GPU triton, flash_attn, flashinfer or sdpa; or `module:Class` of
    your own (see docs/add-an-attention-backend.md)."""
    enforce_eager: bool = False
    """Run every kernel by itself instead of replaying recorded steps."""
    check_graphs: bool = False
    """Run every step recorded and directly, and compare the bits; for whoever changes a kernel."""
    num_threads: int | None = None
    """Compute threads, of each process of each replica."""
    tensor_parallel_size: int = 1
    """Processes among which each layer is divided (see docs/parallel.md)."""
    pipeline_parallel_size: int = 1
    """Stages among which the layers are divided, each of tensor_parallel_size processes."""
    distributed_executor_backend: str | None = None
    """How the processes of a model are started: uni (there is only one), mp, or ray, on machines of
    a Ray cluster; by default uni or mp, as the sizes above need."""
    nnodes: int = 1
    """Machines that these processes are on, as many on each; on all but the first, start
    `tokenmill serve --headless` with the same settings."""
    node_rank: int = 0
    """Which of the machines this is; the server is on 0."""
    master_addr: str = "127.0.0.1"
    """Address of machine 0, on a network that nobody else can reach."""
    master_port: int = 29_501
    """TCP port of machine 0 where the others announce themselves."""
    data_parallel_size: int = 1
    """Replicas of the model, each an engine core in a process of its own with its own KV cache and
    its share of the processors and of the memory, or a GPU of its own; requests go where their
    prefix is (see docs/data-parallel.md)."""
    max_logprobs: int = 20
    """Most log-probabilities per token a request may ask for; -1 is no limit."""
    logprobs_mode: str = "raw_logprobs"
    """raw_logprobs (the model's own distribution, behind a grammar's mask), raw_logits,
    processed_logprobs (what tokens are drawn from: behind penalties, temperature and filters) or
    processed_logits."""
    logits_processors: list[Any] = field(default_factory=list)
    """Custom logits processors: `module:Class`, or names that installed packages announce; offline
    also classes (see docs/logits-processors.md)."""
    stream_interval: int = 1
    """Least number of tokens between two outputs of a stream; the first and the last come at
    once."""
    seed: int = 0
    """Seeds of requests without one are drawn from this."""
    generation_config: str = "auto"
    """Where default sampling parameters come from: auto (the model) or none."""
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    """Values that replace those of the model's generation_config.json, key by key."""
    chat_template: str | None = None
    """A Jinja template, or the path of one, in place of the model's."""
    reasoning_parser: str = "auto"
    """How the model marks its reasoning: auto (recognised by its tokens and chat template), none,
    or a family such as qwen3 or deepseek_r1 (see docs/tools.md)."""
    structured_outputs_config: dict[str, Any] = field(default_factory=dict)
    """How schemas and grammars are enforced, as JSON on the command line: backend (auto, llguidance
    or xgrammar), enable_in_reasoning, enable_forced_tokens, disable_any_whitespace,
    disable_additional_properties, compile_timeout (see docs/structured-output.md)."""
    speculative_config: dict[str, Any] = field(default_factory=dict)
    """How drafts of the next tokens are made, as JSON on the command line: method (ngram, suffix,
    draft_model, eagle or eagle3), num_speculative_tokens, model, prompt_lookup_min,
    prompt_lookup_max, adaptive, ... (see docs/speculation.md). Results are the same with it and
    without."""
    spec_method: str | None = None
    """Short for `speculative_config`'s method."""
    spec_model: str | None = None
    """Short for its model, which drafts."""
    spec_tokens: int | None = None
    """Short for its num_speculative_tokens."""
    enable_lora: bool = False
    """Take LoRA adapters: requests choose one by name (see docs/lora.md)."""
    max_loras: int = 1
    """Most adapters whose requests run at the same time; requests for others wait."""
    max_lora_rank: int = 16
    """Largest rank of an adapter."""
    max_cpu_loras: int | None = None
    """Most adapters kept in the host's memory, at least max_loras, which it is by default; others
    are read again when they are asked for."""
    lora_dtype: str = "auto"
    """Type of the adapters' matrices: auto (that of activations), bfloat16 or float32."""
    lora_target_modules: list[str] | None = None
    """Names of the modules that adapters may change, such as q_proj; any by default."""
    limit_mm_per_prompt: dict[str, Any] = field(default_factory=dict)
    """Most items of a kind in one prompt, as JSON on the command line: {"image": 4}. By default 16
    images; 0 takes none."""
    mm_processor_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the model's image processor, as JSON on the command line; a request's own come
    over them (see docs/images.md)."""
    mm_processor_cache_gb: float = 0.25
    """GiB of processed images that are kept for prompts which bring them again; 0 keeps none."""
    max_num_encoder_input_tokens: int | None = None
    """Most embeddings that are made of images in one step; an image with more is encoded in a step
    of its own. By default max_num_batched_tokens."""
    encoder_cache_size: int | None = None
    """Embeddings of images that are kept for requests which share them; images with more are
    refused. By default as many as max_model_len, at most 4,096 on a CPU and 16,384 on a
    GPU."""
    max_image_pixels: int = 33_554_432
    """Most pixels of an image; more are refused before they are decoded."""
    allowed_local_media_path: str | None = None
    """Directory below which file: URLs may name images; without it, none."""
    allowed_media_domains: list[str] | None = None
    """Hosts from which images are fetched: example.org, *.example.org for those below it,
    example.org:8443 for another port than the usual one, or * for every public host. Without it,
    nothing is fetched."""
    kv_transfer_config: dict[str, Any] = field(default_factory=dict)
    """KV outside the pool, as JSON on the command line: kv_connector (OffloadingConnector,
    TCPConnector or MultiConnector), kv_role, kv_ip, kv_port, kv_load_failure_policy,
    kv_connector_extra_config, ... (see docs/kv-transfer.md). Results are the same with it and
    without."""
    kv_events_config: dict[str, Any] = field(default_factory=dict)
    """Events on blocks of the prefix cache over ZMQ, as JSON on the command line:
    enable_kv_cache_events, endpoint, replay_endpoint, topic, ... (see docs/kv-transfer.md)."""
    kv_offload_dir: str | None = None
    """Directory in which blocks of the KV cache are kept that are no longer in use: they are found
    again after they were evicted, and after a restart. Engines may share it."""
    kv_offload_gb: float | None = None
    """GiB that the directory may hold; 10 by default."""
    enable_sleep_mode: bool = False
    """Let the engine give its memory back while nobody needs it (see docs/operations.md)."""
    skip_tokenizer_init: bool = False
    """Work with token ids only; text goes neither in nor out."""

    def __post_init__(self) -> None:
        convert_fields(self)
