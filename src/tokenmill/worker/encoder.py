"""Items of requests through the model's encoder, and what is kept of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.contracts.request import MultiModalFeature, TensorData
from tokenmill.models.base import SupportsMultiModal


class ItemEncoder:
    """Embeddings by content, made when a step first needs them.

    What is to be encoded in a step the plan says, and a step needs nothing else that is not here,
    unless encoding it has failed for another request. Items are encoded one at a time, so that the
    bits of one do not depend on the others.
    """

    def __init__(
        self,
        model: SupportsMultiModal,
        stage: Callable[[npt.NDArray[np.generic]], torch.Tensor] = torch.from_numpy,
    ) -> None:
        """`stage` brings an array to where the model is; it need not last."""
        self._model = model
        self._stage = stage
        self._kept: dict[str, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def update(self, plan: SchedulerOutput) -> None:
        """Forget what the plan says; before anything of the step is encoded."""
        if plan.encoder is not None:
            for content_hash in plan.encoder.freed_hashes:
                self._kept.pop(content_hash, None)

    def embeds(self, feature: MultiModalFeature) -> torch.Tensor:
        """[feature.num_embeds, hidden_size]. Raises `ValueError` if the model makes others."""
        found = self._kept.get(feature.content_hash)
        if found is None:
            inputs = {name: self._stage(as_array(data)) for name, data in feature.inputs.items()}
            found = self._model.encode(feature.modality, inputs)
            if len(found) != feature.num_embeds:
                raise ValueError(
                    f"the encoder has made {len(found)} embeddings of an item of modality"
                    f" {feature.modality!r} that stands for {feature.num_embeds}"
                )
            self._kept[feature.content_hash] = found
        return found


def as_array(data: TensorData) -> npt.NDArray[np.generic]:
    """What was sent; a copy, since bytes must not be written to."""
    array = np.frombuffer(data.data, np.dtype(data.dtype)).reshape(data.shape)
    return array.copy()
