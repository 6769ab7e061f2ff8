"""Pictures for tests, and a family of models that needs no model."""

from __future__ import annotations

import base64
import io
import struct
import zlib

import numpy as np
from PIL import Image

from tokenmill.config.multimodal import MultiModalConfig
from tokenmill.errors import InvalidRequestError
from tokenmill.features.multimodal.images import Images
from tokenmill.features.multimodal.processing import ProcessedImage, refuse_unknown_options

MARK = "<|endoftext|>"
"""Of the tiny tokenizer: a special token that no template writes."""
MARK_ID = 0
PLACEHOLDER = 5
END = 6


class TinyProcessor:
    """A placeholder for each 8 x 8 pixels, begun or whole, and one token of the end."""

    mark_token = MARK
    mark_token_id = MARK_ID
    mark_text = f"{MARK}\n"

    def __init__(self):
        self.num_processed = 0

    def num_tokens(self, width, height, options):
        refuse_unknown_options(options, ("patch",))
        patch = options.get("patch", 8)
        if not isinstance(patch, int):
            raise InvalidRequestError("patch must be a number.", parameter="mm_processor_kwargs")
        if width > 64 * height or height > 64 * width:
            raise InvalidRequestError(f"{width} x {height} is too narrow.", parameter="image")
        return -(-width // patch) * -(-height // patch) + 1

    def process(self, image, options):
        assert image.mode == "RGB"
        self.num_processed += 1
        count = self.num_tokens(image.width, image.height, options) - 1
        pixels = np.asarray(image).mean(axis=2, dtype=np.float32)
        return ProcessedImage({"pixels": pixels}, [PLACEHOLDER] * count + [END], [(0, count)])


def tiny_images(*, max_model_len=512, fetcher=None, processor=None, max_embeds=None, **settings):
    """What the engine makes of images, on the processor above."""
    return Images(
        processor or TinyProcessor(),
        MultiModalConfig(**settings),
        identity="tiny",
        max_model_len=max_model_len,
        max_embeds=max_embeds,
        fetcher=fetcher,
    )


def picture(width=16, height=8, mode="RGB", seed=0):
    """Noise, the same for the same arguments."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values).convert(mode)


def as_file(image, format="PNG", **options):
    """The bytes of a file."""
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def data_url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_url(data, **more):
    """A part of a message."""
    url = data if isinstance(data, str) else data_url(data)
    return {"type": "image_url", "image_url": {"url": url, **more}}


def png_chunk(kind, data):
    checked = kind + data
    return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))


def flat_png(width, height):
    """A PNG of one grey, as small as it can be: a thousandth of its pixels. `height` is a multiple
    of 100.
    """
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = bytes(100 * (width + 1))
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    packed = packer.compress(rows) + packer.flush(zlib.Z_FULL_FLUSH)  # may be repeated
    checked = 1
    for _ in range(height // 100):
        checked = zlib.adler32(rows, checked)
    body = b"\x78\xda" + packed * (height // 100) + b"\x03\0" + struct.pack(">I", checked)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", header)
        + png_chunk(b"IDAT", body)
        + png_chunk(b"IEND", b"")
    )


def gif_of_many_frames(count, width=100, height=100):
    """A GIF whose frames are copies of one."""
    whole = as_file(Image.new("P", (width, height)), "GIF")
    begin = whole.index(b"\x2c\0\0\0\0")  # the frame's descriptor
    return whole[:begin] + whole[begin:-1] * count + b";"
