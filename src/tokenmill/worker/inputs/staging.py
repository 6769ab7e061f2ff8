"""The way between the host and a GPU, without waiting on either side.

A copy from the host reads pinned memory some time after the call that ordered it, so memory must
not be written again too soon: each copy takes the next buffer of a ring, and waits for that
buffer's own last copy, which nearly always is long done. Results travel on a stream of their own,
so that the next step does not queue behind them.

On a device that shares the host's memory all of it happens at once; tests run that way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16
NUM_BUFFERS = 16
"""A step stages up to five times, and two steps are under way."""
_SMALLEST_BUFFER = 1 << 16


class Staging:
    """Host arrays to the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [_Buffer(device, _SMALLEST_BUFFER) for _ in range(NUM_BUFFERS)]
        self._next = 0

    def stage(self, arrays: Sequence[npt.NDArray[np.generic]]) -> list[torch.Tensor]:
        """The arrays on the device, in one copy; valid for the kernels ordered until the next step
        but one.
        """
        offsets, end = [], 0
        for array in arrays:
            offsets.append(end)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        buffer = self._take(end)
        for array, offset in zip(arrays, offsets, strict=True):
            part = buffer.host_bytes[offset : offset + array.nbytes]
            part.view(array.dtype).reshape(array.shape)[...] = array
        buffer.send(end)
        return [
            buffer.device_bytes[offset : offset + array.nbytes]
            .view(_TORCH_DTYPES[array.dtype.type])
            .view(array.shape)
            for array, offset in zip(arrays, offsets, strict=True)
        ]

    def stage_into(self, array: npt.NDArray[np.generic], target: torch.Tensor) -> None:
        """The array to a tensor of its shape and type on the device."""
        buffer = self._take(array.nbytes)
        buffer.host_bytes[: array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        buffer.send_to(target.view(torch.uint8))

    def _take(self, num_bytes: int) -> _Buffer:
        index = self._next
        self._next = (index + 1) % NUM_BUFFERS
        buffer = self._buffers[index]
        if len(buffer.host_bytes) < num_bytes:
            buffer.wait()
            buffer = _Buffer(self._device, 1 << (num_bytes - 1).bit_length())
            self._buffers[index] = buffer
        buffer.wait()
        return buffer


_TORCH_DTYPES: dict[type, torch.dtype] = {
    np.bool_: torch.bool,
    np.uint8: torch.uint8,
    np.int32: torch.int32,
    np.int64: torch.int64,
    np.uint64: torch.int64,  # the same bits: kernels know
    np.float32: torch.float32,
    np.float64: torch.float64,
}


class _Buffer:
    """A piece of pinned memory, its twin on the device, and when it may be written again."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        is_gpu = device.type == "cuda"
        self._host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_gpu)
        self.host_bytes: npt.NDArray[np.uint8] = self._host.numpy()
        self.device_bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._sent = _event() if is_gpu else None
        self._is_pending = False

    def send(self, num_bytes: int) -> None:
        self.send_to(self.device_bytes[:num_bytes])

    def send_to(self, target: torch.Tensor) -> None:
        """Order a copy of the first bytes to a tensor of bytes."""
        target.copy_(self._host[: target.shape[0]], non_blocking=True)
        if self._sent is not None:
            self._sent.record()
            self._is_pending = True

    def wait(self) -> None:
        if self._is_pending:
            assert self._sent is not None
            self._sent.synchronize()
            self._is_pending = False


class Results:
    """Tensors of the device to the host, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[npt.NDArray[np.generic]]]:
        """Order a copy of the tensors as they are then; the answer waits for it."""
        if self._stream is None:
            copies = [tensor.clone() for tensor in tensors]
            return lambda: [copy.numpy() for copy in copies]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            copies = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
                    tensor, non_blocking=True
                )
                for tensor in tensors
            ]
            arrived = _event()
            arrived.record(self._stream)

        def wait() -> list[npt.NDArray[np.generic]]:
            arrived.synchronize()
            del sources[:]
            return [copy.numpy() for copy in copies]

        sources = list(tensors)
        """Their memory must not be given away before."""
        return wait


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
