"""Contents of messages: text and images, as a template takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tokenmill.entrypoints.chat.content_forms import content_forms
from tokenmill.entrypoints.chat.marks import Marks
from tokenmill.entrypoints.chat.templates import ChatTemplate
from tokenmill.errors import invalid

if TYPE_CHECKING:
    from tokenmill.features.multimodal.images import ImagePart

_TEXT_PARTS = ("text", "input_text", "output_text")
_IMAGE_PARTS = {
    "image_url": ("image_url",),
    "input_image": ("image_url",),
    "image": ("image", "url", "image_url"),
    "image_pil": ("image_pil",),
}
"""Type of a part -> the fields that may hold the image."""
_DETAILS = ("auto", "low", "high")
"""What OpenAI's clients may ask for; sizes follow from the model's processor alone."""


class Contents:
    """Reads the contents of one conversation."""

    def __init__(self, template: ChatTemplate, marks: Marks | None) -> None:
        """`marks` is None for a model that takes no images."""
        self.images: list[ImagePart] = []
        """Those read so far."""
        self._marks = marks
        forms = content_forms(template.source)
        self._takes_text, self._takes_parts = forms.takes_text, forms.takes_parts

    def read(self, content: Any, where: str) -> str | list[dict[str, str]]:
        """A content in the form that the template takes.

        Text alone is one string, where the template takes strings: parts of text are joined by line
        breaks; null, missing and empty are `""`. Raises `InvalidRequestError`.
        """
        parts = self._parts(content, where)
        has_images = any(part is None for part in parts)
        if self._takes_parts and (has_images or not self._takes_text):
            return [_part_of(part) for part in parts or [""]]
        assert self._marks is not None or not has_images
        texts: list[str] = []  # joined at once: one by one, thousands would take minutes
        after_text = False
        for part in parts:
            if part is None:
                assert self._marks is not None
                texts.append(self._marks.image)
            else:
                texts += ("\n", part) if after_text else (part,)
            after_text = part is not None
        return "".join(texts)

    def _parts(self, content: Any, where: str) -> list[str | None]:
        """Texts, and None for each image."""
        if content is None:
            return []
        if isinstance(content, str):
            return [content]
        if isinstance(content, Mapping) or not isinstance(content, Sequence):
            raise invalid(where, "must be a string or a list of parts")
        return [self._part(part, f"{where}[{i}]") for i, part in enumerate(content)]

    def _part(self, part: Any, where: str) -> str | None:
        if isinstance(part, str):
            return part
        if not isinstance(part, Mapping):
            raise invalid(where, "must be an object with a type")
        kind = part.get("type")
        image_fields = _IMAGE_PARTS.get(kind) if isinstance(kind, str) else None
        if image_fields and self._marks is not None:
            self.images.append(_image(part, image_fields, where))
            self._marks.check_count(len(self.images), "messages")
            return None
        if kind not in _TEXT_PARTS:
            if image_fields:
                raise invalid(f"{where}.type", "says image, but this model takes text only")
            known = "text only" if self._marks is None else "text and image_url"
            raise invalid(
                f"{where}.type", f"is {str(kind)[:40]!r}; this model takes parts of type {known}"
            )
        if not isinstance(part.get("text"), str):
            raise invalid(f"{where}.text", "must be a string")
        return str(part["text"])


def _image(part: Mapping[str, Any], fields: tuple[str, ...], where: str) -> ImagePart:
    from tokenmill.features.multimodal.images import ImagePart

    name = next((each for each in fields if part.get(each) is not None), None)
    if name is None:
        raise invalid(f"{where}.{fields[0]}", "is missing; it holds the image or its URL")
    source, where = part[name], f"{where}.{name}"
    detail = part.get("detail")
    if isinstance(source, Mapping):
        detail = source.get("detail", detail)
        if not isinstance(source.get("url"), str):
            raise invalid(f"{where}.url", "must be a string, the URL of an image")
        source = source["url"]
    if detail is not None and detail not in _DETAILS:
        raise invalid(f"{where}.detail", f"must be one of {', '.join(_DETAILS)}")
    return ImagePart(source, where)


def _part_of(part: str | None) -> dict[str, str]:
    return {"type": "image"} if part is None else {"type": "text", "text": part}
