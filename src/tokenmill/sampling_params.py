"""What a caller may ask of one generation, and all validation of it.

`SamplingParams` is frozen and normalised when built: a bare `stop` string becomes a list, `-1`
becomes "off". Checks that need the model (vocabulary, context length, engine limits) are made by
the input processor.
"""

from __future__ import annotations

import enum
import numbers
from collections.abc import Iterable
from typing import Any

import msgspec

from tokenmill.errors import InvalidRequestError, refuse_unknown, shown
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
MAX_INTEGER = 2**63 - 1
"""Of parameters without a limit of their own: what a message between processes can carry."""
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


class _StrictKeywords(msgspec.StructMeta):
    """Refuses unknown keywords with the nearest known one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        refuse_unknown(self.__name__, kwargs, self.__struct_fields__)
        return super().__call__(*args, **kwargs)


class SamplingParams(
    msgspec.Struct, metaclass=_StrictKeywords, frozen=True, kw_only=True, omit_defaults=True
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
    logprobs: int | None = None
    """Log-probabilities per generated token: 0 gives the chosen token's, k also the k best, -1 all.
    They are those of the raw distribution, before temperature and filters."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt; such a request does not read the prefix cache."""
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

    def __post_init__(self) -> None:
        for name, value in self._normalised().items():
            msgspec.structs.force_setattr(self, name, value)
        if self.greedy and self.n > 1:
            raise _refusal(
                "n",
                self.n,
                "must be 1 for greedy sampling: all sequences would be the"
                " same. Raise temperature above 0",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refusal(
                "min_tokens", self.min_tokens, f"must not exceed max_tokens ({self.max_tokens})"
            )
        if self.stop and not self.detokenize:
            raise _refusal(
                "stop",
                self.stop,
                "needs detokenize=True: stop strings are looked for"
                " in the text. Use stop_token_ids instead",
            )

    @property
    def greedy(self) -> bool:
        """Whether the best token is always taken."""
        return self.temperature < GREEDY_EPSILON

    def replace(self, **changes: Any) -> SamplingParams:
        """The same parameters with some of them changed, checked again."""
        return msgspec.structs.replace(self, **changes)

    def _normalised(self) -> dict[str, Any]:
        """Every field checked and in its one canonical form."""
        temperature = _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        greedy = temperature < GREEDY_EPSILON
        if not greedy:
            temperature = max(temperature, MIN_TEMPERATURE)
        top_p = _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        top_k = _integer("top_k", self.top_k, -1)
        min_p = _number("min_p", self.min_p, 0.0, 1.0)
        return {
            "n": _integer("n", self.n, 1, MAX_N),
            "temperature": 0.0 if greedy else temperature,
            "top_p": 1.0 if greedy else top_p,
            "top_k": 0 if greedy else max(top_k, 0),
            "min_p": 0.0 if greedy else min_p,
            "seed": _seed(self.seed),
            "stop": _stop_strings(self.stop),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "max_tokens": _optional_integer("max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT),
            "min_tokens": _integer("min_tokens", self.min_tokens, 0, MAX_TOKENS_LIMIT),
            "logprobs": _logprobs("logprobs", self.logprobs),
            "prompt_logprobs": _logprobs("prompt_logprobs", self.prompt_logprobs),
            "truncate_prompt_tokens": _truncation(self.truncate_prompt_tokens),
            "structured_outputs": as_structured_outputs(self.structured_outputs),
            "output_kind": _output_kind(self.output_kind),
            **{name: _flag(name, getattr(self, name)) for name in _FLAGS},
        }


_FLAGS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


def _refusal(name: str, value: object, rule: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name}={shown(value)}: {rule}.", parameter=name)


def _is_a(kind: type, value: object) -> bool:
    """Whether a value is a number of this kind, of Python or of numpy; truth values are none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    interval = f"{'(' if open_low else '['}{low:g}, {high:g}]"
    if not _is_a(numbers.Real, value) or value != value:
        raise _refusal(name, value, f"must be a finite number in {interval}")
    if not low <= value <= high or (open_low and value == low):
        raise _refusal(name, value, f"must lie in {interval}")
    return float(value)


def _integer(name: str, value: Any, low: int, high: int = MAX_INTEGER) -> int:
    limit = f"at least {low}" if high == MAX_INTEGER else f"between {low} and {high}"
    if not _is_a(numbers.Integral, value):
        raise _refusal(name, value, f"must be an integer, {limit}")
    if value < low:
        raise _refusal(name, value, f"must be {limit}")
    if value > high:
        raise _refusal(name, value, f"must be at most {high}")
    return int(value)


def _optional_integer(name: str, value: object, low: int, high: int) -> int | None:
    return None if value is None else _integer(name, value, low, high)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _refusal(name, value, "must be True or False")
    return value


def _seed(value: object) -> int | None:
    if value is None:
        return None
    seed = _integer("seed", value, -(2**63), 2**64 - 1)
    return None if seed == -1 else seed


def _logprobs(name: str, value: object) -> int | None:
    if value is None or value is False:
        return None
    return 1 if value is True else _integer(name, value, ALL_LOGPROBS)


def _truncation(value: object) -> int | None:
    if value is None:
        return None
    keep = _integer("truncate_prompt_tokens", value, -1)
    if keep == 0:
        raise _refusal("truncate_prompt_tokens", value, "must be at least 1, or -1")
    return keep


def _output_kind(value: object) -> RequestOutputKind:
    if isinstance(value, int) and value in list(RequestOutputKind):
        return RequestOutputKind(value)
    names = ", ".join(kind.name for kind in RequestOutputKind)
    raise _refusal("output_kind", value, f"must be one of RequestOutputKind: {names}")


def _as_list(name: str, value: object, what: str) -> list[Any]:
    try:
        if not isinstance(value, str | bytes) and isinstance(value, Iterable):
            return list(value)
    except TypeError:  # a tensor without dimensions is iterable only by its class
        pass
    raise _refusal(name, value, f"must be a list of {what}")


def _stop_strings(value: object) -> list[str] | None:
    if value is None:
        return None
    strings = [value] if isinstance(value, str) else _as_list("stop", value, "strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise _refusal("stop", f"{len(strings)} strings", f"at most {MAX_STOP_STRINGS} are allowed")
    for text in strings:
        if not isinstance(text, str):
            raise _refusal("stop", text, "every stop must be a string")
        if not text:
            raise _refusal("stop", text, "a stop string must not be empty: it would match at once")
        if len(text) > MAX_STOP_LENGTH:
            raise _refusal(
                "stop",
                text,
                f"a stop string may have {MAX_STOP_LENGTH} characters, this one has {len(text)}",
            )
    return strings or None


def _token_ids(name: str, value: object) -> list[int] | None:
    if value is None:
        return None
    ids = _as_list(name, value, "token ids")
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise _refusal(name, f"{len(ids)} ids", f"at most {MAX_STOP_TOKEN_IDS} are allowed")
    return list(dict.fromkeys(_integer(name, token_id, 0) for token_id in ids)) or None
