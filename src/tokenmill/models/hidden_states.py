"""A decoder's hidden states, kept aside for who reads them besides its own head.

They are kept by hooks on its modules, so that a decoder whose hidden states nobody reads runs as it
always does. Recorded steps have the copies recorded with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.models.decoder import Decoder


class HiddenStates:
    """What was kept of the tokens of the last step, by their places in its flat batch."""

    def __init__(
        self, model: Decoder, layers: Sequence[int], *, max_num_tokens: int, dtype: torch.dtype
    ) -> None:
        """Keep the inputs of these layers (the residual stream in front of each), side by side; or,
        with none, the normalised states that the head reads.
        """
        stack = model.model
        last_norm = getattr(stack, stack.norm_name)
        self._kernels = last_norm.kernels
        size = len(last_norm.weight)
        self._kept = torch.zeros(max(len(layers), 1), max_num_tokens, size, dtype=dtype)
        for part, layer in enumerate(layers):
            stack.layers[str(layer)].register_forward_pre_hook(self._stream_keeper(part))
        if not layers:
            last_norm.register_forward_hook(self._keep_normalised)

    def take(self, places: npt.NDArray[np.int64]) -> torch.Tensor:
        """Those of the tokens at `places`: [len(places), number of layers * hidden_size]."""
        kept = self._kept.index_select(1, torch.from_numpy(places))
        return kept.transpose(0, 1).flatten(1)

    def _stream_keeper(self, part: int) -> Any:
        def keep(layer: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
            _, x, residual = arguments
            place = self._kept[part, : len(x)]
            if residual is None:
                self._copy(x, place)
                return
            # The sum is made beside the stream: the layer adds x to that itself.
            stream = self._kernels.empty(*residual.shape, torch.float32)
            self._copy(residual, stream)
            self._kernels.add_residual(x, stream, place)

        return keep

    def _keep_normalised(
        self, norm: torch.nn.Module, arguments: tuple[Any, ...], output: tuple[Any, ...]
    ) -> None:
        self._copy(output[0], self._kept[0, : len(output[0])])

    def _copy(self, x: torch.Tensor, place: torch.Tensor) -> None:
        self._kernels.copy(x.unsqueeze(1), place.unsqueeze(1))
