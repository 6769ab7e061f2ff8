"""The recorded step of a CPU.

Recorded once, at the largest number of tokens, on the buffers that every step is prepared in; a
replay makes the same kernel calls with the step's number of tokens, in one native call without the
interpreter lock. The embedding belongs to it where it is one kernel. The head is recorded alone, as
its rows are chosen anew in each step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tokenmill.attention.backend import AttentionMetadata
from tokenmill.attention.forward_context import set_forward_context
from tokenmill.kernels import arena, native
from tokenmill.models.base import CausalLM
from tokenmill.worker.batch import BatchShape, BatchTensors
from tokenmill.worker.graphs.forward import BlankStep, DirectForward, ForwardPass, GraphStats

logger = logging.getLogger(__name__)


class NotRecordableError(Exception):
    """The model runs an operation that a recording would lose."""


class RecordedForward:
    """Replays the model's layers."""

    def __init__(
        self,
        model: CausalLM,
        tensors: BatchTensors,
        attn_metadata: Mapping[str, AttentionMetadata],
    ) -> None:
        """Record a step that fills its buffers. Raises `NotRecordableError`."""
        if not native.is_available():
            raise NotRecordableError(
                "recordings are replayed by the native kernels, which are not here"
            )
        self._model = model
        self._arena = arena.Arena()
        self.stats = GraphStats()
        self._direct = DirectForward(model, self.stats)
        self.program = native.module().Program(tensors.shape.num_tokens)
        self._embeds: torch.Tensor | None = None
        """Where embeddings are put before a replay; None if the replay makes them."""
        with arena.allocate_from(self._arena), set_forward_context(attn_metadata):
            embeds = self._record_embedding(tensors.input_ids)
            with _recording(self.program):
                hidden_states = model.forward(
                    tensors.input_ids, tensors.positions, inputs_embeds=embeds
                )
        assert isinstance(hidden_states, torch.Tensor), "the last rank ends in hidden states"
        self.hidden_states = hidden_states
        """[largest number of tokens, hidden_size]; a step's are the first."""

    def _record_embedding(self, input_ids: torch.Tensor) -> torch.Tensor:
        """What the layers begin with; recorded, unless it takes more than our kernels."""
        try:
            with _recording(self.program):
                return self._model.embed_input_ids(input_ids)
        except NotRecordableError:
            self.program = native.module().Program(len(input_ids))  # without what was recorded
        example = self._model.embed_input_ids(torch.zeros(1, dtype=torch.int32))
        shape = len(input_ids), example.shape[1]
        self._embeds = arena.empty(*shape, dtype=example.dtype)
        return self._embeds

    @property
    def embeds(self) -> bool:
        """Whether embeddings are a part of the recording."""
        return self._embeds is None

    @property
    def num_calls(self) -> int:
        """Kernel calls of one step."""
        return int(self.program.num_calls)

    @property
    def num_bytes(self) -> int:
        """Memory of the recording's buffers."""
        return self._arena.num_bytes

    def time_kernels(self, timed: bool) -> None:
        """Whether replays read the clock around each kernel call."""
        self.program.timed = timed

    def take_kernel_times(self) -> dict[str, tuple[int, float]]:
        """Calls and seconds of each kernel since the last question, with a weight's shape."""
        times: dict[str, tuple[int, float]] = self.program.take_times()
        return times

    def padded(self, shape: BatchShape) -> BatchShape:
        """As it is: the number of tokens is a parameter of the recording."""
        return shape

    def run(
        self, tensors: BatchTensors, attn_metadata: Mapping[str, AttentionMetadata]
    ) -> torch.Tensor:
        given, num_tokens = tensors.inputs_embeds, tensors.shape.num_tokens
        if given is not None and not self._begins_with(given, tensors):
            return self._direct.run(tensors, attn_metadata)
        self.stats.num_replayed += 1
        if self._embeds is not None:
            if given is None:
                given = self._model.embed_input_ids(tensors.input_ids)
            self._embeds[:num_tokens] = given
        self.program.replay(num_tokens)
        return self.hidden_states[:num_tokens]

    def _begins_with(self, embeds: torch.Tensor, tensors: BatchTensors) -> bool:
        """Whether the recording has a place for a step's embeddings, and the step asks for nothing
        else that is not recorded.
        """
        place = self._embeds
        return (
            place is not None
            and tensors.item_runs is None
            and (place.dtype, place.shape[1]) == (embeds.dtype, embeds.shape[1])
        )


class RecordedHead:
    """Logits of some rows of hidden states, recorded on buffers of its own."""

    def __init__(self, model: CausalLM, hidden_states: torch.Tensor, num_rows: int) -> None:
        """For up to `num_rows` rows like `hidden_states`. Raises `NotRecordableError`."""
        self._arena = arena.Arena()
        self.program = native.module().Program(num_rows)
        with arena.allocate_from(self._arena), _recording(self.program):
            self.input = arena.empty(num_rows, hidden_states.shape[1], dtype=hidden_states.dtype)
            self.logits = model.compute_logits(self.input)
        """float32 [num_rows, vocab_size]"""


def record(model: CausalLM, largest: BatchShape, blank_step: BlankStep) -> ForwardPass:
    """The model's forward pass recorded, or run directly where it cannot be, with the reason."""
    tensors, attn_metadata = blank_step(largest)
    try:
        recorded = RecordedForward(model, tensors, attn_metadata)
    except NotRecordableError as error:
        logger.info("forward pass is not recorded: %s", error)
        return DirectForward(model)
    logger.info(
        "forward pass recorded: %d kernel calls for up to %d tokens, %.1f MiB of buffers",
        recorded.num_calls,
        largest.num_tokens,
        recorded.num_bytes / (1 << 20),
    )
    return recorded


@contextmanager
def _recording(program: Any) -> Iterator[None]:
    with _OnlyViews():
        program.begin()
        try:
            yield
        finally:
            program.end()


_QUERIES = frozenset(
    (
        "__dlpack__", "__dlpack_device__", "__get__", "__len__", "data_ptr", "dim",
        "element_size", "is_contiguous", "numel", "size", "stride", "untyped_storage",
    )
)  # fmt: skip
"""Functions of torch that read a tensor's form, not its values."""
_VIEWS = frozenset(
    (
        "__getitem__", "chunk", "detach", "expand", "flatten", "from_numpy", "movedim", "narrow",
        "permute", "reshape", "select", "split", "squeeze", "t", "transpose", "unbind", "unflatten",
        "unsqueeze", "view",
    )
)  # fmt: skip
"""Functions whose result may lie in the memory of their argument; then they compute nothing."""


class _OnlyViews(TorchFunctionMode):
    """Refuses every function of torch that a replay would leave out.

    A function mode: a dispatch mode would import torch's compiler, which takes seconds.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name not in _QUERIES and name not in _VIEWS:
            raise NotRecordableError(f"it runs torch's {name}, which is no kernel of ours")
        result = func(*args, **(kwargs or {}))
        if name in _VIEWS and not _lies_in(result, args[0]):
            raise NotRecordableError(f"it runs torch's {name} so that it copies")
        return result


def _lies_in(result: Any, source: Any) -> bool:
    """Whether a tensor, or all of several, lie in the memory of `source`."""
    if not isinstance(source, torch.Tensor):  # numpy's memory, wrapped
        return True
    parts = result if isinstance(result, tuple | list) else (result,)
    memory = source.untyped_storage().data_ptr()
    return all(part.untyped_storage().data_ptr() == memory for part in parts)
