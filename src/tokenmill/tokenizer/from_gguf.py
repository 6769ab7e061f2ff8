"""A tokenizer from the metadata of a GGUF file.

The file holds tables in place of a tokenizer.json: token strings, their types, and either merges
(byte-level vocabularies, `gpt2`) or scores from which the merges follow (SentencePiece BPE,
`llama`). Nothing in the tables is trusted: the library panics or cuts text wrongly on tables that
contradict themselves.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers

from tokenmill.errors import CheckpointError
from tokenmill.tokenizer.decoding import BYTE_ALPHABET
from tokenmill.tokenizer.from_directory import surrounding
from tokenmill.tokenizer.pre_tokenizers import build_pre_tokenizer, pre_tokenization
from tokenmill.tokenizer.tokenizer import DEFAULT_TEMPLATE, Tokenizer

logger = logging.getLogger(__name__)

MAX_VOCABULARY = 2**22
"""Most tokens in a table; the largest vocabularies in use have a sixteenth of it."""
MAX_TOKEN_CHARS = 2**14
SPACE = "\u2581"
"""How SentencePiece spells a space."""

_SPECIAL_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # the format spells it so
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
    "eot_token": "eot_token_id",
    "eom_token": "eom_token_id",
}
_SENTENCEPIECE_DEFAULT_IDS = {"unk_token": 0, "bos_token": 1, "eos_token": 2}
_END_TOKENS = ("eos_token", "eot_token", "eom_token")
_TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "mask_token")
_KNOWN_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
"""Control tokens that end a turn wherever they exist; older files name only the end of a text."""


# Values of tokenizer.ggml.token_type. The others, unused tokens (5) and bytes (6), need no care.
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4


@dataclass(frozen=True, slots=True)
class _Table:
    """A file's tables, checked."""

    tokens: list[str]
    """The string of each id, no two alike."""
    types: list[int]
    """The token type of each id."""
    special_ids: dict[str, int]
    """Ids of `bos_token` and so on."""
    metadata: Mapping[str, Any]

    def flag(self, key: str, default: bool) -> bool:
        """A boolean key, where it may be absent."""
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        return default if value is None else bool(value)

    def of_type(self, *types: int) -> dict[str, int]:
        """Tokens of these types and their ids."""
        return {self.tokens[i]: i for i, kind in enumerate(self.types) if kind in types}

    def special_token(self, name: str) -> str | None:
        """The string of a special token; None if the model has none such."""
        token_id = self.special_ids.get(name)
        return None if token_id is None else self.tokens[token_id]


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that `tokenizer.*` keys describe.

    Raises `CheckpointError` for a kind of tokenizer that is not known, and for tables that are
    missing or contradict themselves.
    """
    model = metadata.get("tokenizer.ggml.model")
    if not isinstance(model, str) or model not in _BUILDERS:
        raise CheckpointError(
            f"tokenizer.ggml.model is {model!r}; supported are {', '.join(sorted(_BUILDERS))}."
            f" Name the original tokenizer with `tokenizer=` (--tokenizer)."
        )
    table = _read_table(metadata, _SENTENCEPIECE_DEFAULT_IDS if model == "llama" else {})
    backend = _BUILDERS[model](table)
    _add_tokens(backend, table)
    names = [name for name in _TEMPLATE_TOKENS if name in table.special_ids]
    return Tokenizer(
        backend,
        vocabulary={token: token_id for token_id, token in enumerate(table.tokens)},
        special_tokens={name: table.tokens[table.special_ids[name]] for name in names},
        eos_token_ids=_end_ids(table),
        chat_templates=_chat_templates(metadata),
    )


def _byte_level(table: _Table) -> tokenizers.Tokenizer:
    """Byte-level BPE with the file's merges."""
    name = table.metadata.get("tokenizer.ggml.pre")
    if name is None:
        logger.warning("the file names no pre-tokenizer (tokenizer.ggml.pre); splitting as GPT-2")
        name = "default"
    kind = pre_tokenization(str(name))
    vocabulary = {token: token_id for token_id, token in enumerate(table.tokens)}
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocabulary, _merges(table.metadata, vocabulary), ignore_merges=kind.ignores_merges
        )
    )
    if kind.composes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = build_pre_tokenizer(kind)
    backend.decoder = decoders.ByteLevel()
    _surround(backend, table, adds_bos=kind.adds_bos)
    return backend


def _sentencepiece(table: _Table) -> tokenizers.Tokenizer:
    """SentencePiece BPE: spaces spelled U+2581, one put before a text, bytes as a last resort."""
    if table.flag("remove_extra_whitespaces", False):
        raise CheckpointError(
            "tokenizer.ggml.remove_extra_whitespaces is set, which is not supported for the llama"
            " kind of tokenizer; name the original one with `tokenizer=` (--tokenizer)."
        )
    # Some files spell runs of spaces as such, though text reaches the merges with U+2581.
    tokens = [SPACE * len(t) if not t.strip(" ") else t for t in table.tokens]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise CheckpointError("tokenizer.ggml.tokens lists a run of spaces twice.")
    pieces = [
        (i, token)
        for i, token in enumerate(tokens)
        if table.types[i] == NORMAL or not token.strip(SPACE)
    ]
    scores = _scores(table.metadata, len(tokens))
    pieces.sort(key=lambda piece: (-scores[piece[0]], piece[0]))
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocabulary,
            merges_by_rank([token for _, token in pieces]),
            unk_token=table.special_token("unk_token"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    adds_space = table.flag("add_space_prefix", True)
    spelling = normalizers.Replace(" ", SPACE)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), spelling]) if adds_space else spelling
    )
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(
        [*steps, decoders.Strip(" ", 1, 0)] if adds_space else steps
    )
    if not adds_space:
        # SentencePiece takes runs of spaces that its user has defined (Gemma's) out of a text
        # before it merges anything. They are spelled so only once the text is normalised.
        runs = [SPACE * len(t) for t in table.of_type(USER_DEFINED) if not t.strip(f" {SPACE}")]
        backend.add_tokens(
            [tokenizers.AddedToken(run, special=False, normalized=True) for run in runs]
        )
    _surround(backend, table, adds_bos=True)
    return backend


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}


def merges_by_rank(pieces: Sequence[str]) -> list[tuple[str, str]]:
    """The merges that lead to each of `pieces`, best first: every way to cut one into two others.

    SentencePiece joins the neighbours whose union ranks best; a list of merges says the same.
    """
    known = set(pieces)
    return [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in known and piece[cut:] in known
    ]


def _surround(backend: tokenizers.Tokenizer, table: _Table, *, adds_bos: bool) -> None:
    """Put BOS and EOS around texts as the file says, or else as its kind of vocabulary does."""
    bos = table.special_token("bos_token") if table.flag("add_bos_token", adds_bos) else None
    eos = table.special_token("eos_token") if table.flag("add_eos_token", False) else None
    backend.post_processor = surrounding(backend, bos, eos)


def _add_tokens(backend: tokenizers.Tokenizer, table: _Table) -> None:
    """Tokens that are found in text as a whole: control tokens, which have no text of their own,
    and tokens defined by the user, which have.
    """
    special = table.of_type(CONTROL, UNKNOWN)
    plain = table.of_type(USER_DEFINED)
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens(
        [tokenizers.AddedToken(token, special=True, normalized=False) for token in special]
    )
    backend.add_tokens(
        [
            tokenizers.AddedToken(token, special=False, normalized=False)
            for token in plain
            if backend.token_to_id(token) is not None and token not in known
        ]
    )


def _end_ids(table: _Table) -> list[int]:
    ids = [table.special_ids[name] for name in _END_TOKENS if name in table.special_ids]
    if "eot_token" not in table.special_ids:
        control = table.of_type(CONTROL)
        ids += [control[token] for token in _KNOWN_TURN_ENDS if token in control]
    return ids


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """tokenizer.chat_template, and named ones at tokenizer.chat_template.NAME."""
    key = "tokenizer.chat_template"
    return {
        name.removeprefix(key).removeprefix(".") or DEFAULT_TEMPLATE: source
        for name, source in metadata.items()
        if isinstance(source, str) and (name == key or name.startswith(f"{key}."))
    }


def _read_table(metadata: Mapping[str, Any], default_ids: Mapping[str, int]) -> _Table:
    tokens = _array(metadata, "tokens")
    if not 0 < len(tokens) <= MAX_VOCABULARY:
        raise _lie("tokens", f"has {len(tokens)} entries; 1 to {MAX_VOCABULARY} are allowed")
    for i, token in enumerate(tokens):
        if not isinstance(token, str) or not 0 < len(token) <= MAX_TOKEN_CHARS:
            raise _lie("tokens", f"entry {i} is no string of 1 to {MAX_TOKEN_CHARS} characters")
    if len(set(tokens)) < len(tokens):
        first: dict[str, int] = {}
        i = next(i for i, token in enumerate(tokens) if first.setdefault(token, i) != i)
        raise _lie("tokens", f"entries {first[tokens[i]]} and {i} are both {tokens[i][:80]!r}")
    types = [NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        types = _array(metadata, "token_type")
        _check_length("token_type", types, len(tokens))
    return _Table(tokens, types, _special_ids(metadata, default_ids, len(tokens)), metadata)


def _special_ids(
    metadata: Mapping[str, Any], default_ids: Mapping[str, int], num_tokens: int
) -> dict[str, int]:
    ids = {name: i for name, i in default_ids.items() if i < num_tokens}
    for name, key in _SPECIAL_IDS.items():
        value = metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            continue
        if not isinstance(value, int) or not 0 <= value < num_tokens:
            raise _lie(key, f"is {value!r}, but the vocabulary has ids 0 to {num_tokens - 1}")
        ids[name] = value
    return ids


def _scores(metadata: Mapping[str, Any], num_tokens: int) -> list[float]:
    scores = _array(metadata, "scores")
    _check_length("scores", scores, num_tokens)
    if not all(isinstance(score, int | float) and not math.isnan(score) for score in scores):
        raise _lie("scores", "has entries that are no numbers")
    return scores


def _merges(metadata: Mapping[str, Any], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    if "tokenizer.ggml.merges" not in metadata:
        raise CheckpointError(
            "the file's byte-level tokenizer has no merges (tokenizer.ggml.merges);"
            " name the original tokenizer with `tokenizer=` (--tokenizer)."
        )
    if not BYTE_ALPHABET.keys() & vocabulary.keys():
        raise _lie("tokens", "spells no bytes, so this is no byte-level vocabulary")
    merges = _array(metadata, "merges")
    if set(map(type, merges)) - {str}:
        raise _lie("merges", "has entries that are no strings")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    for i, (left, right) in enumerate(pairs):
        if left + right not in vocabulary or left not in vocabulary or right not in vocabulary:
            raise _lie("merges", f"entry {i}, {merges[i]!r}, is no pair of tokens that make one")
    return pairs


def _array(metadata: Mapping[str, Any], key: str) -> list[Any]:
    """An array as a list of plain Python values."""
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise _lie(key, "is missing, or no array")
    return list(value)


def _check_length(key: str, array: Sequence[Any], num_tokens: int) -> None:
    if len(array) != num_tokens:
        raise _lie(key, f"has {len(array)} entries for {num_tokens} tokens")


def _lie(key: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"tokenizer.ggml.{key} {what}. The file is damaged; download it again, or name the original"
        f" tokenizer with `tokenizer=` (--tokenizer)."
    )
