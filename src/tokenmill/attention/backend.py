"""What an attention backend is.

query_start_loc  [0, 100, 101, 151]     three requests: 100, 1 and 50 tokens of the flat batch
seq_lens         [5000, 200, 1050]      their lengths, this step's tokens included
block_table      [num_reqs, max_blocks] block i of a request holds its positions
                                        i * block_size to (i + 1) * block_size - 1
slot_mapping     [num_tokens]           where a token's K and V go:
                                        block * block_size + position % block_size
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a model's attention layer asks of a backend."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    dtype: str
    """`float32`, `bfloat16` or `float16`, of queries and cache alike."""
    block_size: int
    sliding_window: int | None = None
    """Tokens that a query sees, itself included; None sees all."""
    logits_soft_cap: float | None = None
    kv_dtype: str | None = None
    """Of the cache, where it is not `dtype`."""
    causal: bool = True
    """Whether a query sees only keys up to its own; else all of its request."""
    has_sinks: bool = False
    """Whether each head has a logit without a value of its own in its softmax."""
    value_offset: int | None = None
    """Where values are parts of keys: a token's values are those of its key from here on, and are
    not stored. The part of the key that is rotated lies in front of them."""
    device: str = "cpu"
    """`cpu` or `cuda`"""
    exact: bool = True
    """Whether a token's bits must not depend on how its request is batched and cut."""

    @property
    def value_size(self) -> int:
        """Values of a head in the result."""
        return self.head_size - (self.value_offset or 0)


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """What the steps of one engine may hold: sizes of a builder's buffers."""

    num_blocks: int
    """Of each layer's cache."""
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@dataclass(slots=True)
class CommonAttentionMetadata:
    """One step's batch, as one KV cache group sees it. Tensors are on the device."""

    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    """int32 [num_reqs + 1]"""
    seq_lens: torch.Tensor
    """int32 [num_reqs]"""
    block_table: torch.Tensor
    """int32 [num_reqs, max_blocks]; entries behind a request's blocks are arbitrary"""
    slot_mapping: torch.Tensor
    """int64 [num_tokens]"""
    causal: bool = True


class AttentionMetadata(Protocol):
    """What a backend's builder makes of the common metadata; only its own impl looks inside."""


class AttentionMetadataBuilder(Protocol):
    """Prepares a step for all layers of one KV cache group."""

    def build(self, common: CommonAttentionMetadata) -> AttentionMetadata: ...


@dataclass(frozen=True, slots=True)
class Rotation:
    """RoPE of one step: the tables of `layers/rope.py`, and where each token stands."""

    positions: torch.Tensor
    """int64 [num_tokens]"""
    cos: torch.Tensor
    """float32 [max_model_len, rotary_dim / 2]"""
    sin: torch.Tensor


class AttentionImpl(Protocol):
    """One layer's attention."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotation: Rotation | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Rotate queries and keys, store K and V in the slots of the step, and attend.

        Query [num_tokens, num_heads * head_size], key and value [num_tokens,
        num_kv_heads * head_size], rows may lie apart; the result is [num_tokens,
        num_heads * value_size]. With a `value_offset`, the value is the key and need not be read.
        K and V of this step are read back from the cache, so that a token's result does not depend
        on which step computed its neighbours.
        """
        ...


@runtime_checkable
class TakesSinks(Protocol):
    """An `AttentionImpl` of layers with sinks, which are weights."""

    sinks: torch.Tensor | None
    """float32 [num_heads]; set before the first step."""


class AttentionBackend(Protocol):
    """A way to compute attention."""

    @property
    def name(self) -> str: ...

    @property
    def supports_graphs(self) -> bool:
        """Whether a CUDA graph of its layers serves other steps than the one captured."""
        ...

    def unsupported_reasons(self, spec: AttentionSpec) -> list[str]:
        """Why this backend cannot serve `spec` on this machine; empty if it can."""
        ...

    def get_kv_cache_shape(self, spec: AttentionSpec, num_blocks: int) -> tuple[int, ...]:
        """Shape of one layer's cache tensor; its dtype is the spec's `kv_dtype`, or else `dtype`.

        One of the first two dimensions is `num_blocks`.
        """
        ...

    def make_metadata_builder(
        self, spec: AttentionSpec, limits: CacheLimits
    ) -> AttentionMetadataBuilder:
        """A builder for layers of `spec`; what it allocates, it allocates now."""
        ...

    def make_impl(self, spec: AttentionSpec) -> AttentionImpl: ...
