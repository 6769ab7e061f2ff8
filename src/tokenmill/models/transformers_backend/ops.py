"""torch's functions as the library's modules call them, with the same bits for any batch.

The modules are the library's own, so their calls are changed, not they: while one of them runs,
`ExactOps` stands between it and torch.

    silu, tanh, ...       torch computes what fills no register with another formula, so values are
                          laid out in whole registers, in pieces that no thread shares
    linear, x @ matrix    in slabs of fixed size (`kernels/linear.py`)
    convolutions, ...     refused: they look at neighbours in the flat batch, which may belong to
                          somebody else
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tokenmill.errors import ConfigError
from tokenmill.kernels.linear import linear

_REGISTER_VALUES = 64
"""A multiple of what the vector loops of torch take at once."""
_PIECE_VALUES = 1 << 15
"""Up to here torch uses one thread."""

_ELEMENTWISE = (
    *("silu", "gelu", "sigmoid", "logsigmoid", "tanh", "softplus", "mish", "elu", "selu", "celu"),
    *("hardswish", "hardsigmoid", "erf", "exp", "exp2", "expm1", "log", "log2", "log1p", "sin"),
    *("cos", "pow", "float_power"),
)
_PRODUCTS = ("matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "mv", "dot")
_REFUSED = (
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "avg_pool1d", "max_pool1d", "unfold"),
    *("roll", "batch_norm", "instance_norm", "cumprod", "logcumsumexp", "lstm", "gru"),
    *("scaled_dot_product_attention", "multi_head_attention_forward"),
)
_HOLDERS = (torch, torch.Tensor, functional, torch.special, torch._C._nn)


def our_layers() -> AbstractContextManager[Any]:
    """A context in which torch's functions are as they are: our own layers take care of their
    bits, and pay nothing for `ExactOps`.
    """
    return torch._C.DisableTorchFunction()


class ExactOps(TorchFunctionMode):
    """Replaces functions whose bits depend on the batch; refuses those that mix tokens.

    Raises `ConfigError` for the latter. Meant for the CPU, where all others have the same bits for
    a row wherever it stands.
    """

    def __init__(self, architecture: str) -> None:
        super().__init__()
        self._architecture = architecture

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        replace = _REPLACEMENTS.get(func)
        if replace is not None:
            return replace(func, *args, **kwargs)
        name = _PRODUCT_NAMES.get(func)
        if name is not None:
            found = _product(name, args)
            if found is None:
                self._refuse(name, "multiplies activations with each other")
            return func(*args, **kwargs) if found is NotImplemented else found
        name = _REFUSED_NAMES.get(func)
        if name is not None:
            self._refuse(name, "computes a token from its neighbours")
        return func(*args, **kwargs)

    def _refuse(self, name: str, what: str) -> NoReturn:
        raise ConfigError(
            f"{self._architecture} cannot run through transformers here: its code {what}"
            f" outside the attention interface (torch's {name}). Its tokens would depend on other"
            f" requests' in the batch."
        )


def _in_registers(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """func(x) of any shape, every value by the vector loop of one thread."""
    is_product = args and isinstance(args[0], int) and args[0] in (2, 3)  # as powers
    if is_product or not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return func(x, *args, **kwargs)
    if any(isinstance(other, torch.Tensor) and other.ndim for other in args):
        return _with_tensors(func, x, *args, **kwargs)
    kwargs.pop("inplace", None)
    rest = -x.numel() % _REGISTER_VALUES
    if not rest and x.numel() <= _PIECE_VALUES and x.is_contiguous():
        return func(x, *args, **kwargs)
    flat = functional.pad(x.reshape(-1), (0, rest))
    pieces = [func(piece, *args, **kwargs) for piece in torch.split(flat, _PIECE_VALUES)]
    return torch.cat(pieces)[: x.numel()].view(x.shape)


def _with_tensors(func: Any, x: torch.Tensor, other: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """A function of two tensors, such as a power of each value."""
    x, other = torch.broadcast_tensors(x, other)  # type: ignore[no-untyped-call]
    rest = -x.numel() % _REGISTER_VALUES
    flat = [functional.pad(each.reshape(-1), (0, rest), value=1.0) for each in (x, other)]
    pairs = zip(*(torch.split(each, _PIECE_VALUES) for each in flat), strict=True)
    return torch.cat([func(*pair, **kwargs) for pair in pairs])[: x.numel()].view(x.shape)


def _in_place(func: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    found: torch.Tensor = _in_registers(_OUT_OF_PLACE[func], x, *args, **kwargs)
    return x.copy_(found)


def _glu(func: Any, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    value, gate = x.chunk(2, dim)
    activated: torch.Tensor = _in_registers(torch.sigmoid, gate)
    return value * activated


def _linear(
    func: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    rows = linear(x.reshape(-1, x.shape[-1]), weight, bias)
    return rows.view(*x.shape[:-1], weight.shape[0])


def _product(name: str, args: tuple[Any, ...]) -> Any:
    """The product, `NotImplemented` if torch's own is right as it is, None if none is."""
    bias = None
    if name == "addmm":
        bias, *args = args  # type: ignore[assignment]
    if name in ("einsum", "baddbmm", "mv", "dot"):
        return None
    left, right = args[:2]
    if left.shape[-1] == 1:  # one factor a value: nothing is summed
        return NotImplemented if bias is None else None
    if right.ndim == 2 and (bias is None or bias.ndim == 1):
        return _linear(None, left, right.t(), bias)
    return None


def _named(names: tuple[str, ...]) -> dict[Any, str]:
    """Every function of torch with one of these names -> the name."""
    return {
        found: name
        for name in names
        for holder in _HOLDERS
        if (found := getattr(holder, name, None)) is not None and callable(found)
    }


_OUT_OF_PLACE: dict[Any, Any] = {
    found: getattr(holder, name)
    for name in _ELEMENTWISE
    for holder in _HOLDERS
    if (found := getattr(holder, f"{name}_", None)) is not None and hasattr(holder, name)
}
_REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_named(_ELEMENTWISE), _in_registers),
    **dict.fromkeys(_OUT_OF_PLACE, _in_place),
    **dict.fromkeys((torch.special.expit, torch.Tensor.__pow__), _in_registers),
    **dict.fromkeys(_named(("glu",)), _glu),
    **dict.fromkeys(_named(("linear",)), _linear),
}
_PRODUCT_NAMES = _named(_PRODUCTS)
_REFUSED_NAMES = _named(_REFUSED)
