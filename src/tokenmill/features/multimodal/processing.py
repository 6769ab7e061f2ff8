"""What a family does to an image before its encoder sees it, and which families there are."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from tokenmill.errors import InvalidRequestError, did_you_mean, shown

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image


IMAGE_PROCESSORS: dict[str, str] = {
    "LlavaForConditionalGeneration": "llava:llava_image_processor",
    "LlavaNextForConditionalGeneration": "anyres:AnyresImageProcessor",
    "LlavaOnevisionForConditionalGeneration": "anyres:AnyresImageProcessor",
    "Idefics3ForConditionalGeneration": "idefics3:Idefics3ImageProcessor",
    "SmolVLMForConditionalGeneration": "idefics3:Idefics3ImageProcessor",
    "InternVLForConditionalGeneration": "internvl:InternVLImageProcessor",
    "Mistral3ForConditionalGeneration": "pixtral:PixtralImageProcessor",
    "Qwen2VLForConditionalGeneration": "qwen2_vl:Qwen2VLImageProcessor",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_vl:Qwen2VLImageProcessor",
    "Qwen3VLForConditionalGeneration": "qwen2_vl:Qwen2VLImageProcessor",
    "Qwen3VLMoeForConditionalGeneration": "qwen2_vl:Qwen2VLImageProcessor",
    "Gemma3ForConditionalGeneration": "gemma3:Gemma3ImageProcessor",
}
"""Architecture, as a config.json names it -> module of `processors`, and what makes one there."""


@dataclass(frozen=True, slots=True)
class ProcessorFiles:
    """What a model's files say about its images."""

    hf_config: Mapping[str, Any]
    """Of config.json."""
    preprocessor_config: Mapping[str, Any]
    """Of preprocessor_config.json, or what processor_config.json has in its place under
    `image_processor`; empty if there is neither."""
    processor_config: Mapping[str, Any]
    """Of processor_config.json; empty if there is none."""
    token_id: Callable[[str], int | None]
    """Id of a token as the vocabulary spells it."""
    encode: Callable[[str], list[int]]
    """Ids of a text, with nothing put around it."""


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """An image as the model takes it."""

    inputs: dict[str, np.ndarray]
    """What the encoder takes, under names of the family's own. Contiguous."""
    token_ids: list[int]
    """What stands in the prompt in place of the image's mark."""
    embed_spans: list[tuple[int, int]]
    """(start, count) within `token_ids` of what is given the encoder's embeddings, in order; other
    tokens keep their own."""

    @property
    def num_bytes(self) -> int:
        """Memory of the inputs."""
        return sum(array.nbytes for array in self.inputs.values())


class ImageProcessor(Protocol):
    """A family's way from pixels to its encoder's inputs. Used by several threads at once."""

    @property
    def mark_token(self) -> str:
        """The one token that stands for an image in a prompt, as the vocabulary spells it; chat
        templates of the family write it, once for an image.
        """
        ...

    @property
    def mark_token_id(self) -> int: ...

    @property
    def mark_text(self) -> str:
        """What a chat template that knows no images is given for one within a message's text. It
        holds the mark token once.
        """
        ...

    def num_tokens(self, width: int, height: int, options: Mapping[str, Any]) -> int:
        """Length of `ProcessedImage.token_ids` for an image of so many pixels, by arithmetic.

        Raises as `process` does.
        """
        ...

    def process(self, image: Image, options: Mapping[str, Any]) -> ProcessedImage:
        """The inputs for one image.

        `image` has mode RGB, stands upright, and has at least one pixel. `options` are a request's
        `mm_processor_kwargs`; `refuse_unknown_options` is for those that the family does not know.

        Raises `InvalidRequestError` for an image or an option that cannot be taken.
        """
        ...


@runtime_checkable
class SurroundsMarks(Protocol):
    """An `ImageProcessor` of a family in whose texts something stands around each image."""

    @property
    def text_around_mark(self) -> tuple[str, str]:
        """In front of it and behind; it is tokenized with the text that it stands in."""
        ...


def takes_images(architecture: str) -> bool:
    """Whether models of this architecture take images."""
    return architecture in IMAGE_PROCESSORS


def make_image_processor(architecture: str, files: ProcessorFiles) -> ImageProcessor:
    """The processor of an architecture that `takes_images`, imported now.

    Raises `ConfigError` for files that lack what the family needs.
    """
    module, _, name = IMAGE_PROCESSORS[architecture].partition(":")
    package = "tokenmill.features.multimodal.processors"
    make: Callable[[ProcessorFiles], ImageProcessor] = getattr(
        importlib.import_module(f"{package}.{module}"), name
    )
    return make(files)


def refuse_unknown_options(options: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise `InvalidRequestError` for the first option that is not `known`."""
    for name in options:
        if name not in known:
            takes = f"It takes: {', '.join(known)}." if known else "This model takes none."
            raise InvalidRequestError(
                f"mm_processor_kwargs has an unknown option {shown(name)}."
                f"{did_you_mean(str(name), known)} {takes}",
                parameter="mm_processor_kwargs",
            )
