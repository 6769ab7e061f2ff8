"""Bodies of what operators ask for."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class UpdateWeightsRequest(Struct, kw_only=True):
    """Body of POST /update_weights."""

    path: Annotated[str, Meta(description="A checkpoint below the operator's weights_root.")]
    version: Annotated[
        str | None, Meta(description="A name for the weights; by default, updates count.")
    ] = None
    mode: Annotated[
        str, Meta(description="What becomes of requests that have begun: abort, wait or keep.")
    ] = "wait"
