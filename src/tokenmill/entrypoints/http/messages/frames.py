"""Messages of Anthropic's protocol on the wire: blocks of whole answers, and events of a stream.

Events are written by hand: what does not change within a block is encoded once. Each has its name,
without which clients drop it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokenmill.entrypoints.http.blocks import (
    Block,
    BlockEnd,
    BlockEvent,
    BlockKind,
    BlockPiece,
    BlockStart,
)
from tokenmill.entrypoints.http.error_shapes import ANTHROPIC_ERRORS
from tokenmill.entrypoints.http.messages.protocol import MessageReply, MessageUsage
from tokenmill.entrypoints.http.sse import Wire

_encode = msgspec.json.encode
_SIGNATURE = "unsigned"
"""Of reasoning. Nothing here looks at it when it comes back, but clients want one."""
_DELTAS = {
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.REASONING: ("thinking_delta", "thinking"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}


def event(name: str, data: bytes) -> bytes:
    """One event; `data` is JSON whose `type` is the name."""
    return b"event: " + name.encode("ascii") + b"\ndata: " + data + b"\n\n"


PING = event("ping", b'{"type":"ping"}')


class MessagesWire(Wire):
    """No mark at the end, pings in place of comments, errors in Anthropic's shape."""

    end = b""
    keep_alive = PING

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    async def failure(self, error: Exception) -> bytes:
        """The last event of a stream that went wrong."""
        return event("error", ANTHROPIC_ERRORS.body(error, self._request_id))


def block_of(block: Block) -> dict[str, Any]:
    """A block of a whole answer."""
    match block.kind:
        case BlockKind.TEXT:
            return {"type": "text", "text": block.text, "citations": None}
        case BlockKind.REASONING:
            return {"type": "thinking", "thinking": block.text, "signature": _SIGNATURE}
        case BlockKind.CALL | BlockKind.CUSTOM_CALL:  # the latter cannot be asked for
            return _call(block, _object(block.text))


class MessageEvents:
    """The events of one answer, in the order that clients count on."""

    def __init__(self) -> None:
        self._head = b""
        """What begins every delta of the block that is open."""

    def start(self, message: MessageReply) -> bytes:
        """The first event; the message is empty, but for its usage."""
        data = {"type": "message_start", "message": message}
        return event("message_start", _encode(data))

    def block(self, happened: BlockEvent) -> bytes:
        """What happens to a block; the first one that begins is followed by a ping."""
        match happened:
            case BlockPiece(_, text):
                return self._head + _encode(text) + b"}}\n\n"
            case BlockStart(block):
                kind, name = _DELTAS[block.kind]
                self._head = b'event: content_block_delta\ndata: {"type":"content_block_delta"'
                self._head += b',"index":%d,"delta":{"type":"%s","%s":' % (
                    block.index, kind.encode(), name.encode()
                )  # fmt: skip
                begun = _start_event(block)
                return begun + PING if block.index == 0 else begun
            case BlockEnd(block):
                stop = {"type": "content_block_stop", "index": block.index}
                return _signature(block) + event("content_block_stop", _encode(stop))

    def end(self, stop_reason: str, stop_sequence: str | None, usage: MessageUsage) -> bytes:
        """The last two events."""
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence, "stop_details": None}
        data = {"type": "message_delta", "delta": delta, "usage": usage}
        stop = event("message_stop", b'{"type":"message_stop"}')
        return event("message_delta", _encode(data)) + stop


def _start_event(block: Block) -> bytes:
    match block.kind:
        case BlockKind.TEXT:
            empty: dict[str, Any] = {"type": "text", "text": ""}
        case BlockKind.REASONING:
            empty = {"type": "thinking", "thinking": "", "signature": ""}
        case BlockKind.CALL | BlockKind.CUSTOM_CALL:
            empty = _call(block, {})
    data = {"type": "content_block_start", "index": block.index, "content_block": empty}
    return event("content_block_start", _encode(data))


def _signature(block: Block) -> bytes:
    if block.kind is not BlockKind.REASONING:
        return b""
    delta = {"type": "signature_delta", "signature": _SIGNATURE}
    data = {"type": "content_block_delta", "index": block.index, "delta": delta}
    return event("content_block_delta", _encode(data))


def _call(block: Block, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}


def _object(text: str) -> dict[str, Any]:
    """Arguments as an object; empty for a call that was cut off, or that is no JSON."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
