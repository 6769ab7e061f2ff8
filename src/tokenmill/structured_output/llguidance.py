"""The default backend: llguidance, an Earley parser over derivatives of regular expressions.

It refuses what it cannot enforce, and bounds the work of compiling a grammar and of every mask.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tokenmill.errors import ConfigError, InvalidRequestError
from tokenmill.structured_output.backend import Bitmask, GrammarMatcher, refusal
from tokenmill.structured_output.gbnf import gbnf_to_lark, is_gbnf
from tokenmill.structured_output.json_schema import enforceable_schema, patterns_of
from tokenmill.structured_output.structural_tag import structural_tag_to_lark
from tokenmill.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance._lib import JsonCompileOptions

    from tokenmill.tokenizer.tokenizer import Tokenizer

WHITESPACE = r"[ ]|\n[ ]{0,16}"
"""What may stand between the parts of JSON, once: a blank, or a line break and an indent."""
_LOG_NOTHING = 0
_MAX_ITEMS_IN_ROW = 2_000
_STEP_LEXER_FUEL = 200_000
_STEP_MAX_ITEMS = 50_000
_MAX_LEXER_STATES = 50_000
"""Of one or two kilobytes each, for one request."""
_INITIAL_LEXER_FUEL = 500_000
_MAX_GRAMMAR_SIZE = 200_000
_LONGEST_REASON = 400
_CONTEXT = re.compile(r"\n(?:<state>|<grammar>).*", re.DOTALL)
_PLAIN = {"NoExtensionBias": "no text fits it", "NoExtension": "no text fits it"}
"""What the library calls by the names of its states."""


class LLGuidanceBackend:
    """llguidance with one tokenizer.

    Args:
        tokenizer: whose tokens the masks are over.
        vocab_size: width of the logits; tokens beyond it are never allowed.
        eos_token_ids: the ids that end a text, at least one.
        num_threads: threads that fill the masks of a step.

    Raises `ConfigError` if the library is missing, or cannot read the tokenizer.
    """

    name = "llguidance"

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        num_threads: int,
    ) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise ConfigError(
                "structured outputs need the package llguidance; install it, or choose another"
                " backend with structured_outputs_config."
            ) from error
        self.eos_token_ids = tuple(eos_token_ids)
        self._library = llguidance
        num_tokens = max(vocab_size, tokenizer.vocab_size)
        try:
            self._tokenizer = llguidance.LLTokenizer(
                tokenizer.to_json(), n_vocab=num_tokens, eos_token=list(eos_token_ids)
            )
        except Exception as error:  # whatever the library says of a tokenizer, it comes at a start
            raise ConfigError(
                f"structured outputs do not work with this model's tokenizer: {error}"
            ) from error
        self._limits = llguidance.LLParserLimits(
            max_items_in_row=_MAX_ITEMS_IN_ROW,
            initial_lexer_fuel=_INITIAL_LEXER_FUEL,
            step_lexer_fuel=_STEP_LEXER_FUEL,
            step_max_items=_STEP_MAX_ITEMS,
            max_lexer_states=_MAX_LEXER_STATES,
            max_grammar_size=_MAX_GRAMMAR_SIZE,
            verbose_errors=False,
        )
        self._executor = llguidance.LLExecutor(num_threads)
        self._num_words = -(-num_tokens // 32)

    def compile(self, params: StructuredOutputsParams) -> LLGuidanceGrammar:
        """Raises `InvalidRequestError` for what is malformed or cannot be enforced."""
        try:
            source = self._source(params)
        except InvalidRequestError:
            raise
        except RecursionError as error:
            raise refusal(params, "it is nested too deep") from error
        except ValueError as error:
            raise refusal(params, str(error)) from error
        matcher = self._library.LLMatcher(
            self._tokenizer, source, log_level=_LOG_NOTHING, limits=self._limits
        )
        if matcher.is_error():
            raise refusal(params, self._explained(params, _reason(matcher.get_error())))
        # The first mask shows what is too wild to go on with, and that any text fits at all.
        trial = matcher.deep_copy()
        trial.compute_bitmask()
        if trial.is_error():
            raise refusal(params, _reason(trial.get_error()))
        return LLGuidanceGrammar(matcher)

    def fill_bitmasks(self, matchers: Sequence[GrammarMatcher], bitmask: Bitmask) -> None:
        """See `GrammarBackend`; both cores work on the rows, without Python's lock."""
        rows = [
            (matcher.matcher, row)
            for row, matcher in enumerate(matchers)
            if isinstance(matcher, LLGuidanceMatcher)
        ]
        assert len(rows) == len(matchers), "matchers of another backend"
        if bitmask.shape[1] == self._num_words:
            whole = bitmask
        else:
            whole = np.empty((len(matchers), self._num_words), np.int32)
        self._executor.unsafe_compute_mask_ptr(
            rows, whole.ctypes.data, whole.strides[0], len(matchers)
        )
        if whole is not bitmask:
            bitmask[:] = whole[:, : bitmask.shape[1]]

    def _explained(self, params: StructuredOutputsParams, reason: str) -> str:
        """Of a schema whose pattern cannot be read, which pattern that is."""
        if params.kind != "json":
            return reason
        for place, pattern in patterns_of(_schema_of(params)):
            grammar = self._library.LLMatcher.grammar_from_regex(pattern)
            error = self._library.LLMatcher.validate_grammar(grammar, limits=self._limits)
            if error and "regex" in error:
                return f"{place}: {_reason(error)}"
        return reason

    def _source(self, params: StructuredOutputsParams) -> str:
        """The form in the library's own terms. Raises `ValueError` for what is malformed."""
        make = self._library.LLMatcher
        kind, source = params.kind, params.source
        if kind in ("json", "json_object"):
            return make.grammar_from_json_schema(
                json.dumps(_schema_of(params)), overrides=json_options(params)
            )
        if kind == "regex":
            # Digits are those of ASCII, as in JSON schemas.
            return make.grammar_from_regex(
                self._library.regex_to_lark(_unanchored(source), use_ascii="d")
            )
        if kind == "choice":
            assert params.choice is not None
            return make.grammar_from_regex("|".join(map(escape, params.choice)))
        if kind == "structural_tag":
            return make.grammar_from_lark(
                structural_tag_to_lark(msgspec.json.decode(source), dict(json_options(params)))
            )
        return make.grammar_from_lark(gbnf_to_lark(source) if is_gbnf(source) else source)


class LLGuidanceGrammar:
    """A matcher that stays at the start, to be copied."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def make_matcher(self) -> LLGuidanceMatcher:
        """A copy, with tables of its own."""
        return LLGuidanceMatcher(self._matcher.deep_copy())


class LLGuidanceMatcher:
    """See `GrammarMatcher`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    def accept(self, token_ids: Sequence[int]) -> bool:
        return self.matcher.consume_tokens(list(token_ids))

    def rollback(self, num_tokens: int) -> None:
        self.matcher.rollback(num_tokens)

    def count_valid(self, token_ids: Sequence[int]) -> int:
        return self.matcher.validate_tokens(list(token_ids))

    def is_accepting(self) -> bool:
        return self.matcher.is_accepting()

    def is_terminated(self) -> bool:
        return self.matcher.is_stopped() and not self.matcher.is_error()

    def forced_tokens(self) -> list[int]:
        return self.matcher.compute_ff_tokens()

    def error(self) -> str:
        """Why the matcher is lost; empty if it is not."""
        return _reason(self.matcher.get_error()) if self.matcher.is_error() else ""


def _schema_of(params: StructuredOutputsParams) -> dict[str, Any]:
    if params.kind == "json_object":
        return {"type": "object"}
    decoded = msgspec.json.decode(params.source)
    return enforceable_schema(decoded, closed=params.disable_additional_properties)


def json_options(params: StructuredOutputsParams) -> JsonCompileOptions:
    """What may stand between the parts of JSON."""
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False, "whitespace_pattern": None}
    pattern = params.whitespace_pattern
    return {"whitespace_pattern": WHITESPACE if pattern is None else pattern}


def _unanchored(regex: str) -> str:
    """The whole text has to match in any case, so anchors around the whole say nothing."""
    if _escapes_next(regex):
        raise ValueError("it ends with a backslash that escapes nothing")
    regex = regex.removeprefix("^")
    body = regex.removesuffix("$")
    return regex if _escapes_next(body) else body


def _escapes_next(regex: str) -> bool:
    """Whether what comes behind it would be escaped."""
    return (len(regex) - len(regex.rstrip("\\"))) % 2 == 1


def escape(text: str) -> str:
    """A regular expression for just this text, in the syntax of Rust's `regex`."""
    return "".join(f"\\x{{{ord(char):x}}}" if _is_special(char) else char for char in text)


def _is_special(char: str) -> bool:
    return char.isascii() and not char.isalnum() and char not in " _"


def _reason(message: str) -> str:
    """What the library says, without its state and the text of the grammar."""
    message = _CONTEXT.sub("", message).replace("<non-verbose/>", "")
    message = _PLAIN.get(message.strip(), " ".join(message.split()))
    return message if len(message) <= _LONGEST_REASON else f"{message[: _LONGEST_REASON - 3]}..."
