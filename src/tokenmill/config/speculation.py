"""Settings of speculation, as one group: `speculative_config`, or its short flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, get_type_hints

from tokenmill.config.argument_types import check_keys, of_type
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.parameters import ModelParameters
from tokenmill.errors import ConfigError, did_you_mean, shown

HEAD_METHODS = ("eagle", "eagle3")
"""Of draft heads, which read the hidden states of the model that they draft for."""
METHODS = ("ngram", "suffix", "draft_model", *HEAD_METHODS)
_MODEL_METHODS = ("draft_model", *HEAD_METHODS)
MAX_DRAFTS = 128
MAX_LOOKUP = 64
_DEFAULT_DRAFTS = {"ngram": 8, "suffix": 8} | dict.fromkeys(_MODEL_METHODS, 4)
_LEAST_CACHE = 4096
_PLACE_BYTES = 12
"""Of a context in the table of `kernels/suffix_index.py`."""
_DEFAULT_LOOKUP = (3, 5)
_NAME = "speculative_config"
_FLAGS = {
    "method": "spec_method",
    "model": "spec_model",
    "num_speculative_tokens": "spec_tokens",
}
"""Settings that have an engine argument of their own, too."""


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A second, smaller model that drafts, or a head."""

    path: str
    architecture: str
    hf_config: Mapping[str, Any]
    dtype: str
    quantization: str | None
    max_model_len: int
    """Tokens behind which it drafts nothing."""
    vocab_size: int
    num_bytes: int
    """Of its weights, and of the buffers of its steps."""
    kv_bytes_per_token: int
    """K and V of one token in all its layers."""
    aux_layers: tuple[int, ...] = ()
    """Layers of the other model whose inputs a head reads; none where it reads what the other's
    output head reads (eagle)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made. Raises `ConfigError` for a value that cannot work."""

    method: str
    """ngram: what followed the last tokens where they stood before in the request; suffix: what
    mostly followed them in all requests so far; draft_model: what a smaller model says; eagle,
    eagle3: what a head says that reads the model's hidden states."""
    num_speculative_tokens: int
    """Most drafts of a request in one step, 1 to 128."""
    prompt_lookup_min: int = _DEFAULT_LOOKUP[0]
    """Fewest tokens that must have stood before (ngram)."""
    prompt_lookup_max: int = _DEFAULT_LOOKUP[1]
    """Most tokens that are looked for (ngram)."""
    adaptive: bool = True
    """Make fewer drafts, or none, where they do not hold or a step is bound by arithmetic."""
    suffix_decoding_max_tree_depth: int = 8
    """Most tokens that a draft follows from (suffix)."""
    suffix_decoding_min_token_prob: float = 0.1
    """Drafts end where all of them together hold less often (suffix)."""
    suffix_decoding_cache_bytes: int = 16 << 20
    """Most memory of what is remembered (suffix)."""
    model: str | None = None
    """The model or head that drafts: a directory, a GGUF file (no head), a hub id or an alias."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    quantization: str | None = None
    """What the draft model's matrices become while they are loaded: int8 or int4."""
    draft: DraftModel | None = None
    """The model that was found; not to be set."""

    @property
    def num_suffix_places(self) -> int:
        """Contexts that there is room for, a power of two (suffix)."""
        return 1 << (self.suffix_decoding_cache_bytes // _PLACE_BYTES).bit_length() - 1

    @property
    def longest_lookup(self) -> int:
        """Most tokens that a draft follows from."""
        if self.method == "suffix":
            return self.suffix_decoding_max_tree_depth
        return self.prompt_lookup_max

    @property
    def num_lookahead_tokens(self) -> int:
        """Slots behind a request's tokens that drafting writes."""
        return self.num_speculative_tokens if self.method in _MODEL_METHODS else 0

    @property
    def reads_hidden_states(self) -> bool:
        """Whether a draft head drafts."""
        return self.method in HEAD_METHODS

    def __post_init__(self) -> None:
        for name, annotation in get_type_hints(SpeculativeConfig).items():
            if name != "draft":
                value = of_type(f"{_NAME}.{name}", getattr(self, name), annotation)
                object.__setattr__(self, name, value)
        if self.method not in METHODS:
            raise ConfigError(
                f"{_NAME}.method={shown(self.method)} is not one of: {', '.join(METHODS)}."
                f"{did_you_mean(self.method, METHODS)}"
            )
        if not 1 <= self.num_speculative_tokens <= MAX_DRAFTS:
            raise ConfigError(
                f"{_NAME}.num_speculative_tokens={self.num_speculative_tokens} must lie between 1"
                f" and {MAX_DRAFTS}; leave {_NAME} out to make no drafts."
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max <= MAX_LOOKUP:
            raise ConfigError(
                f"{_NAME}.prompt_lookup_min={self.prompt_lookup_min} and"
                f" prompt_lookup_max={self.prompt_lookup_max} must be in order, between 1 and"
                f" {MAX_LOOKUP}."
            )
        self._check_suffix()
        if (self.model is None) == (self.method in _MODEL_METHODS):
            raise ConfigError(
                f"{_NAME}.method='{self.method}' and model={shown(self.model)} do not belong"
                f" together: {', '.join(_MODEL_METHODS[:-1])} and {_MODEL_METHODS[-1]} need a"
                f" model, and no other method has one."
            )

    def _check_suffix(self) -> None:
        if not 1 <= self.suffix_decoding_max_tree_depth <= MAX_LOOKUP:
            raise ConfigError(
                f"{_NAME}.suffix_decoding_max_tree_depth={self.suffix_decoding_max_tree_depth} must"
                f" lie between 1 and {MAX_LOOKUP}."
            )
        if not 0 < self.suffix_decoding_min_token_prob <= 1:
            raise ConfigError(
                f"{_NAME}.suffix_decoding_min_token_prob={self.suffix_decoding_min_token_prob} must"
                f" be more than 0 and at most 1."
            )
        if self.suffix_decoding_cache_bytes < _LEAST_CACHE:
            raise ConfigError(
                f"{_NAME}.suffix_decoding_cache_bytes={self.suffix_decoding_cache_bytes} must be at"
                f" least {_LEAST_CACHE}."
            )


def read_speculative_config(args: EngineArgs) -> SpeculativeConfig | None:
    """The settings of speculation; None if there is to be none.

    Raises `ConfigError` for settings that nobody knows, that contradict each other, or that cannot
    work.
    """
    given = _with_flags(args)
    if not given:
        return None
    names = (each.name for each in fields(SpeculativeConfig) if each.name != "draft")
    check_keys(_NAME, given, names)
    if "method" not in given and "model" in given:
        given["method"] = "draft_model"
    if "method" not in given:
        raise ConfigError(f"{_NAME} needs a method: {', '.join(METHODS)}.")
    given.setdefault("num_speculative_tokens", _DEFAULT_DRAFTS.get(given["method"], 1))
    lookup = {name: given[name] for name in _LOOKUP if isinstance(given.get(name), int)}
    if len(lookup) == 1:  # the other one gives way
        ((name, length),) = lookup.items()
        least, most = _DEFAULT_LOOKUP
        if name == "prompt_lookup_min":
            given["prompt_lookup_max"] = max(length, most)
        else:
            given["prompt_lookup_min"] = min(length, least)
    return SpeculativeConfig(**given)


_LOOKUP = ("prompt_lookup_min", "prompt_lookup_max")


def _with_flags(args: EngineArgs) -> dict[str, Any]:
    """`speculative_config`, with what the short flags say."""
    given: dict[str, Any] = dict(args.speculative_config)
    for name, flag in _FLAGS.items():
        value = getattr(args, flag)
        if value is None:
            continue
        if given.setdefault(name, value) != value:
            raise ConfigError(
                f"{flag}={shown(value)} and {_NAME}.{name}={shown(given[name])} contradict each"
                f" other; give one of them."
            )
    return given


def resolve_speculation(
    args: EngineArgs, parameters: ModelParameters, *, pools: bool
) -> tuple[SpeculativeConfig | None, EngineArgs]:
    """The settings of speculation, and the others as far as they follow.

    Raises `ConfigError` if the model cannot be sped up by drafts.
    """
    config = read_speculative_config(args)
    if config is None:
        return None, args
    architecture = parameters.architecture
    if pools:
        raise ConfigError(
            f"{_NAME} drafts tokens, but {architecture} runs as a pooling model, which generates"
            f" none; leave it out."
        )
    if parameters.states is not None:
        raise ConfigError(
            f"{_NAME} needs layers that can forget a token that was drafted, but {architecture}"
            f" has state-space layers, which keep one state of all tokens; leave it out."
        )
    if args.async_scheduling is None:  # the next step's drafts come with this one's tokens
        args = replace(args, async_scheduling=False)
    return config, args


def max_drafts(config: SpeculativeConfig | None) -> int:
    """Most drafts of a request in a step."""
    return 0 if config is None else config.num_speculative_tokens
