"""Reads what a loader will want next, while it works on what it has.

    tensors   [   embedding   ][ q ][ k ][ v ][ o ][  gate  ][   up   ] ...
    chunks    [   ][   ][   ][][   ][   ][   ][   ][  ][    ][  ][    ] ...
               done  ^ needed   <------ window ------>

Threads take chunk after chunk in the order of the tensors' use and stay within a window in front of
what is needed, so that a checkpoint of any size takes little memory on its way. They sleep in the
system while a disk works, so there are more of them than processors.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType

from tokenmill.checkpoint.checkpoint import PACKED_PREFIX, Checkpoint, Pages, RawTensor
from tokenmill.checkpoint.mapped_file import FileRange
from tokenmill.errors import CheckpointError

NUM_THREADS = 4
CHUNK_BYTES = 8 << 20
WINDOW_BYTES = 64 << 20


@dataclass(slots=True)
class _Chunk:
    """A piece of a tensor's bytes; `begin` and `end` count along all tensors."""

    begin: int
    end: int
    source: FileRange
    is_done: bool = False
    error: CheckpointError | None = None


class ReadAhead:
    """Reads tensors of a checkpoint in the order in which they will be asked for.

    A context: the threads end with it. Tensors may be read in another order as well, which is only
    slower, and may be used after its end.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: Sequence[str],
        rows: Mapping[str, range] | None = None,
    ) -> None:
        """Of tensors in `rows`, only these rows are wanted."""
        self._checkpoint = checkpoint
        self._rows = rows or {}
        self._chunks: list[_Chunk] = []
        self._starts: dict[str, int] = {}
        """Where a tensor's bytes begin along all tensors."""
        self._sources = {name: checkpoint.file_ranges(name) for name in names}
        self._firsts: dict[str, int] = {}
        """A tensor's first chunk."""
        self._plan(names)
        self._next = 0
        """The chunk that is taken next."""
        self._limit = WINDOW_BYTES
        """Chunks that begin here or later have to wait."""
        self._is_over = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name="read-ahead", daemon=True)
            for _ in range(min(NUM_THREADS, len(self._chunks)))
        ]

    def __enter__(self) -> ReadAhead:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def read(self, name: str) -> RawTensor:
        """The tensor of this name. One that lies in the file as it is comes at once, and its bytes
        when they are needed.
        """
        num_bytes = sum(source.end - source.begin for source in self._sources[name])
        raw = self._checkpoint.read(name) if len(self._sources[name]) == 1 else None
        if raw is not None and raw.pages is not None:
            return replace(raw, pages=_Awaited(self, name, raw.pages))
        self.need(name, 0, num_bytes)
        raw = raw or self._checkpoint.read(name)
        for source in self._sources[name]:
            if raw.pages is None:
                source.release(0, source.end - source.begin)
        return raw

    def need(self, name: str, begin: int, end: int) -> None:
        """Wait for bytes [begin, end) of a tensor.

        Raises `CheckpointError` if they cannot be read.
        """
        start = self._starts[name]
        with self._changed:
            self._limit = max(self._limit, start + begin + WINDOW_BYTES, start + end)
            self._changed.notify_all()
            for index in range(self._firsts[name], len(self._chunks)):
                chunk = self._chunks[index]
                if chunk.begin >= start + end:
                    return
                if chunk.end > start + begin:
                    self._changed.wait_for(partial(self._is_settled, chunk))
                    if chunk.error is not None:
                        raise chunk.error

    def _is_settled(self, chunk: _Chunk) -> bool:
        return chunk.is_done or self._is_over

    def _plan(self, names: Sequence[str]) -> None:
        position = 0
        for name in names:
            self._starts[name], self._firsts[name] = position, len(self._chunks)
            for source in self._sources[name]:
                wanted = self._wanted(name, source)
                for begin in range(wanted.begin, wanted.end, CHUNK_BYTES):
                    end = min(begin + CHUNK_BYTES, wanted.end)
                    piece = FileRange(source.file, begin, end)
                    first = position + begin - source.begin
                    self._chunks.append(_Chunk(first, first + end - begin, piece))
                position += source.end - source.begin

    def _wanted(self, name: str, source: FileRange) -> FileRange:
        """What of a tensor's bytes is to be read; others are read when they are touched."""
        rows = self._rows.get(name)
        is_packed = self._checkpoint.tensor_formats[name].startswith(PACKED_PREFIX)
        if rows is None or is_packed or len(self._sources[name]) > 1:
            return source
        row_bytes = (source.end - source.begin) // self._checkpoint.tensor_shapes[name][0]
        begin = source.begin + rows.start * row_bytes
        return FileRange(source.file, begin, begin + len(rows) * row_bytes)

    def _work(self) -> None:
        while (chunk := self._take()) is not None:
            try:
                chunk.source.file.populate(chunk.source.begin, chunk.source.end)
            except CheckpointError as error:
                chunk.error = error
            with self._changed:
                chunk.is_done = True
                self._changed.notify_all()

    def _take(self) -> _Chunk | None:
        """The next chunk, as soon as it lies within the window; None at the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._is_over
                    or self._next == len(self._chunks)
                    or self._chunks[self._next].begin < self._limit
                )
            )
            if self._is_over or self._next == len(self._chunks):
                return None
            self._next += 1
            return self._chunks[self._next - 1]


@dataclass(frozen=True, slots=True)
class _Awaited:
    """A tensor's pages, which are read by a `ReadAhead`."""

    ahead: ReadAhead
    name: str
    pages: Pages

    def need(self, begin: int, end: int) -> None:
        self.ahead.need(self.name, begin, end)

    def release(self, begin: int, end: int) -> None:
        self.pages.release(begin, end)
