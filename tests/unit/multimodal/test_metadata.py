"""Metadata of files: how a picture stands is found, and nothing of the rest costs anything."""

from __future__ import annotations

import struct

import pytest
from PIL import Image

from helpers.pictures import as_file, picture, png_chunk
from tokenmill.errors import InvalidRequestError
from tokenmill.features.multimodal.decoding import decode_image
from tokenmill.features.multimodal.metadata import bare_jpeg

LIMIT = 1 << 20
UPRIGHT, LYING = (4, 8), (8, 4)
JPEG, PNG = as_file(picture(*LYING), "JPEG"), as_file(picture(*LYING))
XMP = b'<x tiff:Orientation="6"/>'


def table(*entries, order=">"):
    """Exif with one table: (tag, type, number, value as it is packed, its form)."""
    packed = [struct.pack(f"{order}HHL{form}", *entry) for *entry, form in entries]
    start = b"MM\0*" if order == ">" else b"II*\0"
    return start + struct.pack(f"{order}LH", 8, len(entries)) + b"".join(packed) + bytes(4)


def with_segments(*segments):
    """The JPEG with segments in front: (marker, data)."""
    packed = [bytes((0xFF, m)) + struct.pack(">H", len(d) + 2) + d for m, d in segments]
    return JPEG[:2] + b"".join(packed) + JPEG[2:]


def with_chunks(*chunks):
    """The PNG with chunks behind its header."""
    return PNG[:33] + b"".join(png_chunk(*each) for each in chunks) + PNG[33:]


TURNED = table((0x0112, 3, 1, 6, "Hxx"))
RAW = b"\nexif\n%8d\n%s" % (len(TURNED), TURNED.hex().encode())


@pytest.mark.parametrize(
    "data",
    [
        with_segments((0xE1, b"Exif\0\0" + TURNED)),
        with_segments((0xE1, b"Exif\0\0Exif\0\0" + TURNED)),
        with_segments((0xE1, b"Exif\0\0" + table((0x0112, 4, 1, 6, "L")))),
        with_segments((0xE1, b"Exif\0\0" + table((0x0112, 3, 1, 6, "Hxx"), order="<"))),
        with_segments((0xFE, b"\xff\xda"), (0xE2, b"ICC"), (0xE1, b"Exif\0\0" + TURNED)),
        with_segments((0xE1, b"http://ns.adobe.com/xap/1.0/\0" + XMP)),
        JPEG[:2] + b"\xff" * 99 + with_segments((0xE1, b"Exif\0\0" + TURNED))[2:],
        with_chunks((b"eXIf", TURNED)),
        with_chunks((b"tEXt", b"Raw profile type exif\0" + RAW)),
        with_chunks((b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP)),
        as_file(picture(*LYING), "WEBP", exif=b"Exif\0\0" + TURNED),
        as_file(picture(*LYING), "WEBP", xmp=XMP),
    ],
)  # fmt: skip
def test_b114_wherever_it_is_written_how_a_picture_stands(data):
    assert decode_image(data, LIMIT).size == UPRIGHT


@pytest.mark.parametrize(
    "exif",
    [
        b"", b"II", b"XX*\0" + bytes(99), TURNED[:12], TURNED[:15],
        b"MM\0*\xff\xff\xff\xff", table((0x0112, 3, 2, 6, "Hxx")), table((0x0112, 2, 1, 6, "Hxx")),
        table((0x0112, 3, 1, 9, "Hxx")),
    ],
)  # fmt: skip
def test_what_does_not_say_it_turns_nothing(exif):
    for data in (with_segments((0xE1, b"Exif\0\0" + exif)), with_chunks((b"eXIf", exif))):
        assert decode_image(data, LIMIT).size == LYING
    text = b"Raw profile type exif\0\nexif\n8\nnot hexadecimal"
    assert decode_image(with_chunks((b"tEXt", text)), LIMIT).size == LYING


def test_b116_pillow_puts_no_metadata_of_a_jpeg_together():
    """It does so piece by piece: a file of 16 MiB took minutes."""
    pieces = [(0xE1, b"Exif\0\0" + TURNED), (0xE2, b"ICC_PROFILE\0\1\1"), (0xFE, b"words")] * 100
    image = decode_image(with_segments(*pieces), LIMIT)
    assert image.size == UPRIGHT
    assert not {"exif", "icc_profile", "comment"} & image.info.keys()
    plain = decode_image(JPEG, LIMIT).transpose(Image.Transpose.ROTATE_270)
    assert image.tobytes() == plain.tobytes()


@pytest.mark.parametrize("marker", [*range(0xE1, 0xEE), 0xEF, 0xFE])
def test_b116_segments_of_applications_are_cut_out(marker):
    assert bare_jpeg(with_segments((marker, b"words"))) == (JPEG, {})


def test_what_says_how_colours_are_stored_stays():
    adobe = with_segments((0xEE, b"Adobe\0\x64\0\0\0\0\1"))
    assert b"JFIF\0" in adobe
    assert bare_jpeg(adobe) == (adobe, {})


def test_the_first_exif_of_a_jpeg_counts():
    straight = table((0x0112, 3, 1, 1, "Hxx"))
    for first, second, size in ((TURNED, straight, UPRIGHT), (straight, TURNED, LYING)):
        segments = [(0xE1, b"Exif\0\0" + exif) for exif in (first, second)]
        assert decode_image(with_segments(*segments), LIMIT).size == size


def test_b116_no_tag_but_one_is_read(monkeypatch):
    monkeypatch.setattr(Image.Exif, "load", lambda *_: pytest.fail("reads all tags"))
    tags = [(tag, 7, 1 << 24, 8, "L") for tag in range(100)]
    exif = table(*tags, (0x0112, 3, 1, 6, "Hxx")) + bytes(1 << 15)
    for data in (with_segments((0xE1, b"Exif\0\0" + exif)), with_chunks((b"eXIf", exif))):
        assert decode_image(data, LIMIT).size == UPRIGHT


def test_b116_parts_are_counted():
    with pytest.raises(InvalidRequestError, match="segments"):
        decode_image(with_segments(*[(0xFE, b"")] * 70_000), LIMIT)
    with pytest.raises(InvalidRequestError, match="chunks"):
        decode_image(with_chunks(*[(b"abCd", b"")] * 70_000), LIMIT)


def test_a_jpeg_of_marks_that_nobody_knows_is_refused():
    with pytest.raises(InvalidRequestError, match="damaged"):
        decode_image(with_segments((0x02, b"")), LIMIT)
    with pytest.raises(InvalidRequestError):
        decode_image(JPEG[:2] + b"\xff" * 99, LIMIT)
