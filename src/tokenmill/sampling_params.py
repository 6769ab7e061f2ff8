"""What a caller may ask of one generation, and all validation of it.

`SamplingParams` is frozen and normalised when built: a bare `stop` string becomes a list, `-1`
becomes "off". Checks that need the model (vocabulary, context length, engine limits) are made by
the input processor.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import msgspec

from tokenmill import parameter_checks as check
from tokenmill.repetition import RepetitionDetectionParams
from tokenmill.structured_outputs import StructuredOutputsParams, as_structured_outputs

GREEDY_EPSILON = 1e-5
"""Temperatures below this are greedy."""
MIN_TEMPERATURE = 1e-2
"""Temperatures between `GREEDY_EPSILON` and this are raised to it: smaller ones only lose bits."""
MAX_TEMPERATURE = 2.0
MAX_N = 16_384
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1_024
"""Characters in one stop string."""
MAX_STOP_TOKEN_IDS = 1_024
MAX_TOKENS_LIMIT = 2**31 - 1
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 1e6
"""The smallest is its inverse: beyond, float32 has no room for the product."""
MAX_LOGIT_BIAS = 100.0
"""Larger ones are cut to it, as smaller ones are to its negative."""
MAX_LOGIT_BIASES = 1_024
MAX_ALLOWED_TOKEN_IDS = 1 << 18
"""More than any vocabulary has."""
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 1_024
"""Characters in one bad word."""
MAX_LOGPROB_TOKEN_IDS = 128
ALL_LOGPROBS = -1
"""Value of `logprobs` that asks for the whole vocabulary."""


class RequestOutputKind(enum.IntEnum):
    """What each `RequestOutput` of a stream holds."""

    CUMULATIVE = 0
    """Everything generated so far."""
    DELTA = 1
    """Only what is new since the last output."""
    FINAL_ONLY = 2
    """Nothing until the request has finished."""


class SamplingParams(
    msgspec.Struct, metaclass=check.StrictKeywords, frozen=True, kw_only=True, omit_defaults=True
):
    """How to choose the tokens of one request, and when to stop.

    Raises `InvalidRequestError` (a `ValueError`) that names the parameter, its value and its limit.
    """

    n: int = 1
    """Number of sequences for the prompt, 1 to 16384. The first uses `seed`, the others seeds
    derived from it."""
    temperature: float = 1.0
    """0 (always the best token) to 2. Below 0.00001 counts as 0, from there to 0.01 as 0.01."""
    top_p: float = 1.0
    """Smallest set of tokens with this much probability; in (0, 1], 1 is off."""
    top_k: int = 0
    """Keep the `top_k` best tokens and those that tie with the last; 0 or -1 is off."""
    min_p: float = 0.0
    """Drop tokens below `min_p` times the best one's probability; in [0, 1], 0 is off."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token that the output has; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """The same for each time that the output has it; in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of the tokens that prompt or output have;
    from 0.000001 to 1000000, 1 is off."""
    logit_bias: dict[int, float] | None = None
    """Token id to a number that is added to its logit, cut to [-100, 100]; at most 1024 entries."""
    allowed_token_ids: list[int] | None = None
    """The only ids that may be generated."""
    bad_words: list[str] | None = None
    """Words that are not to be generated, with or without a blank before them: the token that would
    complete one is masked. At most 128."""
    seed: int | None = None
    """The whole of a request's randomness. None or -1: the engine chooses one."""
    stop: list[str] | None = None
    """Strings that end the text, at most 64 of up to 1024 characters; one may come as it is."""
    stop_token_ids: list[int] | None = None
    """Ids that end the sequence, besides the model's own end ids."""
    include_stop_str_in_output: bool = False
    """Leave the stop string, or the text of the stop token, in the output."""
    ignore_eos: bool = False
    """Do not stop at the model's end ids."""
    max_tokens: int | None = 16
    """Most tokens to generate; None is up to the context length."""
    min_tokens: int = 0
    """Until so many tokens are generated, every id that could stop is masked and stop strings are
    not looked for."""
    thinking_token_budget: int | None = None
    """Most tokens between a reasoning model's start and end of thinking; then the end is forced.
    None or -1 is no limit."""
    repetition_detection: RepetitionDetectionParams | None = None
    """End the request with reason `repetition` once its output ends with a pattern of tokens
    several times: max_pattern_size, min_pattern_size (1), min_count (2)."""
    logprobs: int | None = None
    """Log-probabilities per generated token: 0 gives the chosen token's, k also the k best, -1 all.
    They are those of the raw distribution, before temperature and filters, unless the engine's
    `logprobs_mode` says otherwise."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt; such a request does not read the prefix cache."""
    logprob_token_ids: list[int] | None = None
    """At most 128 ids whose log-probabilities are given beside the chosen token's, in place of the
    best ones'; `logprobs` is then their number."""
    flat_logprobs: bool = False
    """Keep log-probabilities in a few long lists instead of an object per token: less work for the
    garbage collector."""
    stream_interval: int | None = None
    """Tokens between two outputs of a stream, the first and the last apart; the engine's own
    `stream_interval` is the least."""
    structured_outputs: StructuredOutputsParams | None = None
    """The form that the text must have: a JSON schema, any JSON object, a regular expression, one
    of some choices, a grammar, or a structural tag (see docs/structured-output.md)."""
    detokenize: bool = True
    """False: ids only, `text` stays empty; stop strings are then refused."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Keep the blanks that some tokenizers write between special tokens."""
    truncate_prompt_tokens: int | None = None
    """Keep only the last so many tokens of the prompt; -1 is as many as the context allows."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What the outputs of a stream hold; `LLM.generate` always returns the final one."""
    skip_reading_prefix_cache: bool | None = None
    """Compute the whole prompt even if a part of it is cached. None: just with
    `prompt_logprobs`, which cannot do without."""
    extra_args: dict[str, Any] | None = None
    """What custom logits processors of the engine read; refused by an engine without any."""
    skip_clone: bool = False
    """Known for the sake of scripts: parameters cannot be changed here, so none is ever copied."""

    def __post_init__(self) -> None:
        for name, value in self._normalised().items():
            msgspec.structs.force_setattr(self, name, value)
        self._check_together()

    @property
    def greedy(self) -> bool:
        """Whether the best token is always taken."""
        return self.temperature < GREEDY_EPSILON

    def replace(self, **changes: Any) -> SamplingParams:
        """The same parameters with some of them changed, checked again."""
        return msgspec.structs.replace(self, **changes)

    def _normalised(self) -> dict[str, Any]:
        """Every field checked and in its one canonical form."""
        return {
            **self._normalised_choice(),
            **self._normalised_edits(),
            "n": check.integer("n", self.n, 1, MAX_N),
            "seed": _seed(self.seed),
            "stop": _stop_strings(self.stop),
            "stop_token_ids": check.token_ids(
                "stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS
            ),
            "max_tokens": check.optional_integer(
                "max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT
            ),
            "min_tokens": check.integer("min_tokens", self.min_tokens, 0, MAX_TOKENS_LIMIT),
            "repetition_detection": _repetition_detection(self.repetition_detection),
            **self._normalised_logprobs(),
            "stream_interval": check.optional_integer("stream_interval", self.stream_interval, 1),
            "truncate_prompt_tokens": _truncation(self.truncate_prompt_tokens),
            "structured_outputs": as_structured_outputs(self.structured_outputs),
            "output_kind": _output_kind(self.output_kind),
            "extra_args": _extra_args(self.extra_args),
            **{name: check.flag(name, getattr(self, name)) for name in _FLAGS},
        }

    def _normalised_choice(self) -> dict[str, Any]:
        """How a token is chosen from logits."""
        temperature = check.number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        greedy = temperature < GREEDY_EPSILON
        if not greedy:
            temperature = max(temperature, MIN_TEMPERATURE)
        top_p = check.number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        top_k = check.integer("top_k", self.top_k, -1)
        min_p = check.number("min_p", self.min_p, 0.0, 1.0)
        return {
            "temperature": 0.0 if greedy else temperature,
            "top_p": 1.0 if greedy else top_p,
            "top_k": 0 if greedy else max(top_k, 0),
            "min_p": 0.0 if greedy else min_p,
        }

    def _normalised_edits(self) -> dict[str, Any]:
        """What changes the logits before that."""
        return {
            **{
                name: check.number(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY)
                for name in ("presence_penalty", "frequency_penalty")
            },
            "repetition_penalty": check.number(
                "repetition_penalty",
                self.repetition_penalty,
                1 / MAX_REPETITION_PENALTY,
                MAX_REPETITION_PENALTY,
            ),
            "logit_bias": check.token_weights(
                "logit_bias",
                self.logit_bias,
                limit=MAX_LOGIT_BIASES,
                lowest=-MAX_LOGIT_BIAS,
                highest=MAX_LOGIT_BIAS,
            ),
            "allowed_token_ids": _allowed_token_ids(self.allowed_token_ids),
            "bad_words": _bad_words(self.bad_words),
            "thinking_token_budget": _budget(self.thinking_token_budget),
        }

    def _normalised_logprobs(self) -> dict[str, Any]:
        listed = check.token_ids("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS)
        logprobs = _logprobs("logprobs", self.logprobs)
        if listed is not None and logprobs not in (None, len(listed)):
            rule = f"must be left out, or be the number of logprob_token_ids ({len(listed)})"
            raise check.refusal("logprobs", self.logprobs, rule)
        skips = self.skip_reading_prefix_cache
        return {
            "logprob_token_ids": listed,
            "logprobs": logprobs if listed is None else len(listed),
            "prompt_logprobs": _logprobs("prompt_logprobs", self.prompt_logprobs),
            "skip_reading_prefix_cache": None
            if skips is None
            else check.flag("skip_reading_prefix_cache", skips),
        }

    def _check_together(self) -> None:
        """Rules between fields."""
        if self.greedy and self.n > 1:
            rule = (
                "must be 1 for greedy sampling: all sequences would be the same. Raise"
                " temperature above 0"
            )
            raise check.refusal("n", self.n, rule)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            rule = f"must not exceed max_tokens ({self.max_tokens})"
            raise check.refusal("min_tokens", self.min_tokens, rule)
        if self.stop and not self.detokenize:
            rule = (
                "needs detokenize=True: stop strings are looked for in the text. Use"
                " stop_token_ids instead"
            )
            raise check.refusal("stop", self.stop, rule)


_FLAGS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "flat_logprobs",
    "skip_clone",
)


def _seed(value: object) -> int | None:
    if value is None:
        return None
    seed = check.integer("seed", value, -(2**63), 2**64 - 1)
    return None if seed == -1 else seed


def _logprobs(name: str, value: object) -> int | None:
    if value is None or value is False:
        return None
    return 1 if value is True else check.integer(name, value, ALL_LOGPROBS)


def _budget(value: object) -> int | None:
    if value is None:
        return None
    budget = check.integer("thinking_token_budget", value, -1, MAX_TOKENS_LIMIT)
    return None if budget == -1 else budget


def _truncation(value: object) -> int | None:
    if value is None:
        return None
    keep = check.integer("truncate_prompt_tokens", value, -1)
    if keep == 0:
        raise check.refusal("truncate_prompt_tokens", value, "must be at least 1, or -1")
    return keep


def _output_kind(value: object) -> RequestOutputKind:
    if isinstance(value, int) and value in list(RequestOutputKind):
        return RequestOutputKind(value)
    names = ", ".join(kind.name for kind in RequestOutputKind)
    raise check.refusal("output_kind", value, f"must be one of RequestOutputKind: {names}")


def _stop_strings(value: object) -> list[str] | None:
    if value is None:
        return None
    empty = "a stop string must not be empty: it would match at once"
    return (
        check.strings("stop", value, limit=MAX_STOP_STRINGS, longest=MAX_STOP_LENGTH, empty=empty)
        or None
    )


def _bad_words(value: object) -> list[str] | None:
    if value is None:
        return None
    words = check.strings(
        "bad_words",
        value,
        limit=MAX_BAD_WORDS,
        longest=MAX_BAD_WORD_LENGTH,
        empty="a bad word must not be empty: every token would complete it",
    )
    return list(dict.fromkeys(words)) or None


def _allowed_token_ids(value: object) -> list[int] | None:
    ids = check.token_ids("allowed_token_ids", value, MAX_ALLOWED_TOKEN_IDS)
    if value is not None and ids is None:
        raise check.refusal("allowed_token_ids", value, "must not be empty: nothing could follow")
    return ids


def _repetition_detection(value: object) -> RepetitionDetectionParams | None:
    if value is None or isinstance(value, RepetitionDetectionParams):
        return value
    if not isinstance(value, Mapping) or "max_pattern_size" not in value:
        rule = "must have max_pattern_size, and may have min_pattern_size and min_count"
        raise check.refusal("repetition_detection", value, rule)
    return RepetitionDetectionParams(**value)


def _extra_args(value: object) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise check.refusal("extra_args", value, "must be a dict whose keys are strings")
    return dict(value) or None
