"""Fields of a request as `SamplingParams`, over the model's defaults."""

from __future__ import annotations

from typing import Any

import msgspec

from tokenmill.config.serve_args import ServeArgs
from tokenmill.entrypoints.http.pooling_protocol import PoolingFields
from tokenmill.entrypoints.http.protocol import SamplingFields
from tokenmill.entrypoints.http.state import ServerState
from tokenmill.errors import InvalidRequestError, shown
from tokenmill.sampling_params import ALL_LOGPROBS, MAX_LOGIT_BIASES, SamplingParams

_SAME_NAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "allowed_token_ids", "bad_words", "seed", "stop",
    "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens",
    "thinking_token_budget", "logprob_token_ids", "stream_interval", "skip_special_tokens",
    "spaces_between_special_tokens", "truncate_prompt_tokens", "prompt_logprobs",
)  # fmt: skip
"""Fields that the request and `SamplingParams` share."""
_LONGEST_BIASES = 1 << 16
"""Bytes: 64 for each entry."""
MAX_TIMEOUT = 1e9
"""Seconds; longer waits have no meaning."""


def sampling_params(
    fields: SamplingFields,
    defaults: SamplingParams,
    args: ServeArgs,
    **more: Any,
) -> SamplingParams:
    """`more` are parameters whose fields differ between the endpoints.

    Raises `InvalidRequestError` that names the field.
    """
    given = {name: value for name in _SAME_NAME if (value := getattr(fields, name)) is not None}
    if (bias := logit_bias(fields)) is not None:
        given["logit_bias"] = bias
    if fields.repetition_detection is not None:
        given["repetition_detection"] = msgspec.structs.asdict(fields.repetition_detection)
    if fields.vllm_xargs or fields.kv_transfer_params:
        given["extra_args"] = _extra_args(fields)
    if fields.use_beam_search:  # `n` is the width of the search; nothing is drawn
        defaults, given["temperature"] = SamplingParams(), 1.0
    params = defaults.replace(**{**given, **more})
    if params.n > args.max_n:
        raise InvalidRequestError(
            f"n={params.n} must be at most {args.max_n} on this server (max_n).", parameter="n"
        )
    return params


def _extra_args(fields: SamplingFields) -> dict[str, Any]:
    """Raises `InvalidRequestError` for KV that cannot be handed on so."""
    extra: dict[str, Any] = dict(fields.vllm_xargs or {})
    if fields.kv_transfer_params:
        if fields.stream and fields.kv_transfer_params.get("do_remote_decode"):
            raise InvalidRequestError(
                "kv_transfer_params: a stream does not tell where the KV is that"
                " do_remote_decode asks for; set stream=false.",
                parameter="kv_transfer_params",
            )
        if fields.use_beam_search:
            raise InvalidRequestError(
                "kv_transfer_params cannot be searched with; leave out use_beam_search.",
                parameter="kv_transfer_params",
            )
        extra["kv_transfer_params"] = fields.kv_transfer_params
    return extra


def logit_bias(fields: SamplingFields) -> dict[str, float] | None:
    """The field, decoded: a million entries are refused by their length.

    Raises `InvalidRequestError`.
    """
    if isinstance(fields.logit_bias, msgspec.UnsetType):
        return None
    size = len(memoryview(fields.logit_bias))
    if size > _LONGEST_BIASES:
        raise InvalidRequestError(
            f"logit_bias has {size} bytes of JSON, and {_LONGEST_BIASES} are read: at most"
            f" {MAX_LOGIT_BIASES} entries are allowed.",
            parameter="logit_bias",
        )
    try:
        return msgspec.json.decode(fields.logit_bias, type=dict[str, float] | None)
    except msgspec.MsgspecError as error:
        raise InvalidRequestError(
            f"logit_bias must map token ids to finite numbers ({error}).", parameter="logit_bias"
        ) from error


def check_stream(fields: SamplingFields) -> None:
    """Raise `InvalidRequestError` for fields that a stream lacks or needs."""
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequestError(
            "stream_options needs stream=true; leave it out.", parameter="stream_options"
        )
    if fields.prompt_logprobs is not None and fields.stream:
        raise InvalidRequestError(
            "prompt_logprobs cannot be streamed; set stream=false.", parameter="prompt_logprobs"
        )


def deadline_of(fields: SamplingFields | PoolingFields, args: ServeArgs) -> float | None:
    """Seconds that a request may take: its own limit, at most the server's; None without any."""
    own = fields.timeout
    if own is not None and not 0 < own <= MAX_TIMEOUT:
        raise InvalidRequestError(
            f"timeout={shown(own)} must be more than 0 and at most {MAX_TIMEOUT:g} seconds.",
            parameter="timeout",
        )
    limits = [limit for limit in (own, args.request_timeout) if limit is not None]
    return min(limits, default=None)


def salt_of(
    fields: SamplingFields | PoolingFields, key_name: str | None, args: ServeArgs
) -> str | None:
    """Who may share cached prefixes: those with the same salt and, if set so, the same key."""
    salt = fields.cache_salt
    if salt == "":
        raise InvalidRequestError(
            "cache_salt='' must not be empty; leave it out to share the cache.",
            parameter="cache_salt",
        )
    if not args.isolate_api_keys or key_name is None:
        return salt
    # Two parts with a border that no salt can move: the name has a fixed length.
    return f"{key_name}/{salt or ''}"


def num_listed(logprobs: int, state: ServerState) -> int:
    """How many best tokens each place lists; -1 is the whole vocabulary."""
    return state.engine.config.model.vocab_size if logprobs == ALL_LOGPROBS else logprobs
