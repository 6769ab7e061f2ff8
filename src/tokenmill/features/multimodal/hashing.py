"""Names of contents, under which results are kept and shared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image


def typed_digest(*fields: str | bytes | int) -> str:
    """Hex SHA-256 of the fields, each with its type and length in front, so that no two different
    lists of fields are the same bytes.
    """
    hashed = hashlib.sha256()
    for each in fields:
        kind = {str: b"s", bytes: b"b", int: b"i"}[type(each)]
        data = each if isinstance(each, bytes) else str(each).encode("utf-8", "surrogatepass")
        hashed.update(kind + len(data).to_bytes(8, "little"))
        hashed.update(data)
    return hashed.hexdigest()


def image_digest(image: Image, identity: str, options: Mapping[str, Any]) -> str:
    """Names an image together with what is made of it; `identity` is the processor's."""
    palette = bytes(image.getpalette(None) or ()) if image.mode in ("P", "PA") else b""
    return typed_digest(
        "image",
        identity,
        as_text(options),
        image.mode,
        image.width,
        image.height,
        palette,
        image.tobytes(),
    )


def as_text(value: Any) -> str:
    """Data of JSON as one text, whatever the order of its keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=repr)
