"""The memory ledger: what the engine will take, by arithmetic, before anything is allocated.

available now
  - weights          as the engine holds them
  - workspace        buffers of a step, tables of the rows, logits
  - reserve          the interpreter, libraries, the allocator's slack
  - states           of state-space layers, for the sequences that run and for prefix hits
  - adapters         room for those at work and those kept on the host
  - draft            the model that drafts, and buffers of its steps
  - encoder cache    embeddings of images
  = left             the KV pool may take a share of this
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from tokenmill.checkpoint.checkpoint import PACKED_PREFIX
from tokenmill.checkpoint.nested_config import is_of_tower
from tokenmill.config.dtypes import DTYPE_BYTES, kv_head_bytes
from tokenmill.config.engine_config import EngineConfig, LoRAConfig, MemoryLedger
from tokenmill.config.machine import Machine
from tokenmill.config.parameters import ModelParameters
from tokenmill.config.state_space import num_state_blocks

RESERVE_BYTES = 512 << 20
GPU_RESERVE_BYTES = 1 << 30
"""The driver's context, libraries' workspaces, recorded steps, the allocator's slack."""
_SLAB_ROWS = 64
"""Log-probabilities of prompts are made in slabs of so many rows."""
_LOGITS_COPIES = 4
"""Raw, masked, filtered and noisy logits of a row live at the same time."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The largest step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_num_drafts: int = 0
    """Of each request: it has a row of logits for each, and one more."""

    @property
    def max_num_sampled(self) -> int:
        """Most rows of logits that tokens are sampled from."""
        most = max(self.max_num_batched_tokens, self.max_num_seqs)
        return min(self.max_num_seqs * (1 + self.max_num_drafts), most)


_PACKED_BLOCK_BYTES = {
    **dict.fromkeys(("Q4_0", "IQ4_NL", "IQ4_XS", "MXFP4"), 18),
    **dict.fromkeys(("Q4_1", "Q4_K"), 20),
    **dict.fromkeys(("Q8_0", "Q5_0", "Q6_K", "Q3_K", "Q2_K"), 34),
    **dict.fromkeys(("Q5_1", "Q5_K"), 36),
}
"""Bytes that 32 values of a GGUF block type take where the native kernels keep their codes."""
_BLOCK_VALUES = 32
_CODES, _SCALES = "U8", "_scales"
"""Format of MXFP4 in tensors of their own, two values a byte, and the end of the scales' names."""
_VOCABULARIES = ("model.embed_tokens.", "lm_head.")
_ROUTERS = (".gate.weight", ".router.weight", ".shared_expert_gate.weight", ".wg.weight")
_FUSED_EXPERTS = ".experts."
"""In the names of tensors [experts, in_features, out_features]."""
_QUANTIZED_BYTES = {"fp8": 1.001, "int8": 34 / 32, "int4": 0.5 + 4 / 32}
"""Of a value of a matrix, scales included: one a row, or scale and minimum of 32 values."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's tensors, by name, and how they will be held."""

    shapes: Mapping[str, tuple[int, ...]]
    formats: Mapping[str, str]
    """As in the file."""
    dtype: str
    keeps_blocks: bool
    """Whether block types keep their codes; else they become `dtype`."""
    quantization: str | None = None
    """What plain matrices become. Vectors keep `dtype`, and so do the vocabulary and routers,
    except on the native kernels: there they have eight bits."""
    keeps_mxfp4: bool = False
    """Whether MXFP4 in tensors of its own keeps its codes although block types do not."""

    @property
    def num_decoder_values(self) -> int:
        """Without towers: what the tokens of a step meet."""
        return sum(
            self._values_of(name, prod(shape))
            for name, shape in self.shapes.items()
            if not is_of_tower(name)
        )

    @property
    def num_values(self) -> int:
        return sum(self._values_of(name, prod(shape)) for name, shape in self.shapes.items())

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them, as the engine holds them."""
        return sum(self._bytes_of(name, prod(shape)) for name, shape in self.shapes.items())

    def _bytes_of(self, name: str, num_values: int) -> int:
        block_bytes = _PACKED_BLOCK_BYTES.get(self.formats[name].removeprefix(PACKED_PREFIX))
        if self.keeps_blocks and block_bytes is not None:
            return num_values // _BLOCK_VALUES * block_bytes
        if self.formats[name] == _CODES:
            return self._code_bytes(name, num_values)
        quantization = self._quantization_of(name)
        if quantization is not None:
            return int(num_values * _QUANTIZED_BYTES[quantization])
        return num_values * DTYPE_BYTES[self.dtype]

    def _values_of(self, name: str, num_stored: int) -> int:
        if self.formats[name] != _CODES:
            return num_stored
        return 0 if name.endswith(_SCALES) else 2 * num_stored

    def _code_bytes(self, name: str, num_stored: int) -> int:
        if self.keeps_mxfp4:
            return num_stored
        if not self.keeps_blocks:
            return self._values_of(name, num_stored) * DTYPE_BYTES[self.dtype]
        return num_stored * (2 if name.endswith(_SCALES) else 1)  # a scale becomes a half

    def _quantization_of(self, name: str) -> str | None:
        shape = self.shapes[name]
        is_fused = len(shape) == 3 and _FUSED_EXPERTS in name
        if self.quantization is None or is_of_tower(name) or not (len(shape) == 2 or is_fused):
            return None
        is_kept = name.startswith(_VOCABULARIES) or name.endswith(_ROUTERS)
        if not self.keeps_blocks:
            return None if is_kept else self.quantization
        if shape[1] % _BLOCK_VALUES:
            return None
        return "int8" if is_kept else self.quantization


def kv_bytes_per_token(parameters: ModelParameters, kv_dtype: str) -> int:
    """Bytes of one token's K and V in all layers."""
    return parameters.num_kv_layers * layer_kv_bytes(parameters, kv_dtype)


def layer_kv_bytes(parameters: ModelParameters, kv_dtype: str) -> int:
    """Bytes of one token's K and V in one layer."""
    parts = 2 if parameters.stores_values else 1
    return parts * parameters.num_kv_heads * kv_head_bytes(parameters.head_size, kv_dtype)


def workspace_bytes(parameters: ModelParameters, shape: StepShape) -> int:
    """Bytes of a step's buffers: float32 activations, logits, and the rows' token tables."""
    activations = 8 * parameters.hidden_size + 3 * parameters.intermediate_size
    logits_rows = _SLAB_ROWS + _LOGITS_COPIES * shape.max_num_sampled
    logits = logits_rows * parameters.vocab_size
    tables = shape.max_num_seqs * shape.max_model_len
    return 4 * (shape.max_num_batched_tokens * activations + logits + tables)


def adapter_bytes(lora: LoRAConfig, shapes: Mapping[str, tuple[int, ...]], device: str) -> int:
    """Bytes of the slots of a model with these tensors, and of the adapters kept beside them."""
    kept = lora.max_cpu_loras if device == "cpu" else 0
    return (lora.max_loras + kept) * slot_bytes(lora, shapes)


def slot_bytes(lora: LoRAConfig, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Bytes of one adapter of the largest rank: each rank is a row and a column of every matrix."""
    num_values = sum(
        sum(shape)
        for name, shape in shapes.items()
        if len(shape) == 2 and _may_be_adapted(name.split("."), lora.target_modules)
    )
    return lora.max_lora_rank * num_values * DTYPE_BYTES[lora.dtype]


def _may_be_adapted(name: list[str], target_modules: tuple[str, ...]) -> bool:
    """Whether a tensor is the matrix of a layer, and of no expert."""
    is_in_layer = any(part.isdigit() for part in name) and "experts" not in name
    is_in_layer = is_in_layer and not is_of_tower(".".join(name))
    return is_in_layer and (not target_modules or not set(target_modules).isdisjoint(name))


def empty_ledger(
    machine: Machine,
    weights: Weights,
    parameters: ModelParameters,
    step: StepShape,
    device: str,
    lora: LoRAConfig | None = None,
) -> MemoryLedger:
    """What is taken of the device's memory before the KV pool is sized."""
    if device == "cpu":
        available, reserve = machine.available_memory, RESERVE_BYTES
    else:
        assert machine.accelerator is not None
        available, reserve = machine.accelerator.available_memory, GPU_RESERVE_BYTES
    ledger = MemoryLedger(
        available=available,
        weights=weights.num_bytes,
        workspace=workspace_bytes(parameters, step),
        reserve=reserve,
        kv_pool=0,
        kv_tokens=0,
        adapters=0 if lora is None else adapter_bytes(lora, weights.shapes, device),
    )
    if parameters.states is None or parameters.num_kv_layers == 0:  # then they are the KV pool
        return ledger
    count = num_state_blocks(parameters.states, step.max_num_seqs, ledger.left)
    num_bytes = count * parameters.states.bytes_per_block
    return replace(ledger, states=num_bytes, num_state_blocks=count)


def render(ledger: MemoryLedger) -> str:
    """The ledger as lines for a log."""
    rows = [
        ("available", ledger.available, ""),
        ("weights", ledger.weights, ""),
        ("workspace", ledger.workspace, ""),
        ("reserve", ledger.reserve, ""),
        ("KV pool", ledger.kv_pool, f"  {ledger.kv_tokens:,} tokens"),
        ("left", ledger.left, ""),
    ]
    if ledger.states:
        rows.insert(-2, ("states", ledger.states, f"  {ledger.num_state_blocks:,} blocks"))
    if ledger.adapters:
        rows.insert(-2, ("adapters", ledger.adapters, ""))
    if ledger.draft:
        rows.insert(-2, ("draft", ledger.draft, ""))
    if ledger.encoder_cache:
        rows.insert(-2, ("images", ledger.encoder_cache, ""))
    return "\n".join(f"  {name:<10}{format_bytes(size):>12}{more}" for name, size, more in rows)


def summary(config: EngineConfig) -> str:
    """One line on an engine for its user."""
    model, ledger = config.model, config.ledger
    threads = "1 thread" if config.num_threads == 1 else f"{config.num_threads} threads"
    place = threads if config.device == "cpu" else "on the GPU"
    if config.parallel.world_size > 1:
        place = f"{config.parallel.world_size} ranks with {threads} each"
    kv_dtype = "" if config.cache.dtype == model.dtype else f"{config.cache.dtype} "
    return (
        f"{model.name}: {model.dtype}, {config.kernels} kernels, {place};"
        f" context {model.max_model_len:,} tokens, {kv_dtype}KV cache {ledger.kv_tokens:,} tokens"
        f" ({format_bytes(ledger.kv_pool)} of {format_bytes(ledger.available)})"
    )


def format_bytes(size: int) -> str:
    """`1.50 GiB`, `12.0 MiB`."""
    if abs(size) >= 1 << 30:
        return f"{size / (1 << 30):.2f} GiB"
    return f"{size / (1 << 20):.1f} MiB"
