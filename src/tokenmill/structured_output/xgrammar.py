"""The other backend: xgrammar, a pushdown automaton whose masks are mostly worked out beforehand.

It takes longer to compile, bounds nothing of that, and passes over keywords that it does not know.
So only schemas whose keywords are known to be enforced are handed to it; the rest is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tokenmill.errors import ConfigError, InvalidRequestError, shown
from tokenmill.structured_output.backend import Bitmask, GrammarMatcher, refusal
from tokenmill.structured_output.gbnf import gbnf_to_lark, is_gbnf
from tokenmill.structured_output.json_schema import (
    KEYWORDS,
    Schema,
    enforceable_schema,
    subschemas,
)
from tokenmill.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from tokenmill.tokenizer.tokenizer import Tokenizer

_MAX_BLANKS = 1
"""White space characters that may stand between the parts of JSON."""
_LONGEST_REASON = 400
_BESIDE_ANYTHING = ("$defs", "definitions")
_BY_TYPE: dict[str, frozenset[str]] = {
    "object": frozenset(("properties", "required", "additionalProperties")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "string": frozenset(("pattern", "minLength", "maxLength")),
    "integer": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
}
"""Keywords that are enforced beside a `type`; what is not there has to stand alone."""
_ALONE = ("const", "enum", "anyOf", "$ref")
_CHARACTERS = '[^"\\\\\\u0000-\\u001f\\u007f]'
"""What a string holds without escapes."""
_PLAIN_PATTERN = re.compile(
    r"(?:[A-Za-z0-9 _@#,:;=%/<>!~&-]|\\[d.+*?()\[\]{}|^$/-]|[*+?|)^$]|\((?!\?)|\{\d+(?:,\d*)?\}"
    r"|\[(?:[^\^\]\[\\\"\x00-\x1f]|\\d)(?:[^\]\[\\\"\x00-\x1f]|\\d)*\])*"
)
"""Patterns that match no character which JSON would escape: the library does not escape them."""


class XGrammarBackend:
    """xgrammar with one tokenizer. Arguments and errors are those of `LLGuidanceBackend`."""

    name = "xgrammar"

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        num_threads: int,
    ) -> None:
        try:
            import xgrammar
        except ImportError as error:
            raise ConfigError(
                'structured outputs by xgrammar need `pip install "tokenmill[xgrammar]"`.'
            ) from error
        self._tokenizer = tokenizer
        self._info = xgrammar.TokenizerInfo(
            [_bytes_of(tokenizer, token_id) for token_id in range(vocab_size)],
            vocab_size=vocab_size,
            stop_token_ids=list(eos_token_ids),
        )
        self.eos_token_ids = tuple(eos_token_ids)
        self._library = xgrammar
        self._compiler = xgrammar.GrammarCompiler(
            self._info, max_threads=num_threads, cache_enabled=False
        )
        self._batch = xgrammar.BatchGrammarMatcher(num_threads)
        words = np.zeros(-(-vocab_size // 32), np.uint32)
        for token_id in eos_token_ids:
            words[token_id >> 5] |= np.uint32(1 << (token_id & 31))
        self._end_words = words.view(np.int32)

    def compile(self, params: StructuredOutputsParams) -> XGrammarGrammar:
        """Raises `InvalidRequestError` for what is malformed or cannot be enforced."""
        try:
            compiled = self._compile(params)
            grammar = XGrammarGrammar(self, compiled)
            grammar.make_matcher().fill(np.zeros_like(self._end_words)[None])
        except InvalidRequestError:
            raise
        except RecursionError as error:
            raise refusal(params, "it is nested too deep") from error
        except (ValueError, RuntimeError, TypeError) as error:
            raise refusal(params, _reason(error)) from error
        return grammar

    def fill_bitmasks(self, matchers: Sequence[GrammarMatcher], bitmask: Bitmask) -> None:
        """See `GrammarBackend`."""
        inner = [each.matcher for each in matchers if isinstance(each, XGrammarMatcher)]
        assert len(inner) == len(matchers), "matchers of another backend"
        self._batch.batch_fill_next_token_bitmask(inner, bitmask)

    def _compile(self, params: StructuredOutputsParams) -> Any:
        kind, source, compiler = params.kind, params.source, self._compiler
        if kind in ("json", "json_object"):
            return compiler.compile_json_schema(json.dumps(_schema_of(params)), **_spacing(params))
        if kind == "regex":
            return compiler.compile_regex(source)
        if kind == "choice":
            assert params.choice is not None
            return compiler.compile_grammar(f"root ::= {' | '.join(map(_literal, params.choice))}")
        if kind == "structural_tag":
            return compiler.compile_structural_tag(source)
        if not is_gbnf(source):
            return compiler.compile_lark(source)
        gbnf_to_lark(source)  # refuses what is malformed in words of its own
        return compiler.compile_grammar(source)

    def only_end_tokens(self, words: Bitmask) -> bool:
        """Whether a row [1, num_words] allows nothing but end tokens."""
        return not (words[0] & ~self._end_words).any()

    def new_matcher(self, compiled: Any) -> XGrammarMatcher:
        """A matcher at the start of the text."""
        return XGrammarMatcher(self, self._library.GrammarMatcher(compiled))

    def new_row(self) -> Bitmask:
        """Space for the mask of one row."""
        return np.zeros((1, len(self._end_words)), np.int32)

    def encode(self, text: str) -> list[int]:
        """Tokens that write a text, and nothing else; empty if there are none."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        written = b"".join(_bytes_of(self._tokenizer, token_id) for token_id in ids)
        return ids if written == text.encode() else []


class XGrammarGrammar:
    """A compiled grammar."""

    def __init__(self, backend: XGrammarBackend, compiled: Any) -> None:
        self._backend = backend
        self._compiled = compiled

    def make_matcher(self) -> XGrammarMatcher:
        return self._backend.new_matcher(self._compiled)


class XGrammarMatcher:
    """See `GrammarMatcher`."""

    def __init__(self, backend: XGrammarBackend, matcher: Any) -> None:
        self._backend = backend
        self.matcher = matcher
        self._is_lost = False

    def accept(self, token_ids: Sequence[int]) -> bool:
        self._is_lost |= not all(self.matcher.accept_token(token_id) for token_id in token_ids)
        return not self._is_lost

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self.matcher.rollback(num_tokens)

    def count_valid(self, token_ids: Sequence[int]) -> int:
        count = 0
        for token_id in token_ids:
            if self.matcher.is_terminated() or not self.matcher.accept_token(token_id):
                break
            count += 1
        self.rollback(count)
        return count

    def is_accepting(self) -> bool:
        return bool(self.matcher.is_completed())

    def is_terminated(self) -> bool:
        if self.matcher.is_terminated():
            return True
        if not self.matcher.is_completed():
            return False
        row = self._backend.new_row()
        self.fill(row)
        return self._backend.only_end_tokens(row)

    def error(self) -> str:
        return "a token was refused" if self._is_lost else ""

    def forced_tokens(self) -> list[int]:
        if self.matcher.is_completed():
            return []
        tokens = self._backend.encode(self.matcher.find_jump_forward_string())
        # What follows may be written together with the end of the last one.
        return tokens[: self.count_valid(tokens[:-1])]

    def fill(self, row: Bitmask) -> None:
        """Put what is allowed into one row, [1, num_words]."""
        self.matcher.fill_next_token_bitmask(row, 0)


def _bytes_of(tokenizer: Tokenizer, token_id: int) -> bytes:
    """What a token writes; special tokens write nothing, and no grammar allows them."""
    if token_id in tokenizer.special_token_ids:
        return b""
    written = tokenizer.token_bytes(token_id)
    if written is None:
        raise ConfigError(
            "structured outputs by xgrammar need a tokenizer whose tokens are bytes; choose the"
            " backend llguidance."
        )
    return written


def _schema_of(params: StructuredOutputsParams) -> Schema:
    if params.kind == "json_object":
        return {"type": "object"}
    decoded = msgspec.json.decode(params.source)
    schema = enforceable_schema(decoded, closed=params.disable_additional_properties)
    for path, each in subschemas(schema):
        _check(path, each)
    return schema


def _check(path: str, schema: Schema) -> None:
    """Refuse all that is not known to be enforced. Raises `ValueError` that names the keyword."""
    keywords = [each for each in schema if each in KEYWORDS and each not in _BESIDE_ANYTHING]
    if not keywords:
        return
    kind = schema.get("type")
    if kind is None:
        if len(keywords) > 1 or keywords[0] not in _ALONE:
            raise _refusal(path, keywords[0], "needs a type, and nothing else, beside it")
        return
    if isinstance(kind, list) and len(keywords) > 1:
        raise _refusal(path, "type", "several types cannot stand beside other keywords")
    for keyword in keywords:
        if keyword != "type" and keyword not in _BY_TYPE.get(str(kind), ()):
            raise _refusal(path, keyword, f"is not enforced beside the type {kind}")
    _check_object(path, schema)
    _rewrite_string(path, schema)


def _check_object(path: str, schema: Schema) -> None:
    """Names that may come twice, once as another property, and names without a schema."""
    properties = schema.get("properties", {})
    if properties and schema.get("additionalProperties", False) is not False:
        raise _refusal(path, "additionalProperties", "must be false beside properties")
    missing = [name for name in schema.get("required", ()) if name not in properties]
    if missing:
        raise _refusal(path, "required", f"{shown(missing[0])} is none of the properties")


def _rewrite_string(path: str, schema: Schema) -> None:
    """Lengths as a pattern of characters that need no escape."""
    pattern = schema.get("pattern")
    low, high = schema.pop("minLength", 0), schema.pop("maxLength", None)
    if pattern is None:
        if low or high is not None:
            schema["pattern"] = f"^{_CHARACTERS}{{{low},{'' if high is None else high}}}$"
    elif low or high is not None:
        raise _refusal(path, "pattern", "is not enforced beside a length")
    elif not _PLAIN_PATTERN.fullmatch(pattern):
        raise _refusal(path, "pattern", "is not enforced with such characters")


def _refusal(path: str, keyword: str, why: str) -> ValueError:
    return ValueError(f"{keyword} at {path}: {why}, by xgrammar; llguidance may enforce it")


def _spacing(params: StructuredOutputsParams) -> dict[str, Any]:
    if params.whitespace_pattern is not None:
        raise ValueError("xgrammar knows no whitespace_pattern")
    if params.disable_any_whitespace:
        return {"any_whitespace": False, "separators": (",", ":"), "strict_mode": True}
    return {"any_whitespace": True, "max_whitespace_cnt": _MAX_BLANKS, "strict_mode": True}


def _literal(text: str) -> str:
    """A GBNF literal for just this text."""
    escaped = "".join(
        char if char.isalnum() and char.isascii() else f"\\U{ord(char):08x}" for char in text
    )
    return f'"{escaped}"'


def _reason(error: Exception) -> str:
    message = " ".join(str(error).split())
    return message if len(message) <= _LONGEST_REASON else f"{message[: _LONGEST_REASON - 3]}..."
