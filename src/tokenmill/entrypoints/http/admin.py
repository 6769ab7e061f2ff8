"""What only operators do, where it is switched on: POST /reset_prefix_cache, /sleep, /wake_up,
/pause, /resume, /update_weights; GET /is_sleeping, /is_paused, /get_weight_version.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fastapi import APIRouter, Request, Response

from tokenmill.contracts.operations import MODES, SCHEDULING, TAGS, Sleep, UpdateWeights, WakeUp
from tokenmill.entrypoints.http.admin_protocol import UpdateWeightsRequest
from tokenmill.entrypoints.http.body import read_request
from tokenmill.entrypoints.http.errors import AdminDisabledError, CacheBusyError
from tokenmill.entrypoints.http.json_response import json_response
from tokenmill.entrypoints.http.openapi import json_body, plain
from tokenmill.entrypoints.http.state import ServerState, state_of
from tokenmill.errors import (
    CheckpointError,
    InvalidRequestError,
    ModelNotFoundError,
    did_you_mean,
    shown,
)

router = APIRouter(default_response_class=Response)

_BOOLS = {"true": True, "1": True, "false": False, "0": False}


@router.post(
    "/reset_prefix_cache",
    responses=plain("All cached prefixes are forgotten.", 403, 409, 503),
)
async def reset_prefix_cache(request: Request) -> Response:
    """Forget all cached prefixes."""
    if not await _admin(request).engine.reset_prefix_cache():
        raise CacheBusyError("requests are running; the cache stays as it is. Try again later.")
    return Response()


@router.post("/sleep", responses=plain("The engine is asleep.", 400, 403, 503))
async def sleep(request: Request) -> Response:
    """Pause, and give memory back: `level` (0, 1 or 2; 1 by default), `mode` (abort, wait or keep;
    abort by default).
    """
    state = _admin(request)
    query = _query(request, "level", "mode")
    level = query.get("level", ["1"])[-1]
    if level not in ("0", "1", "2"):
        raise InvalidRequestError(f"level={shown(level)} must be 0, 1 or 2.", parameter="level")
    await state.engine.operations.operate(Sleep(int(level), _mode(query)))
    return Response()


@router.post("/wake_up", responses=plain("It is awake, or these parts are.", 400, 403, 503))
async def wake_up(request: Request) -> Response:
    """Take memory back and go on; `tags` (weights, kv_cache, scheduling), each as a parameter of
    its own, wakes up parts.
    """
    state = _admin(request)
    tags = _query(request, "tags").get("tags", TAGS)
    await state.engine.operations.operate(WakeUp(tuple(tags)))
    return Response()


@router.get("/is_sleeping", responses=plain("`is_sleeping`.", 403))
async def is_sleeping(request: Request) -> Response:
    """Whether anything of the engine is asleep."""
    return json_response({"is_sleeping": _admin(request).engine.operations.state.is_sleeping})


@router.post("/pause", responses=plain("No step is made any more.", 400, 403, 503))
async def pause(request: Request) -> Response:
    """Make no steps: `mode` (abort by default); `clear_cache` (true by default) forgets KV."""
    state = _admin(request)
    query = _query(request, "mode", "clear_cache")
    clear = query.get("clear_cache", ["true"])[-1].lower()
    if clear not in _BOOLS:
        raise InvalidRequestError(
            f"clear_cache={shown(clear)} must be true or false.", parameter="clear_cache"
        )
    operation = Sleep(0, _mode(query), clear_cache=_BOOLS[clear])
    await state.engine.operations.operate(operation)
    return json_response({"status": "paused"})


@router.post("/resume", responses=plain("Steps are made again.", 400, 403, 503))
async def resume(request: Request) -> Response:
    """Go on after /pause."""
    _query(request)
    await _admin(request).engine.operations.operate(WakeUp((SCHEDULING,)))
    return json_response({"status": "resumed"})


@router.get("/is_paused", responses=plain("`is_paused`.", 403))
async def is_paused(request: Request) -> Response:
    """Whether no steps are made."""
    return json_response({"is_paused": _admin(request).engine.operations.is_paused})


@router.post(
    "/update_weights",
    responses=plain("`weight_version`.", 400, 403, 503),
    openapi_extra=json_body(UpdateWeightsRequest),
)
async def update_weights(request: Request) -> Response:
    """Replace the weights; what was computed with the old ones is forgotten."""
    state = _admin(request)
    fields = await read_request(request, UpdateWeightsRequest)
    path = _below_root(state.args.weights_root, fields.path)
    operation = UpdateWeights(str(path), fields.version or "", fields.mode)
    try:
        after = await state.engine.operations.operate(operation)
    except (CheckpointError, ModelNotFoundError) as error:
        raise InvalidRequestError(str(error), parameter="path") from error
    return json_response({"weight_version": after.weight_version})


@router.get("/get_weight_version", responses=plain("`weight_version`.", 403))
async def weight_version(request: Request) -> Response:
    """The name of the weights; `default` are those that the server started with."""
    return json_response({"weight_version": _admin(request).engine.operations.state.weight_version})


def _admin(request: Request) -> ServerState:
    state = state_of(request)
    if not state.args.enable_admin:
        raise AdminDisabledError("administrative endpoints are off (enable_admin).")
    return state


def _query(request: Request, *known: str) -> dict[str, Sequence[str]]:
    """Parameters of the URL, each with its values. Raises `InvalidRequestError` for others."""
    for name in request.query_params:
        if name not in known:
            raise InvalidRequestError(
                f"{shown(name)} is no parameter of {shown(request.url.path)}."
                f"{did_you_mean(name, known)}",
                parameter=name if len(name) < 64 else None,
            )
    return {name: request.query_params.getlist(name) for name in request.query_params}


def _mode(query: dict[str, Sequence[str]]) -> str:
    mode = query.get("mode", ["abort"])[-1]
    if mode not in MODES:
        raise InvalidRequestError(
            f"mode={shown(mode)} must be one of: {', '.join(MODES)}.", parameter="mode"
        )
    return mode


def _below_root(root: str | None, given: str) -> Path:
    """What a request means: below the root, links resolved. What lies elsewhere is refused in the
    same words, whether or not it is there.
    """
    if root is None:
        raise AdminDisabledError("this server reads no other weights from its disk (weights_root).")
    try:
        base = Path(root).expanduser().resolve(strict=True)
        path = (base / given).resolve(strict=True)
        is_below = base in path.parents
    except (OSError, ValueError, RuntimeError):
        is_below = False
    if not is_below:
        raise InvalidRequestError(
            f"path={shown(given)} names nothing below this server's weights_root.",
            parameter="path",
        )
    return path
