"""Files, arrays and pillow's images -> one kind of image: RGB, upright, of a size that is allowed.

Whatever a header promises is checked before memory is taken for it. Only the first picture of a
file is looked at, so that one with thousands costs no more.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tokenmill.errors import InvalidRequestError, shown
from tokenmill.features.multimodal.metadata import bare_jpeg, check_chunks, orientation_of

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

INSTALL_PILLOW = 'pip install "tokenmill[vision]"'
MAX_FILE_BYTES = 1 << 25
"""Of an image as a file."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""What is decoded; pillow knows many more, some of which start other programs."""
_SHOWN_FORMATS = "PNG, JPEG, WebP, GIF or BMP"
_MAX_SCANS = 100
"""Of a progressive JPEG, each of which is a pass over all pixels; encoders write about ten."""
_START_OF_SCAN = b"\xff\xda"
"""Never part of compressed data: there a byte 255 is followed by 0."""
_JPEG, _PNG = b"\xff\xd8\xff", b"\x89PNG"
_ORIENTATION = 0x0112
"""Tag of Exif."""
_WHITE = (255, 255, 255)


def decode_image(data: bytes, max_pixels: int) -> Image:
    """The image in a file, mode RGB.

    Raises `InvalidRequestError` for a file that is none, is damaged, or is larger than allowed.
    """
    pillow = _pillow()
    check_file_size(len(data))
    found: dict[str, Any] = {}
    if data.startswith(_JPEG):
        data, found = bare_jpeg(data)
    elif data.startswith(_PNG):
        check_chunks(data)
    with _refusals(max_pixels):
        image = pillow.open(io.BytesIO(data), formats=_FORMATS)
    _check_size(image.width, image.height, max_pixels)
    if image.format == "JPEG" and data.count(_START_OF_SCAN) > _MAX_SCANS:
        raise refused(f"the JPEG file has more than {_MAX_SCANS} scans; save it again")
    with _refusals(max_pixels):
        image.load()
    return _normalised(image, max_pixels, orientation_of({**image.info, **found}))


def normalise_image(image: Image, max_pixels: int) -> Image:
    """An image of pillow's in mode RGB, upright; transparent parts become white.

    Raises `InvalidRequestError` for one that is empty, larger than allowed, or of a mode whose
    values have no known range.
    """
    return _normalised(image, max_pixels, _orientation(image))


def _normalised(image: Image, max_pixels: int, orientation: int | None) -> Image:
    _check_size(image.width, image.height, max_pixels)
    if image.mode == "F":
        raise refused(
            "the image has mode F, whose values have no known range; convert it to RGB first"
        )
    with _refusals(max_pixels):
        turn = _turn(orientation)
        image = _to_rgb(image)
        return image if turn is None else image.transpose(turn)


def image_of_array(array: np.ndarray, max_pixels: int) -> Image:
    """Pixels as an image: uint8 [height, width], or with 1, 3 (RGB) or 4 (RGBA) channels behind.

    Raises `InvalidRequestError` for other types and shapes.
    """
    pillow = _pillow()
    shape = "x".join(map(str, array.shape))
    channels = array.shape[2] if array.ndim == 3 else 1
    if array.dtype != "uint8" or array.ndim not in (2, 3) or channels not in (1, 3, 4):
        raise refused(
            f"the array is {array.dtype} [{shape}]; it must be uint8 [height, width, channels] with"
            f" 1, 3 or 4 channels, 0 to 255"
        )
    _check_size(array.shape[1], array.shape[0], max_pixels)
    if array.ndim == 3 and channels == 1:
        array = array[:, :, 0]
    return normalise_image(pillow.fromarray(array), max_pixels)


def check_file_size(num_bytes: int) -> None:
    """Raise `InvalidRequestError` for a file that is too large to be looked at."""
    if num_bytes > MAX_FILE_BYTES:
        raise refused(f"the file has {num_bytes} bytes; at most {MAX_FILE_BYTES} are read")


def refused(what: str) -> InvalidRequestError:
    """An error about an image; the caller says which one."""
    return InvalidRequestError(f"{what}.", parameter="image")


def has_pillow() -> bool:
    """Whether images can be read."""
    return importlib.util.find_spec("PIL") is not None


def _pillow() -> Any:
    """`PIL.Image`, imported when the first image comes."""
    try:
        from PIL import Image, WebPImagePlugin  # noqa: F401  # or else all formats are registered
    except ImportError as error:
        raise refused(f"reading images needs pillow, which is missing: {INSTALL_PILLOW}") from error
    return Image


@contextmanager
def _refusals(max_pixels: int) -> Iterator[None]:
    """Turns what pillow raises on damaged files into errors of the request."""
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except UnidentifiedImageError:
        raise refused(f"the data is no image that can be read; send {_SHOWN_FORMATS}") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_large("far", max_pixels) from None
    except Exception as error:  # decoders raise whatever they stumble over
        raise refused(f"the image cannot be decoded ({shown(error)})") from error


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width < 1 or height < 1:
        raise refused(f"the image has {width} x {height} pixels; it needs at least one")
    if width * height > max_pixels:
        raise _too_large(f"{width} x {height} pixels,", max_pixels)


def _too_large(size: str, max_pixels: int) -> InvalidRequestError:
    return refused(
        f"the image has {size} more than {max_pixels} pixels (max_image_pixels); send a smaller one"
    )


def _orientation(image: Image) -> int | None:
    """How an image of the caller's own stands."""
    try:
        orientation: int | None = image.getexif().get(_ORIENTATION)
    except Exception:  # noqa: BLE001  # whatever a broken table does: the picture is still there
        return None
    return orientation


def _turn(orientation: int | None) -> Any:
    """How pillow is to turn an image so that it stands upright; None for one that does."""
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return turns.get(orientation or 0)


def _to_rgb(image: Image) -> Image:
    if image.mode.startswith("I"):
        image = _eight_bits(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        opaque: Image = _pillow().new("RGB", image.size, _WHITE)
        opaque.paste(image, mask=image.getchannel("A"))
        return opaque
    if image.mode == "RGB":
        return image
    return image.convert("RGB")


def _eight_bits(image: Image) -> Image:
    """Grey of 16 bits (or of 32 that hold as many), in 8."""
    import numpy as np

    values = np.asarray(image)
    grey: Image = _pillow().fromarray((np.clip(values, 0, 0xFFFF) >> 8).astype(np.uint8))
    return grey
