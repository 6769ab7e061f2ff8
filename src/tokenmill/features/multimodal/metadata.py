"""What files say besides pixels: kept from pillow where reading it may take minutes or gigabytes.

Pillow puts all metadata of a JPEG together while it opens one, piece by piece, and reads every tag
of Exif to find one. Only how a picture stands is of use here.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from typing import Any

from tokenmill.errors import InvalidRequestError

_MAX_PARTS = 1 << 16
"""Segments or chunks of a file: thousands are many."""
_MARKER = re.compile(rb"[^\xff]*\xff+([^\xff])", re.DOTALL)
"""The next one of a JPEG, behind whatever fills the gap."""
_ESCAPED, _TEMPORARY, _START_OF_SCAN = 0x00, 0x01, 0xDA
_ALONE = frozenset((_ESCAPED, _TEMPORARY, *range(0xD0, 0xDA)))
"""Markers without a length and data."""
_FIRST_WITH_DATA = 0xC0
_APP1 = 0xE1
_LEFT_OUT = frozenset((*range(_APP1, 0xEE), 0xEF, 0xFE))
"""Segments of applications, and comments; but for two that tell how colours are stored."""
_EXIF = b"Exif\0\0"
_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_ORIENTATION = 0x0112
_FORMATS = {1: "B", 3: "H", 4: "L"}
"""Types of Exif that hold one number."""
_IN_XMP = re.compile(rb'tiff:Orientation(?:="|>)([1-8])')
_RAW_EXIF = "Raw profile type exif"
"""Exif in hexadecimal digits, as old programs write it into a PNG."""


def bare_jpeg(data: bytes) -> tuple[bytes, dict[str, Any]]:
    """(the file without metadata, its first Exif and XMP under pillow's names).

    Raises `InvalidRequestError` for one that cannot be read.
    """
    kept, found = [data[:2]], dict[str, Any]()
    position = 2
    for _ in range(_MAX_PARTS):
        marker = _MARKER.match(data, position)
        if marker is None:
            return b"".join(kept), found
        kind, position = marker[1][0], marker.end()
        if kind in _ALONE:
            continue
        if kind < _FIRST_WITH_DATA:
            raise _refused("the JPEG file is damaged")
        if kind == _START_OF_SCAN:
            return b"".join((*kept, b"\xff\xda", data[position:])), found
        end = position + int.from_bytes(data[position : position + 2], "big")
        segment = data[position + 2 : end]
        if kind not in _LEFT_OUT:
            kept += (bytes((0xFF, kind)), data[position:end])
        elif kind == _APP1 and segment.startswith(_EXIF):
            found.setdefault("exif", segment)
        elif kind == _APP1 and segment.startswith(_XMP):
            found.setdefault("xmp", segment)
        position = max(end, position + 2)
    raise _refused(f"the JPEG file has more than {_MAX_PARTS} segments; save it again")


def check_chunks(data: bytes) -> None:
    """Raise `InvalidRequestError` for a PNG in too many pieces."""
    position = 8
    for _ in range(_MAX_PARTS):
        if position >= len(data):
            return
        position += 12 + int.from_bytes(data[position : position + 4], "big")
    raise _refused(f"the PNG file has more than {_MAX_PARTS} chunks; save it again")


def orientation_of(info: Mapping[Any, Any]) -> int | None:
    """How a picture stands, 1 to 8 as in Exif; None if its metadata, under pillow's names, do not
    say it.
    """
    exif = info.get("exif")
    if exif is None and isinstance(raw := info.get(_RAW_EXIF), str):
        exif = _bytes_of("".join(raw.split("\n")[3:]))
    found = _exif_orientation(exif) if isinstance(exif, bytes) else None
    if found is not None:
        return found
    xmp = info.get("XML:com.adobe.xmp") or info.get("xmp") or b""
    written = _IN_XMP.search(xmp.encode() if isinstance(xmp, str) else xmp)
    return None if written is None else int(written[1])


def _bytes_of(digits: str) -> bytes:
    try:
        return bytes.fromhex(digits)
    except ValueError:
        return b""


def _exif_orientation(exif: bytes) -> int | None:
    for _ in range(2):  # some programs write its name twice
        exif = exif.removeprefix(_EXIF)
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return None
    try:
        (begin,) = struct.unpack_from(f"{order}L", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, begin)
        for entry in range(begin + 2, begin + 2 + 12 * count, 12):
            tag, kind, number = struct.unpack_from(f"{order}HHL", exif, entry)
            if tag == _ORIENTATION and kind in _FORMATS and number == 1:
                (value,) = struct.unpack_from(order + _FORMATS[kind], exif, entry + 8)
                return int(value)
    except struct.error:  # a table that is cut off
        return None
    return None


def _refused(what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{what}.", parameter="image")
