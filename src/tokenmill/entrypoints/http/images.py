"""Images of requests, fetched and prepared beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tokenmill.entrypoints.http.state import ServerState

if TYPE_CHECKING:
    from tokenmill.features.multimodal.images import ImagePart, PreparedImage


async def prepared_images(
    state: ServerState, parts: Sequence[ImagePart], options: Any
) -> list[PreparedImage]:
    """What the engine takes for the images of one prompt, in their order; `options` are the
    request's `mm_processor_kwargs`.

    Raises `InvalidRequestError` that names the part whose image cannot be taken.
    """
    images = state.engine.images
    if images is None or not parts:
        return []
    chosen, limits = images.options(options), images.limits()
    works = [partial(images.prepare, part, chosen, limits) for part in parts]
    return await asyncio.gather(*map(state.in_media_thread, works))
