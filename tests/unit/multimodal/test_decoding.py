"""Files, arrays and images of every kind to RGB, upright, within limits."""

from __future__ import annotations

import io
import resource
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from helpers.pictures import as_file, flat_png, gif_of_many_frames, picture, png_chunk
from tokenmill.errors import InvalidRequestError
from tokenmill.features.multimodal.decoding import (
    MAX_FILE_BYTES,
    decode_image,
    image_of_array,
    normalise_image,
)

LIMIT = 1 << 20


@pytest.mark.parametrize("size", [(1, 1), (1, 2000), (2000, 1), (3, 7), (61, 47)])
@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_b114_sizes(size, format):
    image = decode_image(as_file(picture(*size), format), LIMIT)
    assert (image.mode, image.size) == ("RGB", size)


def test_b114_pixels_are_kept():
    image = picture(9, 5)
    assert decode_image(as_file(image), LIMIT).tobytes() == image.tobytes()


@pytest.mark.parametrize("mode", ["1", "L", "P"])
def test_b114_grey_and_palette(mode):
    image = picture(20, 10, mode)
    assert decode_image(as_file(image), LIMIT).tobytes() == image.convert("RGB").tobytes()


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_b114_what_is_transparent_becomes_white(mode):
    image = Image.new(mode, (2, 1), (0,) * len(mode))
    image.putpixel((1, 0), (*(7,) * (len(mode) - 1), 255))
    found = decode_image(as_file(image), LIMIT)
    assert [found.getpixel((x, 0)) for x in range(2)] == [(255, 255, 255), (7, 7, 7)]


def test_b114_a_palette_with_a_transparent_colour():
    image = Image.new("P", (2, 1))
    image.putpalette([9, 9, 9, 50, 60, 70])
    image.putpixel((1, 0), 1)
    for format in ("PNG", "GIF"):
        found = decode_image(as_file(image, format, transparency=0), LIMIT)
        assert [found.getpixel((x, 0)) for x in range(2)] == [(255, 255, 255), (50, 60, 70)]


@pytest.mark.parametrize("mode", ["I;16", "I"])
def test_b114_sixteen_bits_keep_their_range(mode):
    values = np.array([[0, 255, 256, 32768, 65535]], dtype=np.uint16)
    image = Image.fromarray(values)
    found = normalise_image(image if mode == "I;16" else image.convert("I"), LIMIT)
    assert np.asarray(found)[0, :, 0].tolist() == [0, 0, 1, 128, 255]
    if mode == "I;16":
        assert decode_image(as_file(image), LIMIT).tobytes() == found.tobytes()


def test_b114_cmyk():
    image = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    red, green, blue = decode_image(as_file(image, "JPEG"), LIMIT).getpixel((4, 4))
    assert red > 200
    assert max(green, blue) < 60


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_b114_of_what_moves_the_first_picture(format):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "green", "blue")]
    options = {"lossless": True} if format == "WEBP" else {}
    data = as_file(frames[0], format, save_all=True, append_images=frames[1:], **options)
    assert decode_image(data, LIMIT).getpixel((4, 4)) == (255, 0, 0)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_b114_stands_upright(format, orientation):
    upright = Image.new("RGB", (16, 8))
    upright.paste("red", (0, 0, 8, 8))
    stored = {
        1: lambda i: i,
        2: lambda i: i.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: lambda i: i.transpose(Image.Transpose.ROTATE_180),
        4: lambda i: i.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: lambda i: i.transpose(Image.Transpose.TRANSPOSE),
        6: lambda i: i.transpose(Image.Transpose.ROTATE_90),
        7: lambda i: i.transpose(Image.Transpose.TRANSVERSE),
        8: lambda i: i.transpose(Image.Transpose.ROTATE_270),
    }[orientation](upright)
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = decode_image(as_file(stored, format, exif=exif), LIMIT)
    assert found.size == (16, 8)
    assert found.getpixel((2, 4))[0] > 200
    assert found.getpixel((13, 4))[0] < 50


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_a_broken_orientation_is_none():
    data = as_file(picture(8, 8), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert decode_image(data, LIMIT).size == (8, 8)


BROKEN = {
    "empty": b"",
    "text": b"hello",
    "cut": as_file(picture(64, 64))[:200],
    "cut jpeg": as_file(picture(64, 64), "JPEG")[:400],
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "tiff": as_file(picture(8, 8), "TIFF"),
    "wrong checksum": as_file(picture(64, 64)).replace(b"IDAT", b"IDAX"),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_b114_what_cannot_be_read_is_refused(data):
    with pytest.raises(InvalidRequestError) as caught:
        decode_image(data, LIMIT)
    assert caught.value.parameter == "image"


def test_b114_values_without_a_range_are_refused():
    with pytest.raises(InvalidRequestError, match="mode F"):
        normalise_image(Image.new("F", (4, 4)), LIMIT)
    with pytest.raises(InvalidRequestError, match="0 x 4 pixels"):
        normalise_image(Image.new("RGB", (0, 4)), LIMIT)


@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 1), (4, 6, 3), (4, 6, 4)])
def test_arrays(shape):
    values = np.full(shape, 255, dtype=np.uint8)
    values[1, 2] = 255 if len(shape) == 3 and shape[2] == 4 else 9
    found = image_of_array(values, LIMIT)
    assert (found.mode, found.size) == ("RGB", (6, 4))
    assert found.getpixel((2, 1)) == (int(values[1, 2].flat[0]),) * 3


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 6, 3), np.float32),
        np.zeros((3, 4, 6), np.uint8),
        np.zeros((4,), np.uint8),
        np.zeros((0, 4, 3), np.uint8),
        np.zeros((2048, 2048), np.uint8),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_of_another_kind_are_refused(array):
    with pytest.raises(InvalidRequestError):
        image_of_array(array, LIMIT)


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def claimed_png(width, height):
    """A PNG whose header promises what is not there."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IEND", b"")


def claimed_gif(width, height):
    """A small GIF whose one frame claims another size than the file."""
    whole = bytearray(as_file(Image.new("P", (8, 8)), "GIF"))
    begin = whole.index(b"\x2c\0\0\0\0")
    whole[begin + 5 : begin + 9] = struct.pack("<HH", width, height)
    return bytes(whole)


BOMBS = {
    "one colour": flat_png(20_000, 20_000),
    "header": claimed_png(60_000, 60_000),
    "sides beyond all bounds": claimed_png(2**31 - 1, 2**31 - 1),
    "frame larger than its gif": claimed_gif(60_000, 60_000),
    "bmp": b"BM"
    + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 50_000, 50_000, 1, 24, *[0] * 6),
    "webp": b"RIFF\x1a\0\0\0WEBPVP8L\x0d\0\0\0\x2f" + struct.pack("<I", 0x0FFFFFFF) + b"\0" * 8,
}


@pytest.mark.parametrize("data", BOMBS.values(), ids=BOMBS)
def test_b116_pixels_are_counted_before_they_are_there(data):
    before = peak_bytes()
    with pytest.raises(InvalidRequestError):
        decode_image(data, 1 << 25)
    assert peak_bytes() - before < 100 << 20


def test_b116_the_bomb_is_an_image():
    small = decode_image(flat_png(300, 200), LIMIT)
    assert small.tobytes() == bytes(3 * 300 * 200)


def test_b116_frames_are_not_decoded():
    data = gif_of_many_frames(20_000)
    assert len(data) > 2 << 20
    before = peak_bytes()
    assert decode_image(data, LIMIT).size == (100, 100)
    assert peak_bytes() - before < 50 << 20
    image = Image.open(io.BytesIO(gif_of_many_frames(7)))
    assert image.n_frames == 7  # the file is what it seems


def test_b116_scans_are_counted():
    image = picture(64, 64)
    data = as_file(image, "JPEG", progressive=True)
    assert decode_image(data, LIMIT).size == (64, 64)
    begin = data.rindex(b"\xff\xda")
    scan = data[begin:-2]
    with pytest.raises(InvalidRequestError, match="scans"):
        decode_image(data[:-2] + scan * 200 + data[-2:], LIMIT)


def test_b116_bytes_are_counted():
    with pytest.raises(InvalidRequestError, match="bytes"):
        decode_image(bytes(MAX_FILE_BYTES + 1), LIMIT)


def test_b116_text_of_gigabytes_within_a_png():
    packed = zlib.compress(b"\0" * (100 << 20), 9)
    data = as_file(picture(8, 8))
    begin = data.index(b"IDAT") - 4
    bomb = data[:begin] + png_chunk(b"zTXt", b"a\0\0" + packed) + data[begin:]
    before = peak_bytes()
    with pytest.raises(InvalidRequestError, match="Decompressed data too large"):
        decode_image(bomb, LIMIT)
    assert peak_bytes() - before < 50 << 20
