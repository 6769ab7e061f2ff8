"""Runs a model over a paged cache without an engine: any batch, any chunks, any blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tokenmill.attention.backend import AttentionBackend, CacheLimits, CommonAttentionMetadata
from tokenmill.attention.forward_context import set_forward_context
from tokenmill.attention.reference import ReferenceBackend
from tokenmill.checkpoint.checkpoint import RawTensor, TokenizerData
from tokenmill.checkpoint.mapped_file import FileRange
from tokenmill.config.engine_config import ModelConfig
from tokenmill.kernels.state_space import StateCache
from tokenmill.layers.kernels import LayerKernels
from tokenmill.layers.state_space import state_layers
from tokenmill.models.base import CausalLM
from tokenmill.models.loader import load_model

FORMATS = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
}

Chunk = tuple[str, Sequence[int]]
"""A request's name, and its next tokens."""


@dataclass
class TensorCheckpoint:
    """A checkpoint whose tensors are in memory."""

    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    path: Path = Path("in-memory")
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_data: TokenizerData = field(default_factory=TokenizerData)

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    @property
    def tensor_formats(self) -> dict[str, str]:
        return {name: FORMATS[tensor.dtype] for name, tensor in self.tensors.items()}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def read(self, name: str) -> RawTensor:
        tensor = self.tensors[name].contiguous()
        data = tensor.reshape(-1).view(torch.uint8)
        return RawTensor(tuple(tensor.shape), FORMATS[tensor.dtype], data)

    def file_ranges(self, name: str) -> tuple[FileRange, ...]:
        return ()

    def close(self) -> None:
        pass


def model_config(
    hf_config: Mapping[str, Any], dtype: str = "float32", max_model_len: int = 512
) -> ModelConfig:
    return ModelConfig(
        name="test",
        path="in-memory",
        architecture=hf_config["architectures"][0],
        hf_config=hf_config,
        dtype=dtype,
        max_model_len=max_model_len,
        vocab_size=hf_config["vocab_size"],
    )


def model_from_tensors(
    hf_config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    dtype: str = "float32",
    max_model_len: int = 512,
    kernels: LayerKernels | None = None,
) -> CausalLM:
    checkpoint = TensorCheckpoint(hf_config, tensors)
    return load_model(model_config(hf_config, dtype, max_model_len), checkpoint, kernels=kernels)


class PagedRun:
    """A model with its cache, and the requests that are in it.

    Blocks are handed out in random order, and everything unwritten in the cache is NaN.
    """

    def __init__(
        self,
        model: CausalLM,
        dtype: str,
        *,
        backend: AttentionBackend | None = None,
        num_blocks: int = 64,
        block_size: int = 16,
        seed: int = 0,
    ) -> None:
        backend = backend or ReferenceBackend()
        self.model = model
        self.block_size = block_size
        self._blocks = (
            torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1
        ).tolist()
        self._tables: dict[str, list[int]] = {}
        self._lens: dict[str, int] = {}
        self._layers = model.attention_layers()
        for layer in self._layers.values():
            spec = layer.spec(dtype, block_size)
            shape = backend.get_kv_cache_shape(spec, num_blocks)
            cache = torch.full(shape, torch.nan, dtype=getattr(torch, dtype))
            layer.bind(backend.make_impl(spec), cache)
        limits = CacheLimits(num_blocks, 64, 4096, 4096)
        specs = {name: layer.spec(dtype, block_size) for name, layer in self._layers.items()}
        builders = {
            spec: backend.make_metadata_builder(spec, limits) for spec in set(specs.values())
        }
        self._builders: dict[str, Any] = {name: builders[spec] for name, spec in specs.items()}
        # States have the blocks of the same table: each of these has a state behind its tokens.
        for name, mixer in state_layers(model).items():
            mixer.bind(StateCache.empty(num_blocks, mixer.state_spec))
            self._builders[name] = mixer.metadata_builder(block_size, num_blocks)

    def step(self, batch: Sequence[Chunk]) -> list[torch.Tensor]:
        """Compute one flat batch; hidden states [len(chunk), hidden_size] of each chunk."""
        return list(self.forward(batch).split([len(ids) for _, ids in batch]))

    @torch.inference_mode()
    def forward(self, batch: Sequence[Chunk], **inputs: Any) -> Any:
        """The model's own result for one flat batch; `inputs` are passed on to it."""
        positions = [
            position
            for name, ids in batch
            for position in range(self._lens.get(name, 0), self._lens.get(name, 0) + len(ids))
        ]
        common = self._metadata(batch)
        metadata = {
            builder: builder.build(common) for builder in dict.fromkeys(self._builders.values())
        }
        input_ids = torch.tensor([i for _, ids in batch for i in ids], dtype=torch.int32)
        by_layer = {name: metadata[builder] for name, builder in self._builders.items()}
        with set_forward_context(by_layer):
            return self.model.forward(input_ids, torch.tensor(positions), **inputs)

    def prefill(self, name: str, ids: Sequence[int], chunk: int | None = None) -> torch.Tensor:
        """Hidden states of a whole prompt, computed `chunk` tokens at a time."""
        size = chunk or len(ids)
        parts = [self.step([(name, ids[i : i + size])])[0] for i in range(0, len(ids), size)]
        return torch.cat(parts)

    def free(self, name: str) -> None:
        self._blocks.extend(self._tables.pop(name))
        del self._lens[name]

    def _metadata(self, batch: Sequence[Chunk]) -> CommonAttentionMetadata:
        slots: list[int] = []
        for name, ids in batch:
            table = self._tables.setdefault(name, [])
            start = self._lens.get(name, 0)
            end = start + len(ids)
            while len(table) * self.block_size < end:
                table.append(self._blocks.pop())
            slots += [
                table[p // self.block_size] * self.block_size + p % self.block_size
                for p in range(start, end)
            ]
            self._lens[name] = end
        counts = [len(ids) for _, ids in batch]
        seq_lens = [self._lens[name] for name, _ in batch]
        tables = [self._tables[name] for name, _ in batch]
        width = max(map(len, tables)) + 1
        rows = [table + [table[0]] * (width - len(table)) for table in tables]
        return CommonAttentionMetadata(
            num_reqs=len(batch),
            num_tokens=sum(counts),
            max_query_len=max(counts),
            max_seq_len=max(seq_lens),
            query_start_loc=torch.tensor([0, *counts], dtype=torch.int32).cumsum(
                0, dtype=torch.int32
            ),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_table=torch.tensor(rows, dtype=torch.int32),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
        )
