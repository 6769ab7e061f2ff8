"""Recorded steps of a GPU: CUDA graphs of the whole forward pass, by padded size.

A graph's kernels have fixed grids and addresses, so a step is padded to the next captured size, and
reads its numbers from the buffers that every step is prepared in. Padded requests have no tokens,
padded tokens the slot -1.

    decode    every request has one token: size = requests = tokens
    mixed     any split of up to `size` tokens among up to `max_num_seqs` requests
    direct    larger steps: the device is slower than the host's launches, nothing is gained

Attention is captured, too: its kernels read lengths and tables on the device. So a step is one
launch, and there are no pieces around attention (see docs/adr).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tokenmill.attention.backend import AttentionMetadata
from tokenmill.models.base import CausalLM
from tokenmill.worker.batch import BatchShape, BatchTensors
from tokenmill.worker.graphs.forward import BlankStep, DirectForward, ForwardPass, GraphStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Which steps are captured."""

    decode: tuple[int, ...]
    """Requests with one token each, rising."""
    mixed: tuple[int, ...]
    """Tokens of any split, rising."""
    max_num_seqs: int
    max_model_len: int

    @classmethod
    def default(
        cls, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
    ) -> GraphSizes:
        """Dense where a step is short, so that little is padded; up to where nothing is gained."""
        return cls(
            decode=_sizes_up_to(max_num_seqs),
            mixed=tuple(s for s in MIXED_SIZES if s <= max_num_batched_tokens),
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )

    def padded(self, shape: BatchShape) -> BatchShape:
        """The captured shape that holds `shape`, or `shape` itself if none does."""
        if shape.max_query_len == 1:
            size = _smallest(self.decode, shape.num_reqs)
            return shape if size is None else self.decode_shape(size)
        size = _smallest(self.mixed, shape.num_tokens)
        return shape if size is None else self.mixed_shape(size)

    def decode_shape(self, size: int) -> BatchShape:
        """One token each of `size` requests."""
        return BatchShape(size, size, 1, self.max_model_len)

    def mixed_shape(self, size: int) -> BatchShape:
        """`size` tokens, whosever they are."""
        return BatchShape(size, min(size, self.max_num_seqs), size, self.max_model_len)

    def all_shapes(self) -> list[BatchShape]:
        """Every captured shape, the largest first: smaller ones then reuse its memory."""
        return [
            *(self.mixed_shape(size) for size in reversed(self.mixed)),
            *(self.decode_shape(size) for size in reversed(self.decode)),
        ]


MIXED_SIZES = (16, 32, 64, 128, 256, 512)


def _sizes_up_to(largest: int) -> tuple[int, ...]:
    sizes = [1, 2, 4, *range(8, min(largest, 256) + 1, 8), *range(272, largest + 1, 16)]
    return tuple(sorted({*(size for size in sizes if size < largest), largest}))


def _smallest(sizes: Sequence[int], at_least: int) -> int | None:
    return next((size for size in sizes if size >= at_least), None)


@dataclass(slots=True)
class _Graph:
    """A captured step, and where it leaves the hidden states."""

    graph: torch.cuda.CUDAGraph
    hidden_states: torch.Tensor


@dataclass(slots=True)
class GraphReport:
    """What capturing cost."""

    num_graphs: int = 0
    seconds: float = 0.0
    num_bytes: int = 0


@dataclass(slots=True)
class CudaGraphForward:
    """Replays the captured step of the right size, or runs the model directly."""

    direct: DirectForward
    sizes: GraphSizes
    graphs: dict[BatchShape, _Graph] = field(default_factory=dict)
    report: GraphReport = field(default_factory=GraphReport)
    stats: GraphStats = field(default_factory=GraphStats)

    def padded(self, shape: BatchShape) -> BatchShape:
        """The smallest captured shape that holds a step, or its own."""
        padded = self.sizes.padded(shape)
        self.stats.num_padded_tokens += padded.num_tokens - shape.num_tokens
        return padded

    def run(
        self, tensors: BatchTensors, attn_metadata: Mapping[str, AttentionMetadata]
    ) -> torch.Tensor:
        captured = self.graphs.get(tensors.shape)
        if captured is None or tensors.inputs_embeds is not None:  # graphs begin with ids
            self.stats.num_direct += 1
            return self.direct.run(tensors, attn_metadata)
        self.stats.num_replayed += 1
        captured.graph.replay()
        return captured.hidden_states

    def capture(self, blank_step: BlankStep) -> None:
        """Capture every size on the buffers of blank steps."""
        start, (free, _) = time.perf_counter(), torch.cuda.mem_get_info()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        pool = torch.cuda.graph_pool_handle()
        for shape in self.sizes.all_shapes():
            tensors, attn_metadata = blank_step(shape)
            # Kernels are compiled and libraries make their workspaces before anything is captured.
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.direct.run(tensors, attn_metadata)
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                hidden_states = self.direct.run(tensors, attn_metadata)
            self.graphs[shape] = _Graph(graph, hidden_states)
        torch.cuda.synchronize()
        self.direct.stats.num_direct = 0
        self.report = GraphReport(
            num_graphs=len(self.graphs),
            seconds=time.perf_counter() - start,
            num_bytes=max(free - torch.cuda.mem_get_info()[0], 0),
        )


@dataclass(frozen=True, slots=True)
class CudaGraphRecorder:
    """A `Recorder` that captures CUDA graphs."""

    sizes: GraphSizes

    def __call__(self, model: CausalLM, largest: BatchShape, blank_step: BlankStep) -> ForwardPass:
        forward = CudaGraphForward(DirectForward(model), self.sizes)
        forward.capture(blank_step)
        logger.info(
            "captured %d CUDA graphs (decode up to %d requests, mixed up to %d tokens) in %.1f s,"
            " %.0f MiB",
            forward.report.num_graphs,
            max(self.sizes.decode, default=0),
            max(self.sizes.mixed, default=0),
            forward.report.seconds,
            forward.report.num_bytes / (1 << 20),
        )
        return forward
