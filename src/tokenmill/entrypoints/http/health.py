"""GET /health, /ready, /ping, /version, /load: what probes and balancers ask."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

import tokenmill
from tokenmill.engine.engine_stats import EngineStats
from tokenmill.entrypoints.http.errors import UnavailableError
from tokenmill.entrypoints.http.json_response import json_response
from tokenmill.entrypoints.http.openapi import plain
from tokenmill.entrypoints.http.state import state_of

router = APIRouter(default_response_class=Response)


@router.head("/health", include_in_schema=False)
@router.get("/health", responses=plain("The engine lives and makes progress.", 503))
async def health(request: Request) -> Response:
    """Liveness: restart the server if this is not 200 for long."""
    state = state_of(request)
    if state.dead or not state.engine.is_healthy:
        raise UnavailableError("the engine is dead or does not get on.")
    return Response()


@router.head("/ready", include_in_schema=False)
@router.get("/ready", responses=plain("Requests are taken.", 503))
async def ready(request: Request) -> Response:
    """Readiness: send no requests here while this is not 200."""
    state_of(request).check_ready()
    return Response()


@router.head("/ping", include_in_schema=False)
@router.get("/ping", responses=plain("As /health.", 503))
@router.post("/ping", responses=plain("As /health.", 503))
async def ping(request: Request) -> Response:
    """The same as /health, under the name that some platforms ask for."""
    return await health(request)


@router.get("/version", responses=plain("`version` of tokenmill."))
async def version(request: Request) -> Response:
    """The version of the server."""
    return json_response({"version": tokenmill.__version__})


@router.get("/load", responses=plain("`server_load`: HTTP requests that generate now."))
async def load(request: Request) -> Response:
    """How busy the server is."""
    state = state_of(request)
    stats = await state.engine.stats()
    answer = {"server_load": len(state.active), **_load_of(stats)}
    if stats.replicas:
        answer["engines"] = [
            {"engine": rank, "healthy": each.is_healthy, **_load_of(each)}
            for rank, each in enumerate(stats.replicas)
        ]
    return json_response(answer)


def _load_of(stats: EngineStats) -> dict[str, Any]:
    return {
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
        "kv_cache_usage": stats.kv_cache_usage,
    }
