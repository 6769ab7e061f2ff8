"""Our attention behind the library's attention interface.

The library calls a function for each attention layer, with queries, keys and values of the flat
batch, and a mask that it has made beforehand through an interface of its own:

    create_causal_mask(...)  ->  mask_kind     the mask's rule is read: causal, or a window of it
    attention_interface(...) ->  attend        the layer's paged attention; masks are not needed

While the probe runs, masks are stand-ins that say which rule they are, and `attend` takes down
what each layer asks for (`probe.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from tokenmill.layers.attention import Attention
from tokenmill.models.transformers_backend.experts import IMPLEMENTATION, run_experts
from tokenmill.models.transformers_backend.library import library_module
from tokenmill.models.transformers_backend.ops import our_layers

LAYER = "tokenmill_attention"
"""Name of our layer inside the library's."""


class Probe(Protocol):
    """Who watches a pass instead of computing it."""

    def mask(self, mask_function: Callable[..., Any], q_length: int, device: Any) -> torch.Tensor:
        """A stand-in for a mask of this rule."""
        ...

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        settings: dict[str, Any],
    ) -> torch.Tensor:
        """Something of the shape of the result: [1, num_tokens, num_heads, head_size]."""
        ...


_probe: ContextVar[Probe | None] = ContextVar("transformers_probe", default=None)


@contextmanager
def probing(probe: Probe) -> Iterator[None]:
    """Have `probe` called for every mask and every attention layer."""
    token = _probe.set(probe)
    try:
        yield
    finally:
        _probe.reset(token)


class LibraryAttention(Attention):
    """One layer's attention as the library calls it: keys are rotated, heads in front of tokens.

    Keys and values of different sizes are filled up with zeros to the larger one, which changes no
    sum.
    """

    def __init__(
        self, layer_name: str, *, value_size: int, dtype: torch.dtype, **kwargs: Any
    ) -> None:
        """`value_size` is at most `head_size`; the rest is an `Attention`'s."""
        super().__init__(layer_name, rotary=None, **kwargs)
        self.value_size = value_size
        self.dtype = dtype

    def weight_slots(self, prefix: str) -> Iterator[Any]:
        """None: sinks are a parameter of the library's module, and come with each call."""
        return iter(())

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend from query [1, num_heads, num_tokens, size]; keys and values are [1, num_kv_heads,
        num_tokens, size]. The result is [1, num_tokens, num_heads, value_size].
        """
        if self.sinks is not None:
            assert sinks is not None
            self.sinks.copy_(sinks.reshape(-1))
        rows = [self._rows(x) for x in (query, key, value)]
        out = self.forward(torch.empty(0, dtype=torch.int64), *rows)
        return out.view(1, len(out), self.num_heads, -1)[..., : self.value_size]

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """[1, heads, num_tokens, size] to [num_tokens, heads * head_size]."""
        if x.shape[-1] < self.head_size:
            x = functional.pad(x, (0, self.head_size - x.shape[-1]))
        return x[0].transpose(0, 1).to(self.dtype).reshape(x.shape[2], -1)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """What the library calls for an attention layer; there are no weights to return."""
    probe = _probe.get()
    if probe is not None:
        return probe.attend(module, query, key, value, attention_mask, settings), None
    layer = module.get_submodule(LAYER)
    assert isinstance(layer, LibraryAttention)
    with our_layers():
        return layer.attend(query, key, value, settings.get("s_aux")), None


def make_mask(
    *, mask_function: Callable[..., Any], q_length: int, device: Any = None, **kwargs: Any
) -> torch.Tensor | None:
    """What the library calls for a mask: none is needed, as every layer knows its own."""
    probe = _probe.get()
    return None if probe is None else probe.mask(mask_function, q_length, device)


def register() -> None:
    """Make the functions of this module and `experts.py` known to the library."""
    library_module("modeling_utils").AttentionInterface.register(IMPLEMENTATION, attend)
    library_module("masking_utils").AttentionMaskInterface.register(IMPLEMENTATION, make_mask)
    library_module("integrations.moe").ExpertsInterface.register(IMPLEMENTATION, run_experts)
