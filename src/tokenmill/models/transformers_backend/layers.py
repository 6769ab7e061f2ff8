"""Our layers in the place of the library's modules: the same calls, packed weights.

The library calls modules with [1, num_tokens, size]; our kernels take rows.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tokenmill.layers.embedding import VocabEmbedding
from tokenmill.layers.kernels import LayerKernels
from tokenmill.layers.linear_method import LinearMethod
from tokenmill.layers.weights import (
    WeightSlot,
    empty_parameter,
    parameter_slot,
    transposed_slot,
)
from tokenmill.models.transformers_backend.ops import our_layers

_ROUTER = re.compile(r"(^|\.)(gate|router|shared_expert_gate|wg)$")
"""Names of small maps that choose or weigh experts."""
_NUMBERS = re.compile(r"\d+")


class ReadsWeight(Exception):  # noqa: N818 - caught by whoever builds the model
    """The library's code reads a layer's matrix itself, so the layer must stay the library's."""

    def __init__(self, layer: LibraryLinear) -> None:
        super().__init__()
        self.layer = layer


class LibraryLinear(nn.Module):
    """A linear layer on packed weights, in the place of one of the library's."""

    bias: nn.Parameter | None

    def __init__(
        self,
        method: LinearMethod,
        out_features: int,
        in_features: int,
        *,
        has_bias: bool,
        dtype: torch.dtype,
        is_transposed: bool = False,
    ) -> None:
        """With `is_transposed`, the checkpoint has [in_features, out_features]."""
        super().__init__()
        self.method = method
        self.in_features, self.out_features = in_features, out_features
        self.dtype = dtype
        self.is_transposed = is_transposed
        self.bias = empty_parameter(out_features, dtype=method.bias_dtype) if has_bias else None

    @property
    def weight(self) -> torch.Tensor:
        """There is none: raises `ReadsWeight`."""
        raise ReadsWeight(self)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        slot = self.method.slot(f"{prefix}.weight", slice(0, self.out_features))
        yield transposed_slot(slot) if self.is_transposed else slot
        if self.bias is not None:
            yield parameter_slot(f"{prefix}.bias", self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Project x [..., in_features] to [..., out_features], in x's dtype."""
        rows = x.reshape(-1, self.in_features).to(self.dtype)
        with our_layers():
            out = self.method.project(rows, self.bias, self.dtype)
        return out.view(*x.shape[:-1], self.out_features).to(x.dtype)


class LibraryHead(nn.Module):
    """The output head in the place of the library's: float32 logits, from its own rows or those of
    the embedding.
    """

    bias: nn.Parameter | None

    def __init__(
        self, rows: VocabEmbedding, *, is_tied: bool, has_bias: bool, source: str | None = None
    ) -> None:
        """`source` is the module whose weight the rows are, if it is another one."""
        super().__init__()
        self.source = source
        self._rows = (rows,)  # in a tuple, so that it is no module of its own with weights
        self.is_tied = is_tied
        self.vocab_size = rows.vocab_size
        self.bias = empty_parameter(rows.vocab_size, dtype=torch.float32) if has_bias else None

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        if not self.is_tied:
            yield from self._rows[0].weight_slots(self.source or prefix)
        if self.bias is not None:
            yield parameter_slot(f"{prefix}.bias", self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits, float32 [..., vocab_size], of hidden states x [..., hidden_size]."""
        with our_layers():
            logits = self._rows[0].compute_logits(x.reshape(-1, x.shape[-1]))
        if self.bias is not None:
            logits = logits + self.bias
        return logits.view(*x.shape[:-1], -1)


class LibraryEmbedding(nn.Module):
    """The token embedding in the place of the library's."""

    def __init__(self, rows: VocabEmbedding, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._rows = (rows,)
        self.hidden_size = hidden_size
        self.dtype = dtype

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        return self._rows[0].weight_slots(prefix)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Ids of any shape to [*shape, hidden_size]."""
        rows: torch.Tensor = self._rows[0](input_ids.reshape(-1))
        return rows.to(self.dtype).view(*input_ids.shape, -1)


class PositionTable(nn.Module):
    """What a rotary embedding gives for each position, computed once.

    So cosines do not depend on where in a batch a token stands, and a scaling that depends on the
    length follows `max_model_len`: a cached key stays right while its text grows.
    """

    def __init__(self, rotary: nn.Module, max_model_len: int) -> None:
        super().__init__()
        # Not a module of the model any more: it has no weights, and nobody else calls it.
        self._rotary = (rotary,)
        self.max_model_len = max_model_len
        self._tables: dict[Any, tuple[torch.Tensor, ...]] = {}

    def __getattr__(self, name: str) -> Any:
        """Anything else is the rotary embedding's own."""
        if name.startswith("_"):
            return super().__getattr__(name)
        return getattr(self._rotary[0], name)

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """What the rotary embedding returns for positions [1, num_tokens]: rows of its tables."""
        key = (x.dtype, *args, *sorted(kwargs.items()))
        if key not in self._tables:
            every = torch.arange(self.max_model_len)[None]
            found = self._rotary[0](x[:, :1], every, *args, **kwargs)
            tables = (found,) if isinstance(found, torch.Tensor) else tuple(found)
            assert all(table.shape[:2] == every.shape for table in tables)
            self._tables[key] = tables
        rows = [table[:, position_ids.reshape(-1)] for table in self._tables[key]]
        return rows[0] if len(rows) == 1 else tuple(rows)


def kind_of(name: str) -> str:
    """The name of a module without the numbers in it: the same in all layers."""
    return _NUMBERS.sub("*", name)


def _is_rotary(module: nn.Module) -> bool:
    """Whether it computes something for each position and keeps no weights."""
    takes_positions = "position_ids" in inspect.signature(module.forward).parameters
    is_named_so = type(module).__name__.endswith("RotaryEmbedding")
    return is_named_so and takes_positions and not list(module.parameters())


class Swapper:
    """Puts our layers into a model of the library."""

    def __init__(
        self,
        model: Any,
        *,
        dtype: torch.dtype,
        max_model_len: int,
        kernels: LayerKernels,
        is_tied: bool,
        kept: frozenset[str] = frozenset(),
    ) -> None:
        """`kept` are kinds (`kind_of`) of linear layers that stay the library's."""
        self._model = model
        self._kept = kept
        self._dtype = dtype
        self._max_model_len = max_model_len
        self._kernels = kernels
        self._is_tied = is_tied
        names = {id(module): name for name, module in model.named_modules()}
        self.embedding_name = names[id(model.get_input_embeddings())]
        self.head_name = names[id(model.get_output_embeddings())]
        exact = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
        self.float32_names = tuple(exact)
        """Parts of the names of parameters that stay float32."""

    def swap(self) -> None:
        """Replace every module that we have a layer for."""
        self._swap_vocabulary()
        for name, module in list(self._model.named_modules()):
            new = self._layer_for(name, module)
            if new is not None:
                self._model.set_submodule(name, new)

    def _layer_for(self, name: str, module: nn.Module) -> nn.Module | None:
        if kind_of(name) in self._kept or any(
            part in f"{name}.weight" for part in self.float32_names
        ):
            return None
        kind = type(module)
        if kind is nn.Linear:
            assert isinstance(module, nn.Linear)
            return self._linear(name, module.out_features, module.in_features, module)
        if kind.__name__ == "Conv1D":  # GPT-2's name for a transposed linear layer
            in_features, out_features = module.weight.shape  # type: ignore[misc]
            return self._linear(name, out_features, in_features, module, is_transposed=True)
        if _is_rotary(module):
            return PositionTable(module, self._max_model_len)
        return None

    def _linear(
        self,
        name: str,
        out_features: int,
        in_features: int,
        module: nn.Module,
        *,
        is_transposed: bool = False,
    ) -> LibraryLinear:
        # Routers are kept as well as the vocabulary, however the other matrices are quantised.
        is_router = _ROUTER.search(name) is not None
        make = self._kernels.vocab_method if is_router else self._kernels.linear_method
        return LibraryLinear(
            make(out_features, in_features, self._dtype),
            out_features,
            in_features,
            has_bias=module.bias is not None,
            dtype=self._dtype,
            is_transposed=is_transposed,
        )

    def _swap_vocabulary(self) -> None:
        embedding = self._model.get_input_embeddings()
        head = self._model.get_output_embeddings()
        is_plain = type(embedding) is nn.Embedding  # other classes compute more than a look-up
        rows = self._rows(embedding) if is_plain else None
        if rows is not None:
            ours = LibraryEmbedding(rows, embedding.weight.shape[1], self._dtype)
            self._model.set_submodule(self.embedding_name, ours)
        shares_rows = self._is_tied and rows is not None
        if not shares_rows or rows is None:
            rows = self._rows(embedding if self._is_tied else head)
        new = LibraryHead(
            rows,
            is_tied=shares_rows,
            source=self.embedding_name if self._is_tied else None,
            has_bias=getattr(head, "bias", None) is not None,
        )
        self._model.set_submodule(self.head_name, new)

    def _rows(self, module: Any) -> VocabEmbedding:
        vocab_size, hidden_size = module.weight.shape
        return VocabEmbedding(vocab_size, hidden_size, dtype=self._dtype, kernels=self._kernels)
