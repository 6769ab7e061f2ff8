"""The images of prompts: read, checked, processed once for each content, put in their places."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, cast

from tokenmill.config.multimodal import MultiModalConfig
from tokenmill.contracts.request import MultiModalFeature, TensorData
from tokenmill.errors import InvalidRequestError
from tokenmill.features.multimodal.decoding import (
    check_file_size,
    decode_image,
    image_of_array,
    normalise_image,
    refused,
)
from tokenmill.features.multimodal.fetching import Fetcher, decode_data_url, read_file, read_local
from tokenmill.features.multimodal.hashing import as_text, image_digest, typed_digest
from tokenmill.features.multimodal.limits import PromptLimits
from tokenmill.features.multimodal.processing import (
    ImageProcessor,
    ProcessedImage,
    SurroundsMarks,
)

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_FILES = 4096
"""Files whose contents' names are remembered."""
_NUM_DECODING = 2
"""Images that are decoded and processed at the same time; each may take some hundred MB."""


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image as a request brings it."""

    source: Any
    """An image of pillow's, uint8 pixels as a numpy array, a file's bytes or path, or a URL."""
    where: str
    """Its place in the request, for messages."""


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image as the core takes it."""

    content_hash: str
    inputs: dict[str, TensorData]
    token_ids: list[int]
    """Stand in the prompt in place of its mark."""
    embed_spans: list[tuple[int, int]]

    @property
    def num_bytes(self) -> int:
        """Memory of the inputs."""
        return sum(len(each.data) for each in self.inputs.values())


class Images:
    """What a model makes of the images of its prompts. Used by several threads at once."""

    def __init__(
        self,
        processor: ImageProcessor,
        config: MultiModalConfig,
        *,
        identity: str,
        max_model_len: int,
        max_embeds: int | None = None,
        fetcher: Fetcher | None = None,
    ) -> None:
        """`identity` names the processor and its settings: another one makes other inputs.
        `max_embeds` is the most embeddings of one image that the engine has room for.
        """
        self.mark_token = processor.mark_token
        """Stands for an image in a prompt."""
        self.mark_token_id = processor.mark_token_id
        self.mark_text = processor.mark_text
        """What stands for one in the text of a message, for templates that know no images."""
        self._surroundings: tuple[str, str] | None = None
        if isinstance(processor, SurroundsMarks):
            self._surroundings = processor.text_around_mark
        self.num_queries = 0
        """Images that were looked up among those that are kept."""
        self.num_hits = 0
        """Those of them that were there."""
        self._processor = processor
        self._config = config
        self._identity = identity
        self._max_model_len = max_model_len
        self._max_embeds = max_embeds
        self._fetcher = fetcher or Fetcher(config.domains)
        self._kept = _Kept(config.cache_bytes)
        self._decoding = threading.BoundedSemaphore(_NUM_DECODING)

    def limits(self) -> PromptLimits:
        """What the images of a new prompt may take."""
        return PromptLimits(self._max_model_len)

    def check_count(self, num_images: int, parameter: str) -> None:
        """Raise `InvalidRequestError` for more images than one prompt may have."""
        most = self._config.max_images
        if num_images > most:
            raise InvalidRequestError(
                f"{parameter} has {num_images} images, but a prompt takes {most}"
                f" (limit_mm_per_prompt); send fewer.",
                parameter=parameter,
            )

    def options(self, given: object) -> dict[str, Any]:
        """A request's options over the engine's. Raises `InvalidRequestError` for what is no object
        of JSON.
        """
        if given is None:
            return dict(self._config.processor_options)
        try:
            is_json = isinstance(given, Mapping) and as_text(given) != ""
        except (TypeError, ValueError, RecursionError):
            is_json = False
        if not is_json:
            raise InvalidRequestError(
                f"mm_processor_kwargs has type {type(given).__name__}; it must be an object of"
                f" options, of JSON, and not nested deep.",
                parameter="mm_processor_kwargs",
            )
        return {**self._config.processor_options, **cast(Mapping[str, Any], given)}

    def prepare_all(
        self, sources: Sequence[Any], options: Mapping[str, Any], where: str
    ) -> list[PreparedImage]:
        """Those of a prompt, one after the other; `where` is what the request calls them.

        What has been prepared is taken as it is. Raises as `prepare` does, and for too many.
        """
        self.check_count(len(sources), where)
        limits = self.limits()
        prepared = []
        for i, source in enumerate(sources):
            if isinstance(source, PreparedImage):
                prepared.append(source)
                continue
            part = source if isinstance(source, ImagePart) else ImagePart(source, f"{where}[{i}]")
            prepared.append(self.prepare(part, options, limits))
        return prepared

    def prepare(
        self, part: ImagePart, options: Mapping[str, Any], limits: PromptLimits
    ) -> PreparedImage:
        """What the core is sent for one image; takes a while.

        Raises `InvalidRequestError` that names the place of the image, if it cannot be read, is
        damaged or too large, or if its processor refuses it or an option.
        """
        with _blamed_on(part.where):
            source = part.source
            data = self._file(source, limits)
            key = as_text(options)
            file = None if data is None else typed_digest("file", self._identity, key, data)
            prepared = None if file is None else self._kept.by_file(file)
            hit = prepared is not None
            if prepared is None:
                with self._decoding:
                    image = self._image(source if data is None else data)
                    content_hash = image_digest(image, self._identity, options)
                    prepared = self._kept.get(content_hash)
                    hit = prepared is not None
                    prepared = prepared or self._process(image, content_hash, options, limits)
                self._kept.put(prepared, file)
            with self._kept.lock:
                self.num_queries += 1
                self.num_hits += hit
            limits.take_tokens(len(prepared.token_ids))
            return prepared

    def with_surroundings(self, text: str) -> str:
        """A prompt's text, before it is tokenized, with what the family has around images around
        each of its marks.
        """
        if self._surroundings is None:
            return text
        before, behind = self._surroundings
        return text.replace(self.mark_token, f"{before}{self.mark_token}{behind}")

    def check_marks(self, token_ids: list[int], num_images: int) -> None:
        """Raise `InvalidRequestError` for a prompt with more or fewer marks than images."""
        num_marks = token_ids.count(self.mark_token_id)
        if num_marks != num_images:
            raise InvalidRequestError(
                f"the prompt has {num_marks} image marks ({self.mark_token}), but {num_images}"
                f" images came with it; write one mark where each image belongs.",
                parameter="prompt",
            )

    def expand(
        self, token_ids: list[int], images: Sequence[PreparedImage]
    ) -> tuple[list[int], list[MultiModalFeature]]:
        """A prompt's ids with each mark replaced by its image's placeholders, and where these are.

        Raises as `check_marks` does.
        """
        self.check_marks(token_ids, len(images))
        expanded: list[int] = []
        features = []
        begin = 0
        for image in images:
            end = token_ids.index(self.mark_token_id, begin)
            expanded += token_ids[begin:end]
            features.append(
                MultiModalFeature(
                    content_hash=image.content_hash,
                    modality="image",
                    offset=len(expanded),
                    length=len(image.token_ids),
                    inputs=image.inputs,
                    embed_spans=image.embed_spans,
                )
            )
            expanded += image.token_ids
            begin = end + 1
        return expanded + token_ids[begin:], features

    def _file(self, source: Any, limits: PromptLimits) -> bytes | None:
        """The image as a file; None for one that comes as pixels."""
        if isinstance(source, str):
            data = self._read_url(source, limits)
        elif isinstance(source, bytes | bytearray | memoryview):
            check_file_size(len(source))
            data = bytes(source)
        elif isinstance(source, PathLike):
            try:
                data = read_file(source)
            except OSError as error:
                raise refused(f"{source} cannot be read ({error})") from error
        else:
            return None
        limits.take_file(len(data))
        return data

    def _read_url(self, url: str, limits: PromptLimits) -> bytes:
        scheme = url[:5].lower()
        if scheme == "data:":
            return decode_data_url(url)
        if scheme == "file:":
            return read_local(url, self._config.local_path)
        return self._fetcher.fetch(url, limits.file_bytes)

    def _image(self, source: Any) -> Image:
        most = self._config.max_image_pixels
        if isinstance(source, bytes):
            return decode_image(source, most)
        # Neither is imported here: without them there is no such object.
        pillow, numpy = sys.modules.get("PIL.Image"), sys.modules.get("numpy")
        if pillow is not None and isinstance(source, pillow.Image):
            return normalise_image(source, most)
        if numpy is not None and isinstance(source, numpy.ndarray):
            return image_of_array(source, most)
        raise refused(
            f"it has type {type(source).__name__}; give an image of pillow's, pixels as a numpy"
            f" array, a file's bytes or pathlib.Path, or a URL"
        )

    def _process(
        self, image: Image, content_hash: str, options: Mapping[str, Any], limits: PromptLimits
    ) -> PreparedImage:
        limits.check_image(self._processor.num_tokens(image.width, image.height, options))
        processed = self._processor.process(image, options)
        num_embeds = sum(count for _, count in processed.embed_spans)
        if self._max_embeds is not None and num_embeds > self._max_embeds:
            raise refused(
                f"the image has {num_embeds} embeddings, more than are kept at a time"
                f" (encoder_cache_size={self._max_embeds}); send a smaller one, have it scaled down"
                f" (mm_processor_kwargs), or start the engine with more"
            )
        return PreparedImage(
            content_hash,
            _as_tensors(processed),
            processed.token_ids,
            processed.embed_spans,
        )


class _Kept:
    """What was prepared last, within a number of bytes, by content; and the files it came from."""

    def __init__(self, max_bytes: int) -> None:
        self.lock = threading.Lock()
        self._bytes_left = max_bytes
        self._images: OrderedDict[str, PreparedImage] = OrderedDict()
        self._files: OrderedDict[str, str] = OrderedDict()

    def by_file(self, file: str) -> PreparedImage | None:
        """The image that a file held, by the file's digest."""
        content_hash = self._files.get(file)
        return None if content_hash is None else self.get(content_hash)

    def get(self, content_hash: str) -> PreparedImage | None:
        with self.lock:
            found = self._images.get(content_hash)
            if found is not None:
                self._images.move_to_end(content_hash)
            return found

    def put(self, image: PreparedImage, file: str | None) -> None:
        with self.lock:
            if image.content_hash not in self._images:
                self._images[image.content_hash] = image
                self._bytes_left -= image.num_bytes
                while self._bytes_left < 0:
                    _, oldest = self._images.popitem(last=False)
                    self._bytes_left += oldest.num_bytes
            if file is not None:
                self._files[file] = image.content_hash
                if len(self._files) > _MAX_FILES:
                    self._files.popitem(last=False)


@contextmanager
def _blamed_on(where: str) -> Iterator[None]:
    """Errors about an image say which one it is; those about options name them already."""
    try:
        yield
    except InvalidRequestError as error:
        if error.parameter == "mm_processor_kwargs":
            raise
        raise type(error)(f"{where}: {error}", parameter=where) from error


def _as_tensors(processed: ProcessedImage) -> dict[str, TensorData]:
    return {
        name: TensorData(str(array.dtype), array.shape, array.tobytes())
        for name, array in processed.inputs.items()
    }
