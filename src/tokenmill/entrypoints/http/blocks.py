"""An answer as blocks: stretches of text and of reasoning, and calls, one behind the other.

The dialects whose answers are lists of such blocks read them here, streamed or not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from tokenmill.entrypoints.http.tools import AnswerPlan
from tokenmill.entrypoints.parsers.events import (
    CallArguments,
    CallStart,
    ContentPiece,
    Event,
    ReasoningPiece,
)


class BlockKind(Enum):
    """What a block holds."""

    TEXT = "text"
    REASONING = "reasoning"
    CALL = "call"
    CUSTOM_CALL = "custom call"
    """Of a tool that takes a text."""


@dataclass(slots=True, eq=False)
class Block:
    """One of them; its text grows until it ends."""

    index: int
    kind: BlockKind
    call_id: str = ""
    name: str = ""
    """Of the function, if this is a call."""
    pieces: list[str] = field(default_factory=list)
    ended: bool = False
    """Whether something came behind it, or the answer stopped by itself."""

    @property
    def text(self) -> str:
        """So far; of a call, its arguments or its input."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class BlockStart:
    """A block begins, empty."""

    block: Block


@dataclass(frozen=True, slots=True)
class BlockPiece:
    """More text of the block that is open."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class BlockEnd:
    """The block that was open is complete, or the answer ends within it."""

    block: Block


BlockEvent = BlockStart | BlockPiece | BlockEnd


class BlockReader:
    """Reads one answer. A block is open from its start to its end, and no other one meanwhile."""

    def __init__(self, plan: AnswerPlan) -> None:
        self._plan = plan
        self._parser = plan.parser() if plan.takes_apart else None
        self.blocks: list[Block] = []
        self._open: Block | None = None

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return 0 if self._parser is None else self._parser.num_calls

    def push(self, text: str) -> list[BlockEvent]:
        """What more text brings."""
        if self._parser is not None:
            return self._read(self._parser.push(text))
        return self._read([ContentPiece(text)] if text else [])

    def finish(self, *, stopped: bool) -> list[BlockEvent]:
        """The text has ended; `stopped` says that it was not cut off."""
        events = self._read([] if self._parser is None else self._parser.finish())
        self._end(events, ended=stopped)
        return events

    def _read(self, found: list[Event]) -> list[BlockEvent]:
        events: list[BlockEvent] = []
        for event in self._plan.shown(found):
            match event:
                case ContentPiece(text):
                    self._add(events, BlockKind.TEXT, text)
                case ReasoningPiece(text):
                    self._add(events, BlockKind.REASONING, text)
                case CallStart(_, call_id, name, is_custom):
                    kind = BlockKind.CUSTOM_CALL if is_custom else BlockKind.CALL
                    self._start(events, Block(len(self.blocks), kind, call_id, name))
                case CallArguments(_, text):
                    assert self._open is not None  # they follow their call's start
                    self._open.pieces.append(text)
                    events.append(BlockPiece(self._open, text))
        return events

    def _add(self, events: list[BlockEvent], kind: BlockKind, text: str) -> None:
        block = self._open
        if block is None or block.kind is not kind:
            block = Block(len(self.blocks), kind)
            self._start(events, block)
        block.pieces.append(text)
        events.append(BlockPiece(block, text))

    def _start(self, events: list[BlockEvent], block: Block) -> None:
        self._end(events, ended=True)
        self.blocks.append(block)
        self._open = block
        events.append(BlockStart(block))

    def _end(self, events: list[BlockEvent], *, ended: bool) -> None:
        block, self._open = self._open, None
        if block is None:
            return
        block.ended = ended
        events.append(BlockEnd(block))
