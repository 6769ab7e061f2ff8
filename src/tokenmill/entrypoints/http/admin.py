"""POST /reset_prefix_cache: what only operators do, where it is switched on."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from tokenmill.entrypoints.http.errors import AdminDisabledError, CacheBusyError
from tokenmill.entrypoints.http.openapi import plain
from tokenmill.entrypoints.http.state import state_of

router = APIRouter(default_response_class=Response)


@router.post(
    "/reset_prefix_cache",
    responses=plain("All cached prefixes are forgotten.", 403, 409, 503),
)
async def reset_prefix_cache(request: Request) -> Response:
    """Forget all cached prefixes."""
    state = state_of(request)
    if not state.args.enable_admin:
        raise AdminDisabledError("administrative endpoints are off (enable_admin).")
    if not await state.engine.reset_prefix_cache():
        raise CacheBusyError("requests are running; the cache stays as it is. Try again later.")
    return Response()
