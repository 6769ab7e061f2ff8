"""Names of contents, under which results are kept and shared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

_STRIP = 256
"""Rows of pixels."""


def typed_digest(*fields: str | bytes | int) -> str:
    """Hex SHA-256 of the fields, each with its type and length in front, so that no two different
    lists of fields are the same bytes.
    """
    return _digest(fields)


def image_digest(image: Image, identity: str, options: Mapping[str, Any]) -> str:
    """Names an image together with what is made of it; `identity` is the processor's."""
    palette = bytes(image.getpalette(None) or ()) if image.mode in ("P", "PA") else b""
    size = (image.mode, image.width, image.height, palette)
    return _digest(chain(("image", identity, as_text(options), *size), _pixels(image)))


def _digest(fields: Iterable[str | bytes | int]) -> str:
    hashed = hashlib.sha256()
    for each in fields:
        kind = {str: b"s", bytes: b"b", int: b"i"}[type(each)]
        data = each if isinstance(each, bytes) else str(each).encode("utf-8", "surrogatepass")
        hashed.update(kind + len(data).to_bytes(8, "little"))
        hashed.update(data)
    return hashed.hexdigest()


def _pixels(image: Image) -> Iterator[bytes]:
    """In strips: the pixels of an image as one are written twice before they are there."""
    for top in range(0, image.height, _STRIP):
        bottom = min(top + _STRIP, image.height)
        yield image.crop((0, top, image.width, bottom)).tobytes()


def as_text(value: Any) -> str:
    """Data of JSON as one text, whatever the order of its keys. Raises `TypeError`, `ValueError` or
    `RecursionError` for other data.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
