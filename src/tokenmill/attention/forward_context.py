"""The forward context: the engine's one global.

Attention layers take their metadata from here, so that models keep plain
`forward(input_ids, positions)` signatures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from tokenmill.attention.backend import AttentionMetadata


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What layers may look up during a forward pass."""

    attn_metadata: Mapping[str, AttentionMetadata]
    """By layer name; layers of one KV cache group share one object."""


_current: ContextVar[ForwardContext | None] = ContextVar("forward_context", default=None)


@contextmanager
def set_forward_context(attn_metadata: Mapping[str, AttentionMetadata]) -> Iterator[None]:
    """Make `attn_metadata` visible to the attention layers inside the `with` block."""
    token = _current.set(ForwardContext(attn_metadata))
    try:
        yield
    finally:
        _current.reset(token)


def get_forward_context() -> ForwardContext:
    """The context of the forward pass under way."""
    context = _current.get()
    if context is None:
        raise RuntimeError(
            "An attention layer ran without attention metadata: call the model inside"
            " `with set_forward_context(attn_metadata):`."
        )
    return context


def get_attention_metadata(layer_name: str) -> AttentionMetadata:
    """The metadata of one layer."""
    by_layer = get_forward_context().attn_metadata
    if layer_name not in by_layer:
        raise RuntimeError(
            f"The forward context has no attention metadata for layer {layer_name!r};"
            f" it has some for: {', '.join(by_layer) or 'no layer'}."
        )
    return by_layer[layer_name]
