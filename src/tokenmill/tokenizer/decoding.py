"""Token ids to text, whole or token by token.

Nearly every generating model's decoder is a plain concatenation: each token stands for some bytes,
and the text is those bytes read as UTF-8. `ByteDecoding` works on that: the text of a stream is, by
construction, the text of the whole, at a constant cost per token. Decoders of any other kind are
left to the library (`LibraryDecoding`).

Bytes that are no UTF-8 become U+FFFD: byte-level vocabularies write one for each maximal broken
sequence, byte-fallback vocabularies one for each byte, as their own libraries do. (The `tokenizers`
library gives up whole runs of byte-fallback tokens if one byte in the run is wrong; SentencePiece
keeps the characters that are complete, and so do we, since they may already be on the user's
screen.)
"""

from __future__ import annotations

import codecs
import contextlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tokenizers

REPLACEMENT = "\ufffd"
_MAX_INCOMPLETE_BYTES = 3
"""A UTF-8 character has at most four bytes, so an unfinished one has three."""
_MAX_NEIGHBOURS = 4
"""How far back a decoder of the library may look; also the most tokens of one character."""
_ONE_PER_BYTE = "tokenmill.one_replacement_per_byte"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_ONE_PER_BYTE, _replace_each_byte)


def _byte_alphabet() -> dict[str, int]:
    """The printable character by which byte-level vocabularies spell each byte (GPT-2's table):
    printable Latin-1 stands for itself, the other 68 bytes for U+0100 and up, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


BYTE_ALPHABET = _byte_alphabet()


class TextStream(Protocol):
    """The text of a growing list of tokens."""

    def push(self, token_id: int) -> str:
        """Add a token; the text that has become certain through it, often its own. Ids outside the
        vocabulary have no text.
        """
        ...

    def finish(self) -> str:
        """The text of what is still held back because it ends inside a character."""
        ...


class Decoding(Protocol):
    """A vocabulary's way from ids to text."""

    def decode(self, token_ids: Iterable[int], skipped: frozenset[int]) -> str:
        """Text of the whole list, leaving out the ids in `skipped`."""
        ...

    def token_text(self, token_id: int) -> str:
        """Text of one token as it reads inside a text; U+FFFD for parts of a character."""
        ...

    def stream(self, context: Sequence[int], skipped: frozenset[int]) -> TextStream:
        """A stream whose text continues that of `context`."""
        ...


def decoding_of(backend: tokenizers.Tokenizer, vocab_size: int) -> Decoding:
    """The decoding for a tokenizer of the library whose largest id is `vocab_size - 1`."""
    spelling = _spelling_of(backend)
    if spelling is None:
        return LibraryDecoding(backend, vocab_size)
    return ByteDecoding(backend, vocab_size, spelling)


@dataclass(frozen=True, slots=True)
class _Spelling:
    """How a vocabulary writes bytes as token strings."""

    to_bytes: Callable[[str], bytes]
    errors: str
    """Name of the codec error handler for bytes that are no UTF-8."""
    strips_first_space: bool
    """Whether a text loses its first character if that is a space (it was put there to encode)."""


def _spelling_of(backend: tokenizers.Tokenizer) -> _Spelling | None:
    """The spelling, if the decoder is a concatenation of bytes."""
    if backend.decoder is None:
        return None
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return _Spelling(_byte_level_bytes, "replace", strips_first_space=False)
    replaced = [step for step in steps if step["type"] == "Replace" and "String" in step["pattern"]]
    rest = steps[len(replaced) :]
    names = [step["type"] for step in rest]
    if steps[: len(replaced)] != replaced or names[:2] != ["ByteFallback", "Fuse"]:
        return None
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if rest[2:] not in ([], [strip]):
        return None
    pairs = [(step["pattern"]["String"], step["content"]) for step in replaced]
    return _Spelling(_fallback_bytes(pairs), _ONE_PER_BYTE, strips_first_space=rest[2:] == [strip])


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([BYTE_ALPHABET[char] for char in token])
    except KeyError:  # an added token, written as it reads
        return token.encode()


def _fallback_bytes(replacements: list[tuple[str, str]]) -> Callable[[str], bytes]:
    def to_bytes(token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte:
            return bytes([int(byte[1], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return to_bytes


class ByteDecoding:
    """Text is the tokens' bytes, one after the other."""

    def __init__(self, backend: tokenizers.Tokenizer, vocab_size: int, spelling: _Spelling) -> None:
        self._backend = backend
        self._vocab_size = vocab_size
        self.spelling = spelling
        self._whole_texts: dict[int, str | None] = {}
        """What `whole_text` has found: streams ask for the same few thousand tokens."""

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; empty if there is no such token."""
        if not 0 <= token_id < self._vocab_size:
            return b""
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self.spelling.to_bytes(token)

    def whole_text(self, token_id: int) -> str | None:
        """Text of a token that consists of whole characters; None for any other."""
        try:
            return self._whole_texts[token_id]
        except KeyError:
            pass
        if not 0 <= token_id < self._vocab_size:  # not to be kept: there are many of those
            return ""
        text: str | None = None
        with contextlib.suppress(UnicodeDecodeError):
            text = self.token_bytes(token_id).decode("utf-8")
        self._whole_texts[token_id] = text
        return text

    def decode(self, token_ids: Iterable[int], skipped: frozenset[int]) -> str:
        whole = b"".join(self.token_bytes(i) for i in token_ids if i not in skipped)
        text = whole.decode("utf-8", self.spelling.errors)
        return text.removeprefix(" ") if self.spelling.strips_first_space else text

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", self.spelling.errors)

    def stream(self, context: Sequence[int], skipped: frozenset[int]) -> TextStream:
        return _ByteStream(self, context, skipped)


class _ByteStream:
    def __init__(
        self, decoding: ByteDecoding, context: Sequence[int], skipped: frozenset[int]
    ) -> None:
        self._decoding = decoding
        self._skipped = skipped
        errors = decoding.spelling.errors
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)
        before = self._last_bytes(context)
        self._utf8.decode(before)
        incomplete, _ = self._utf8.getstate()
        self._in_character = bool(incomplete)
        # The first text loses what is already part of the context's: the replacement of a character
        # that the context leaves unfinished, or nothing. A space is lost only at a text's start.
        self._overlap = incomplete.decode("utf-8", errors)
        if not before and decoding.spelling.strips_first_space:
            self._overlap = " "

    def _last_bytes(self, context: Sequence[int]) -> bytes:
        """As many bytes as an unfinished character may have; empty if the context has no text."""
        tail = b""
        for token_id in reversed(context):
            if token_id not in self._skipped:
                tail = self._decoding.token_bytes(token_id) + tail
            if len(tail) >= _MAX_INCOMPLETE_BYTES:
                break
        return tail[-_MAX_INCOMPLETE_BYTES:]

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if not self._in_character:
            whole = self._decoding.whole_text(token_id)
            if whole is not None:
                return self._new_text(whole) if self._overlap else whole
        text = self._utf8.decode(self._decoding.token_bytes(token_id))
        self._in_character = bool(self._utf8.getstate()[0])
        return self._new_text(text)

    def finish(self) -> str:
        return self._new_text(self._utf8.decode(b"", final=True))

    def _new_text(self, text: str) -> str:
        if not text or not self._overlap:
            return text
        overlap, self._overlap = self._overlap, ""
        return text.removeprefix(overlap)


class LibraryDecoding:
    """Text is what the library makes of the tokens; it may look at a token's neighbours."""

    def __init__(self, backend: tokenizers.Tokenizer, vocab_size: int) -> None:
        self._backend = backend
        self._vocab_size = vocab_size

    def has_text(self, token_id: int, skipped: frozenset[int]) -> bool:
        """Whether the library may be asked for it."""
        return 0 <= token_id < self._vocab_size and token_id not in skipped

    def decode(self, token_ids: Iterable[int], skipped: frozenset[int]) -> str:
        known = [i for i in token_ids if self.has_text(i, skipped)]
        return str(self._backend.decode(known, skip_special_tokens=False))

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id], frozenset())

    def stream(self, context: Sequence[int], skipped: frozenset[int]) -> TextStream:
        return _NeighbourStream(self, context, skipped)


class _NeighbourStream:
    """A token's text is what it adds to the text of the few tokens before it."""

    def __init__(
        self, decoding: LibraryDecoding, context: Sequence[int], skipped: frozenset[int]
    ) -> None:
        self._decoding = decoding
        self._skipped = skipped
        neighbours: list[int] = []
        for token_id in reversed(context):
            if len(neighbours) == _MAX_NEIGHBOURS:
                break
            if decoding.has_text(token_id, skipped):
                neighbours.insert(0, token_id)
        self._neighbours = neighbours
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        if not self._decoding.has_text(token_id, self._skipped):
            return ""
        self._pending.append(token_id)
        text = self._pending_text()
        if text.endswith(REPLACEMENT) and len(self._pending) < _MAX_NEIGHBOURS:
            return ""
        self._settle()
        return text

    def finish(self) -> str:
        text = self._pending_text()
        self._settle()
        return text

    def _pending_text(self) -> str:
        before = self._decoding.decode(self._neighbours, frozenset())
        whole = self._decoding.decode([*self._neighbours, *self._pending], frozenset())
        if whole.startswith(before):
            return whole[len(before) :]
        # The decoder took something back (a blank before a comma, say): what follows the part that
        # stayed.
        same = next(i for i, char in enumerate(before) if not whole.startswith(char, i))
        return whole[same:]

    def _settle(self) -> None:
        self._neighbours = [*self._neighbours, *self._pending][-_MAX_NEIGHBOURS:]
        self._pending = []
