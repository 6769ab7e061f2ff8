"""A model of the library as a `CausalLM`.

    ids, positions -> the library's body -> hidden states
    hidden states  -> the library's class around a body that has run already -> logits

The second step runs what a class does with hidden states and logits (scales, soft caps, a norm in
front of the head), whatever that is.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tokenmill.layers.attention import Attention
from tokenmill.models.base import IntermediateTensors
from tokenmill.models.decoder import named_attention
from tokenmill.models.transformers_backend.library import LibraryModel, check_inputs
from tokenmill.models.transformers_backend.ops import ExactOps


class _Output:
    """What a body returns: hidden states, and nothing else."""

    def __init__(self, hidden_states: torch.Tensor) -> None:
        self.last_hidden_state = hidden_states

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _HasRun(nn.Module):
    """The body of a model, or any part of it that is called in its place, after it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_states: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        """Some classes call the decoder inside the body."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> _Output:
        assert self.hidden_states is not None
        return _Output(self.hidden_states)


class TransformersForCausalLM(nn.Module):
    """A decoder whose code is the library's."""

    def __init__(self, found: LibraryModel, model: Any) -> None:
        """`model` is the library's, its modules replaced by ours where we have some.

        Raises `ConfigError` if its body cannot be given a flat batch.
        """
        super().__init__()
        self.library = model
        base = getattr(model, model.base_model_prefix, None)
        if base is None or base is model:
            raise found.refuse("its class has no body apart from its head")
        check_inputs(found, base)
        # In tuples: views of one model are no modules beside it.
        self._base = (base,)
        self._has_run = (_HasRun(),)
        self._head = (_around(model, *self._has_run),)
        self._ops = ExactOps(found.architecture)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token ids, int32 [num_tokens], to embeddings [num_tokens, hidden_size]."""
        with self._ops:
            found: torch.Tensor = self.library.get_input_embeddings()(input_ids.long()[None])[0]
        return found

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """Hidden states [num_tokens, hidden_size]. It is not cut into pipeline ranks."""
        assert intermediate_tensors is None
        given = (
            {"input_ids": input_ids.long()[None]}
            if inputs_embeds is None
            else {"inputs_embeds": inputs_embeds[None]}
        )
        position_ids = positions[None]
        with self._ops:
            output = self._base[0](
                **given,
                position_ids=position_ids,
                # Nobody is padding; without it the library would look for sequences in a batch.
                attention_mask=torch.ones_like(position_ids),
                use_cache=False,
            )
        found: torch.Tensor = output[0][0]
        return found

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, hidden_size] to float32 logits [n, vocab_size]."""
        self._has_run[0].hidden_states = hidden_states[None]
        no_ids = torch.zeros(1, len(hidden_states), dtype=torch.int64)
        with self._ops:
            output = self._head[0](input_ids=no_ids, use_cache=False)
        self._has_run[0].hidden_states = None
        logits: torch.Tensor = output.logits[0].float()
        return logits

    def attention_layers(self) -> Mapping[str, Attention]:
        return named_attention(self)


def _around(model: Any, body: nn.Module) -> Any:
    """The library's class with another body, and everything else its own."""
    around = copy.copy(model)
    around._modules = {**model._modules, model.base_model_prefix: body}
    return around
