"""`kv_transfer_params` of a request: checked, and taken out of its sampling parameters.

They travel in `SamplingParams.extra_args`, as vLLM has it, and are none of the operator's
processors' business.
"""

from __future__ import annotations

from typing import Any

from tokenmill.config.kv_transfer import KVTransferConfig
from tokenmill.contracts.kv_transfer import remote_origin, wants_remote_decode
from tokenmill.errors import InvalidRequestError, shown
from tokenmill.sampling_params import SamplingParams

KV_PARAMS = "kv_transfer_params"


def take_kv_params(
    params: SamplingParams, config: KVTransferConfig | None
) -> tuple[dict[str, Any], SamplingParams]:
    """Where the prompt's KV comes from or goes to, and the parameters without it.

    Raises `InvalidRequestError` for what makes no sense, or is not for this engine.
    """
    extra = getattr(params, "extra_args", None)  # they may be of any type still
    if not extra or KV_PARAMS not in extra:
        return {}, params
    rest = {name: value for name, value in extra.items() if name != KV_PARAMS}
    given = extra[KV_PARAMS]
    if given is not None and not isinstance(given, dict):
        raise _refusal(f"{shown(given)} must be an object")
    params = params.replace(extra_args=rest or None)
    if not given:
        return {}, params
    origin, decodes = remote_origin(given), wants_remote_decode(given)
    if decodes and not (config is not None and config.gives):
        raise _refusal("do_remote_decode needs an engine that gives KV to others")
    if origin is not None:
        if not (config is not None and config.takes):
            raise _refusal("do_remote_prefill needs an engine that takes KV of others")
        if not config.may_name(origin.remote_host):
            raise _refusal(
                f"remote_host={shown(origin.remote_host)} is none of the hosts that this engine"
                " takes KV of (allowed_hosts)"
            )
    if decodes and params.n > 1:
        raise _refusal(f"do_remote_decode is for one sequence, and n={params.n}; set n=1")
    return (given if decodes or origin is not None else {}), params


def _refusal(why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{KV_PARAMS}: {why} (see docs/kv-transfer.md).", parameter=KV_PARAMS
    )
