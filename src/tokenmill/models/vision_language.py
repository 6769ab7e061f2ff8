"""A decoder beside a tower: what families that take images have in common.

The decoder is that of any family that is a `Decoder`: the config says which. Its tensors have the
names that they have without a tower (`checkpoint/nested_config.py`), so that text runs on it as
ever, and adapters, quantised weights and recorded steps know no difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from tokenmill.checkpoint.nested_config import DECODER_ARCHITECTURE, TOWERS
from tokenmill.config.parameters import positive_int
from tokenmill.contracts.request import MultiModalFeature
from tokenmill.errors import ConfigError
from tokenmill.layers.kernels import LayerKernels, layer_kernels, tower_kernels
from tokenmill.models.config import DecoderConfig
from tokenmill.models.decoder import Decoder, LayerParts
from tokenmill.models.loader import EmptyTensorsOnMeta
from tokenmill.models.registry import get_model_class
from tokenmill.models.vision.blocks import TowerParts


class VisionLanguageModel(Decoder):
    """A decoder that takes images; a family adds its tower in `add_tower`."""

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        *,
        dtype: torch.dtype,
        kernels: LayerKernels | None = None,
        takes_images: bool = True,
        **settings: Any,
    ) -> None:
        """Parameters are allocated, not filled; `settings` are those of `Decoder`. A model that is
        to take no images has no tower.
        """
        kernels = kernels or layer_kernels(dtype)
        super().__init__(hf_config, dtype=dtype, kernels=kernels, **settings)
        self.hidden_size = positive_int(hf_config, "hidden_size")
        self._has_tower = takes_images
        if not takes_images:
            return
        # Other stages of a pipeline encode nothing, but know what the tower makes of an image.
        with nullcontext() if self.model.is_first_rank else EmptyTensorsOnMeta():
            self.add_tower(hf_config, TowerParts(dtype, tower_kernels(kernels, dtype)))

    @classmethod
    def read_config(cls, hf_config: Mapping[str, Any]) -> DecoderConfig:
        return decoder_class(hf_config).read_config(hf_config)

    @classmethod
    def make_layer(cls, parts: LayerParts, hf_config: Mapping[str, Any]) -> nn.Module:
        return decoder_class(hf_config).make_layer(parts, hf_config)

    def add_tower(self, hf_config: Mapping[str, Any], parts: TowerParts) -> None:
        """Make the modules of `embed_image`. Raises `ConfigError` that names the key at fault."""
        raise NotImplementedError

    def embed_image(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """What `encode` returns for an image."""
        raise NotImplementedError

    @property
    def unused_prefixes(self) -> tuple[str, ...]:
        """Beginnings of tensors' names that a checkpoint may have beyond what is read."""
        return self.unused_in_tower() if self._has_tower else TOWERS

    def unused_in_tower(self) -> tuple[str, ...]:
        """`unused_prefixes` beside a tower."""
        return ()

    def encode(self, modality: str, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        assert modality == "image"
        return self.embed_image(inputs)

    def mrope_positions(
        self, token_ids: Sequence[int], features: Sequence[MultiModalFeature]
    ) -> np.ndarray | None:
        """None: positions are plain in most families."""
        return None


def decoder_class(hf_config: Mapping[str, Any]) -> type[Decoder]:
    """The family of the decoder beside the tower. Raises `ConfigError` if there is none."""
    name = hf_config.get(DECODER_ARCHITECTURE)
    found = get_model_class(str(name))
    if not (isinstance(found, type) and issubclass(found, Decoder)):
        raise ConfigError(
            f"config.json: a decoder {name!r} beside a vision tower is not supported."
        )
    return found
