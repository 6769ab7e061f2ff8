"""One pass over a few tokens before any weight is read: what the model's layers ask for.

Parameters are zeros that take no memory, our layers give zeros, and everything else is the
library's code on real tensors, so that whatever it decides by looking at values it can decide. The
pass finds the attention layers with their heads, scales, windows, caps and sinks, and refuses
everything that our attention would not compute as the library's own does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tokenmill.errors import ConfigError, shown
from tokenmill.kernels.native import is_available
from tokenmill.kernels.paged_attention import HEAD_SIZES
from tokenmill.layers.kernels import NATIVE_DTYPES
from tokenmill.models.transformers_backend.experts import PackedExperts
from tokenmill.models.transformers_backend.interface import LAYER, LibraryAttention, probing
from tokenmill.models.transformers_backend.layers import (
    LibraryEmbedding,
    LibraryHead,
    LibraryLinear,
)
from tokenmill.models.transformers_backend.library import LibraryModel

NUM_TOKENS = 4
_FAR = (300_007, 262_144, 70_001)
"""Positions at which a mask's rule is read: further than any window, and not all of them the
beginning of a chunk."""
_BEHIND = 8
_MAX_FILLING = 1.25
"""Heads are filled up to a size that the native kernels have, if they do not grow more."""

_KNOWN = {"scaling", "dropout", "sliding_window", "softcap", "s_aux", "is_causal"}
"""Settings of the interface that change a result, and are respected."""
_WITHOUT_EFFECT = {
    *("position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states"),
    *("output_router_logits", "return_dict", "layer_idx", "position_embeddings", "cache_params"),
    *("logits_to_keep", "skip_logits"),
}
"""Settings that passed through a model's layers on their way to somebody else."""


_OF_ANY_CODE = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError),
    *(RuntimeError, TypeError, ValueError),
)
"""What code may raise that is called as it was not meant to be."""


@dataclass(frozen=True, slots=True)
class MaskRule:
    """Which keys a query sees."""

    window: int | None
    """Tokens, itself included; None sees all up to itself."""


@dataclass(frozen=True, slots=True)
class Call:
    """What one attention layer asks for."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    scale: float
    window: int | None
    logits_soft_cap: float | None
    has_sinks: bool


class LayerProbe:
    """Takes down every call of an attention layer."""

    def __init__(self, model: LibraryModel) -> None:
        self.calls: list[Call] = []
        self._model = model
        self._masks: list[tuple[torch.Tensor, MaskRule | ConfigError]] = []

    def mask(self, mask_function: Callable[..., Any], q_length: int, device: Any) -> torch.Tensor:
        mask = torch.zeros(1, 1, q_length, q_length)
        try:
            self._masks.append((mask, self._rule(mask_function)))
        except ConfigError as error:  # which matters if a layer uses this mask
            self._masks.append((mask, error))
        return mask

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        settings: dict[str, Any],
    ) -> torch.Tensor:
        self._check_settings(module, settings)
        if any(call.module is module for call in self.calls):
            raise self._model.refuse("it runs an attention layer several times in one pass")
        if len({x.shape[2] for x in (query, key, value)}) > 1 or query.shape[0] != 1:
            raise self._model.refuse(
                f"a layer attends from {query.shape[2]} to {key.shape[2]} tokens of a pass, as if"
                f" it kept a cache of its own"
            )
        scale = settings.get("scaling")
        cap = settings.get("softcap")
        self.calls.append(
            Call(
                module=module,
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                key_size=query.shape[3],
                value_size=value.shape[3],
                scale=query.shape[3] ** -0.5 if scale is None else float(scale),
                window=self._window(module, mask, settings),
                logits_soft_cap=None if cap is None else float(cap),
                has_sinks=settings.get("s_aux") is not None,
            )
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])

    def _check_settings(self, module: nn.Module, settings: dict[str, Any]) -> None:
        for name, value in settings.items():
            is_off = value is None or (value is False and name != "is_causal")
            if is_off or name in _WITHOUT_EFFECT:
                continue
            if name not in _KNOWN or (name == "dropout" and value):
                raise self._model.refuse(
                    f"its attention is given {name}={shown(value)}, which ours does not know"
                )
        causal = settings.get("is_causal")
        if (getattr(module, "is_causal", True) if causal is None else causal) is False:
            raise self._model.refuse("its attention is not causal")
        sinks = settings.get("s_aux")
        if sinks is not None and sinks.ndim != 1:
            raise self._model.refuse("its attention sinks are not one score a head")

    def _window(
        self, module: nn.Module, mask: torch.Tensor | None, settings: dict[str, Any]
    ) -> int | None:
        """The window of a layer, by the mask it was given: that is what the library computes."""
        if mask is None:
            window = settings.get("sliding_window")
            return None if window is None else int(window)
        memory = mask.untyped_storage().data_ptr()
        for known, rule in self._masks:
            if known.untyped_storage().data_ptr() == memory:
                if isinstance(rule, ConfigError):
                    raise rule
                return rule.window
        raise self._model.refuse(
            "it changes the mask of its attention (as ALiBi and other biases do), which the paged"
            " attention does not see"
        )

    def _rule(self, mask_function: Callable[..., Any]) -> MaskRule:
        """Read a rule: a function of (batch, head, query, key) that says what is visible."""
        windows = set()
        zero = torch.zeros((), dtype=torch.int64)
        for position in _FAR:
            keys = torch.arange(position + _BEHIND)
            try:
                visible = mask_function(zero, zero, torch.tensor(position), keys)
            except (IndexError, RuntimeError, TypeError) as error:
                raise self._model.refuse(
                    "its mask depends on more than the positions of query and key"
                ) from error
            visible = torch.broadcast_to(visible, keys.shape)
            first = int(visible.to(torch.int8).argmax())
            if bool(visible[position + 1 :].any()):
                raise self._model.refuse("its attention is not causal")
            if not bool(visible[first : position + 1].all()):
                raise self._model.refuse("its mask has gaps")
            windows.add(None if first == 0 else position - first + 1)
        if len(windows) > 1:
            raise self._model.refuse(
                "its mask is neither causal nor a sliding window (chunked attention, say)"
            )
        return MaskRule(windows.pop())


def find_attention(
    model: LibraryModel, library: Any, run: Callable[[int], torch.Tensor], dtype: torch.dtype
) -> list[LibraryAttention]:
    """Put a `LibraryAttention` into every attention layer of `library`, as `run(num_tokens)` calls
    them, a pass that ends in logits.

    Raises `ConfigError` for whatever cannot be served.
    """
    probe = LayerProbe(model)
    try:
        with stand_ins(library), probing(probe), torch.inference_mode():
            logits = run(NUM_TOKENS)
    except ConfigError:
        raise
    except _OF_ANY_CODE as error:
        raise model.refuse(
            f"its code fails on a flat batch without a cache ({type(error).__name__}: {error})"
        ) from error
    if logits.shape[-2] != NUM_TOKENS:
        raise model.refuse(f"{NUM_TOKENS} tokens gave logits of shape {tuple(logits.shape)}")
    _check_calls(model, probe.calls)
    names = {module: name for name, module in library.named_modules()}
    layers = []
    for call in probe.calls:
        layer = _layer(names[call.module], call, dtype)
        call.module.add_module(LAYER, layer)
        layers.append(layer)
    return layers


def _check_calls(model: LibraryModel, calls: list[Call]) -> None:
    wanted = getattr(model.config, "num_hidden_layers", len(calls))
    if not calls:
        raise model.refuse("its attention does not go through the library's attention interface")
    if len(calls) != wanted:
        raise model.refuse(
            f"{len(calls)} of its {wanted} layers attend through the library's attention"
            f" interface; the others do something else (state-space layers, say)"
        )
    for call in calls:
        if call.num_heads % call.num_kv_heads:
            raise model.refuse(
                f"{call.num_heads} heads cannot share {call.num_kv_heads} KV heads evenly"
            )


def _layer(name: str, call: Call, dtype: torch.dtype) -> LibraryAttention:
    return LibraryAttention(
        f"{name}.{LAYER}",
        value_size=call.value_size,
        dtype=dtype,
        num_heads=call.num_heads,
        num_kv_heads=call.num_kv_heads,
        head_size=_head_size(max(call.key_size, call.value_size), dtype),
        scale=call.scale,
        sliding_window=call.window,
        logits_soft_cap=call.logits_soft_cap,
        has_sinks=call.has_sinks,
    )


def _head_size(size: int, dtype: torch.dtype) -> int:
    """`size`, or the next one that the native kernels have, if it is near."""
    if not is_available() or str(dtype).removeprefix("torch.") not in NATIVE_DTYPES:
        return size
    larger = min((known for known in HEAD_SIZES if known >= size), default=size)
    return larger if larger <= _MAX_FILLING * size else size


@contextmanager
def stand_ins(library: nn.Module) -> Iterator[None]:
    """Let our layers give zeros of the right shape, and parameters without memory be zeros."""
    with ExitStack() as stack:
        for module in list(library.modules()):
            forward = _stand_in(module)
            if forward is not None:
                module.forward = forward
                stack.callback(delattr, module, "forward")
                continue
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.is_meta:
                    zeros = torch.zeros(1, dtype=parameter.dtype).expand(parameter.shape)
                    module._parameters[name] = nn.Parameter(zeros, requires_grad=False)
                    stack.callback(module._parameters.__setitem__, name, parameter)
        yield


def _stand_in(module: nn.Module) -> Callable[..., torch.Tensor] | None:
    if isinstance(module, LibraryLinear):
        out_features = module.out_features
        return lambda x: x.new_zeros(*x.shape[:-1], out_features)
    if isinstance(module, LibraryHead):
        vocab_size = module.vocab_size
        return lambda x: x.new_zeros(*x.shape[:-1], vocab_size, dtype=torch.float32)
    if isinstance(module, LibraryEmbedding):
        hidden_size, dtype = module.hidden_size, module.dtype
        return lambda ids: torch.ones(*ids.shape, hidden_size, dtype=dtype)
    if isinstance(module, PackedExperts):
        return lambda owner, x, chosen, weights: torch.zeros_like(x)
    return None


class SelfOnly:
    """Attention of each token to itself alone: what is left in a pass is the library's code.

    Tokens then have nothing to do with each other.
    """

    def mask(self, mask_function: Callable[..., Any], q_length: int, device: Any) -> Any:
        """None, as when the model runs."""
        return None

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        settings: dict[str, Any],
    ) -> torch.Tensor:
        """Each head's own value."""
        shared = query.shape[1] // value.shape[1]
        return value.repeat_interleave(shared, dim=1).transpose(1, 2).contiguous()


def check_rows_are_their_own(
    model: LibraryModel,
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    vocab_size: int,
    longest: int,
) -> bool:
    """Whether a token has the same bits alone, among others, and in another order.

    `run(ids, positions)` computes hidden states [n, hidden_size]. Raises `ConfigError` if the
    results differ by more than roundings: then the library's code mixes the tokens of a batch.
    """
    count = 37
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (count,), generator=generator)
    positions = torch.randint(longest, (count,), generator=generator)
    backwards = torch.arange(count - 1, -1, -1)
    with probing(SelfOnly()), torch.inference_mode():
        together = run(ids, positions).clone()
        reversed_ = run(ids[backwards], positions[backwards])[backwards].clone()
        alone = torch.cat([run(ids[i : i + 1], positions[i : i + 1]).clone() for i in (0, 20)])
    pairs = [(together, reversed_), (together[[0, 20]], alone)]
    if all(torch.equal(first, second) for first, second in pairs):
        return True
    largest = together.abs().amax().clamp(min=1e-6)
    if any(((first - second).abs().amax() > 0.05 * largest) for first, second in pairs):
        raise model.refuse(
            "a token's result changes with the others of its batch even without attention: its code"
            " mixes tokens, or takes positions from somewhere else than position_ids"
        )
    return False
