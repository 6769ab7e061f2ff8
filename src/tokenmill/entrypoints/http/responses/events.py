"""The events of one streamed response, numbered, in the order that clients count on.

Events are written by hand: what does not change within an item is encoded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tokenmill.entrypoints.http.blocks import Block, BlockEnd, BlockKind, BlockPiece, BlockStart
from tokenmill.entrypoints.http.replies import TokenLogprob
from tokenmill.entrypoints.http.responses.output import CALLS, OutputItems
from tokenmill.entrypoints.http.responses.protocol import ResponseReply

_encode = msgspec.json.encode
_KINDS = {
    BlockKind.TEXT: "response.output_text",
    BlockKind.REASONING: "response.reasoning_text",
    BlockKind.CALL: "response.function_call_arguments",
    BlockKind.CUSTOM_CALL: "response.custom_tool_call_input",
}
"""What the deltas of a block are called."""
_NO_LOGPROBS = b',"logprobs":[]}\n\n'
_END = b"}\n\n"


class ResponseEvents:
    """Writes them; `items` has the ids."""

    def __init__(self, items: OutputItems) -> None:
        self._items = items
        self._number = 0
        self._head = b""
        """What begins every delta of the item that is open, up to its number."""
        self._tail = b""

    def start(self, response: ResponseReply) -> bytes:
        """The first two."""
        begun = {"response": response}
        return self._event("response.created", begun) + self._event("response.in_progress", begun)

    def end(self, response: ResponseReply) -> bytes:
        """The last one, which has the whole response and its status for a name."""
        return self._event(f"response.{response.status}", {"response": response})

    def begin_item(self, happened: BlockStart) -> bytes:
        """A block begins, and with it an item."""
        block, items = happened.block, self._items
        item = {"output_index": block.index, "item": items.begun(block)}
        written = self._event("response.output_item.added", item)
        if block.kind not in CALLS:
            part = {**self._place(block), "part": items.part(block, "")}
            written += self._event("response.content_part.added", part)
        name = f"{_KINDS[block.kind]}.delta"
        place = _encode(self._place(block))[1:-1]
        self._head = b'event: %s\ndata: {"type":"%s",%s,"sequence_number":' % (
            name.encode(), name.encode(), place
        )  # fmt: skip
        self._tail = _NO_LOGPROBS if block.kind is BlockKind.TEXT else _END
        return written

    def delta(self, happened: BlockPiece, logprobs: Sequence[TokenLogprob]) -> bytes:
        """More of the item that is open."""
        number, self._number = self._number, self._number + 1
        tail = b',"logprobs":' + _encode(logprobs) + _END if logprobs else self._tail
        return self._head + b'%d,"delta":' % number + _encode(happened.text) + tail

    def end_item(self, happened: BlockEnd) -> bytes:
        """The item is complete, or as complete as it gets."""
        block, items = happened.block, self._items
        place, kind = self._place(block), _KINDS[block.kind]
        if block.kind in CALLS:
            name = "input" if block.kind is BlockKind.CUSTOM_CALL else "arguments"
            done = {**place, name: block.text}
            written = self._event(f"{kind}.done", done)
        else:
            done = {**place, "text": block.text}
            if block.kind is BlockKind.TEXT:
                done["logprobs"] = items.logprobs(block)
            part = {**place, "part": items.part(block, block.text)}
            written = self._event(f"{kind}.done", done)
            written += self._event("response.content_part.done", part)
        item = {"output_index": block.index, "item": items.finished(block)}
        return written + self._event("response.output_item.done", item)

    def _place(self, block: Block) -> dict[str, Any]:
        place = {"item_id": self._items.id(block), "output_index": block.index}
        return place if block.kind in CALLS else {**place, "content_index": 0}

    def _event(self, name: str, data: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        whole = _encode({"type": name, "sequence_number": number, **data})
        return b"event: " + name.encode("ascii") + b"\ndata: " + whole + b"\n\n"
