"""`Tokenizer`: our face of the `tokenizers` library, for any checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import tokenizers

from tokenmill.checkpoint.checkpoint import TokenizerData
from tokenmill.errors import CheckpointError, InvalidRequestError
from tokenmill.tokenizer.decoding import ByteDecoding, TextStream, decoding_of

DEFAULT_TEMPLATE = "default"
_UNBOUNDED_CHARS = 2**31
_MAX_COMPOSED_CHARS = 4
"""Unicode normalisation makes one character of at most so many."""


class Tokenizer:
    """Text to token ids and back.

    Safe to share among threads: nothing is changed after construction. `encode` and `decode` only
    read the library's object, whose one mutable part (a cache of words) it locks itself; padding
    and truncation, which other programs switch on and off on a shared tokenizer, are off for good.
    Per-request state lives in the `TextStream` that `stream` returns.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        vocabulary: Mapping[str, int] | None = None,
        special_tokens: Mapping[str, str] = MappingProxyType({}),
        eos_token_ids: Sequence[int] = (),
        chat_templates: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`backend` belongs to the new object from here on; `vocabulary` is its own, every token
        with its id, if that is at hand already.
        """
        backend.no_padding()
        backend.no_truncation()
        _register_special_tokens(backend, special_tokens.values())
        if vocabulary is None:
            vocabulary = backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise CheckpointError("the tokenizer's vocabulary is empty; its files are damaged.")
        self._backend = backend
        self.vocab_size = max(vocabulary.values()) + 1
        """Largest token id and one."""
        self._decoding = decoding_of(backend, self.vocab_size)
        self._no_ids: frozenset[int] = frozenset()
        self.max_token_chars = _max_token_chars(backend, vocabulary)
        """No token stands for more characters of a text than this."""
        self.special_tokens: Mapping[str, str] = MappingProxyType(dict(special_tokens))
        """`bos_token`, `eos_token` and so on, as chat templates see them."""
        self.special_token_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        """Ids that `skip_special_tokens` leaves out."""
        self.bos_token_id = self._id_of_special("bos_token")
        """Beginning of a text; None if there is no such token."""
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        """Ids by which the tokenizer's own files say that a text or a turn ends."""
        self.chat_templates: Mapping[str, str] = MappingProxyType(dict(chat_templates))
        """Jinja sources by name; `default` is the one for conversations without tools."""

    @property
    def chat_template(self) -> str | None:
        """The default chat template's source; None if the model has none."""
        return self.chat_templates.get(DEFAULT_TEMPLATE)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Special tokens written out in it are parsed as such.

        `add_special_tokens` also adds what the tokenizer itself puts around a text (a BOS, mostly).
        Raises `InvalidRequestError` if the text has lone surrogates, which no tokenizer can encode.
        """
        try:
            # Unlike `encode`, this lets other threads run meanwhile: megabytes take seconds.
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            return list(encoding.ids)
        except TypeError as error:
            raise _half_character() from error

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int | None]:
        """Ids of two texts as the tokenizer joins them, and the place of the first token whose type
        is 1; None where it gives both texts one type.

        Raises `InvalidRequestError` as `encode` does.
        """
        try:
            (encoding,) = self._backend.encode_batch([(first, second)])
        except TypeError as error:
            raise _half_character() from error
        ids, types = list(encoding.ids), list(encoding.type_ids)
        return ids, types.index(1) if 1 in types else None

    def decode(
        self,
        token_ids: Iterable[int],
        *,
        skip_special_tokens: bool = False,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Text of the ids. Those outside the vocabulary have none."""
        if spaces_between_special_tokens:
            return self._decoding.decode(token_ids, self._skipped(skip_special_tokens))
        stream = self.stream(
            skip_special_tokens=skip_special_tokens, spaces_between_special_tokens=False
        )
        return "".join([*map(stream.push, token_ids), stream.finish()])

    def stream(
        self,
        context: Sequence[int] = (),
        *,
        skip_special_tokens: bool = False,
        spaces_between_special_tokens: bool = True,
    ) -> TextStream:
        """The text of tokens to come, as it continues that of the `context` ids.

        Joined, it equals `decode(context + ids)` after `decode(context)`.
        """
        stream = self._decoding.stream(context, self._skipped(skip_special_tokens))
        if spaces_between_special_tokens:
            return stream
        return _WithoutBlanks(stream, self.special_token_ids)

    def decode_token(self, token_id: int) -> str:
        """Text of one token as it reads inside a text; U+FFFD for parts of a character."""
        return self._decoding.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes | None:
        """What a token adds to a text; None if that depends on its neighbours."""
        if not isinstance(self._decoding, ByteDecoding):
            return None
        return self._decoding.token_bytes(token_id)

    def to_json(self) -> str:
        """The tokenizer as the library writes it, for other programs that read that."""
        return str(self._backend.to_str())

    def token_to_id(self, token: str) -> int | None:
        """Id of a token as the vocabulary spells it."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def _skipped(self, skip_special_tokens: bool) -> frozenset[int]:
        return self.special_token_ids if skip_special_tokens else self._no_ids

    def _id_of_special(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_to_id(token)


def _half_character() -> InvalidRequestError:
    return InvalidRequestError(
        "the text is not valid Unicode: it holds one half of a surrogate pair, as bytes do that are"
        " no UTF-8; decode it with errors='replace'.",
        parameter="prompt",
    )


class _WithoutBlanks:
    """Drops the blanks that some decoders write between two special tokens."""

    def __init__(self, stream: TextStream, special_token_ids: frozenset[int]) -> None:
        self._stream = stream
        self._special_token_ids = special_token_ids
        self._after_special = False

    def push(self, token_id: int) -> str:
        text = self._stream.push(token_id)
        special = token_id in self._special_token_ids
        if special and self._after_special:
            text = text.lstrip(" ")
        self._after_special = special
        return text

    def finish(self) -> str:
        return self._stream.finish()


def load_tokenizer(data: TokenizerData) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Raises `CheckpointError` if it has none, or one that is damaged or of a kind we cannot build.
    """
    # Each format is imported when one of its checkpoints is met: both files import this one.
    if data.gguf_metadata:
        from tokenmill.tokenizer.from_gguf import tokenizer_from_gguf

        return tokenizer_from_gguf(data.gguf_metadata)
    if data.directory is not None:
        from tokenmill.tokenizer.from_directory import tokenizer_from_directory

        return tokenizer_from_directory(data.directory)
    raise CheckpointError(
        "the model has no tokenizer; name one with `tokenizer=` (--tokenizer),"
        " or set skip_tokenizer_init to work on token ids."
    )


def _register_special_tokens(backend: tokenizers.Tokenizer, tokens: Iterable[str]) -> None:
    """Let tokens that only a configuration calls special be found in texts, and skipped."""
    special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    missing = [
        tokenizers.AddedToken(token, special=True, normalized=False)
        for token in dict.fromkeys(tokens)
        if token not in special and backend.token_to_id(token) is not None
    ]
    if missing:
        backend.add_special_tokens(missing)


def _max_token_chars(backend: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> int:
    model = backend.model
    every_char_counts = isinstance(model, tokenizers.models.BPE) and (
        model.byte_fallback or model.unk_token is None
    )
    if not every_char_counts:  # a word that nobody knows is one token, however long
        return _UNBOUNDED_CHARS
    composed = 1 if backend.normalizer is None else _MAX_COMPOSED_CHARS
    return max(map(len, vocabulary)) * composed
