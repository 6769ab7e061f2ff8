"""GET /metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from tokenmill.entrypoints.http.openapi import plain
from tokenmill.entrypoints.http.state import state_of

router = APIRouter(default_response_class=Response)


@router.get("/metrics", responses=plain("Metrics in Prometheus' text format."))
async def metrics(request: Request) -> Response:
    """What Prometheus scrapes."""
    state = state_of(request)
    accept = request.headers.get("accept", "")
    body, media_type = await state.metrics.exposition(accept)
    return Response(body, headers={"content-type": media_type})
