"""A struct as a response."""

from __future__ import annotations

import msgspec
from starlette.responses import Response


def json_response(value: msgspec.Struct | dict[str, object], status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
