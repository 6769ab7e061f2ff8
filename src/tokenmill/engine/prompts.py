"""The forms in which a prompt may come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

from tokenmill.errors import InvalidRequestError, did_you_mean, shown


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]
    """What its marks stand for: {"image": one or a list}. An image is one of pillow's, pixels as a
    numpy array, the bytes or the path of a file, or a URL; see docs/images.md."""
    mm_processor_kwargs: NotRequired[dict[str, Any]]
    """Options of the model's image processor, over the engine's."""


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    """The text that the ids came from, shown in the output."""
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]
    """As of a text; the ids hold one mark for each image."""
    mm_processor_kwargs: NotRequired[dict[str, Any]]


Prompt = str | list[int] | TextPrompt | TokensPrompt

_LONG_TEXT = 4096
"""Characters from which on a text tokenizing would hold up an event loop."""
_LONG_PROMPT = 16_384
"""Ids from which on checking does."""
_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "multi_modal_data", "mm_processor_kwargs")
_MODALITIES = ("image",)


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """Any of the forms, taken apart. Either text or ids are there."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None = None
    images: Sequence[Any] = ()
    processor_options: Any = None
    """Of the image processor; not looked at yet."""


def parse_prompt(prompt: Any) -> ParsedPrompt:
    """Take a prompt apart. Raises `InvalidRequestError` for anything but the forms above."""
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, None)
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt)
    if isinstance(prompt, list | tuple):
        return ParsedPrompt(None, list(prompt))
    raise InvalidRequestError(
        f"prompt has type {type(prompt).__name__}; it must be a string, a list of token ids (of an"
        f" array or a tensor: .tolist()), or a dict with `prompt` or `prompt_token_ids`.",
        parameter="prompt",
    )


def _parse_mapping(prompt: Mapping[str, Any]) -> ParsedPrompt:
    for key in prompt:
        if key not in _KEYS:
            raise InvalidRequestError(
                f"prompt has an unknown key {key!r}.{did_you_mean(str(key), _KEYS)}"
                f" It takes: {', '.join(_KEYS)}.",
                parameter="prompt",
            )
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise InvalidRequestError(
            f"prompt['prompt'] has type {type(text).__name__}; it must be a string."
            " Give token ids as `prompt_token_ids`.",
            parameter="prompt",
        )
    if token_ids is not None and not isinstance(token_ids, list | tuple):
        raise InvalidRequestError(
            f"prompt_token_ids has type {type(token_ids).__name__}; it must be a list of integers"
            f" (of an array or a tensor: .tolist()).",
            parameter="prompt_token_ids",
        )
    if text is None and token_ids is None:
        raise InvalidRequestError(
            "prompt has neither `prompt` nor `prompt_token_ids`.", parameter="prompt"
        )
    salt = prompt.get("cache_salt")
    if salt is not None and not _is_salt(salt):
        raise InvalidRequestError(
            f"cache_salt={shown(salt)} must be a non-empty string of valid Unicode; leave it out to"
            f" share the cache.",
            parameter="cache_salt",
        )
    return ParsedPrompt(
        text,
        None if token_ids is None else list(token_ids),
        salt,
        _images(prompt.get("multi_modal_data")),
        prompt.get("mm_processor_kwargs"),
    )


def _images(data: Any) -> Sequence[Any]:
    if data is None:
        return ()
    if not isinstance(data, Mapping):
        raise InvalidRequestError(
            f"multi_modal_data has type {type(data).__name__}; it must be a dict such as"
            f" {{'image': image}}.",
            parameter="multi_modal_data",
        )
    for name in data:
        if name not in _MODALITIES:
            raise InvalidRequestError(
                f"multi_modal_data has an unknown kind {shown(name)}."
                f"{did_you_mean(str(name), _MODALITIES)} It takes: {', '.join(_MODALITIES)}.",
                parameter="multi_modal_data",
            )
    images = data.get("image")
    if images is None:
        return ()
    return images if isinstance(images, list | tuple) else [images]


def with_salt(prompt: Prompt, cache_salt: str | None) -> Prompt:
    """The prompt with this salt, if there is one."""
    if cache_salt is None:
        return prompt
    if isinstance(prompt, str):
        return {"prompt": prompt, "cache_salt": cache_salt}
    if isinstance(prompt, Mapping):
        return {**prompt, "cache_salt": cache_salt}  # type: ignore[return-value,misc,unused-ignore]
    return {"prompt_token_ids": prompt, "cache_salt": cache_salt}


def is_long(prompt: Any) -> bool:
    """Whether processing this prompt, whatever its form, would hold up an event loop."""
    if isinstance(prompt, Mapping):
        if prompt.get("multi_modal_data"):
            return True
        ids = prompt.get("prompt_token_ids")
        return is_long(prompt.get("prompt") if ids is None else ids)
    if isinstance(prompt, str):
        return len(prompt) > _LONG_TEXT
    return isinstance(prompt, list | tuple) and len(prompt) > _LONG_PROMPT


def _is_salt(salt: object) -> bool:
    """Whether it has bytes for the block hashes; lone surrogates have none."""
    if not isinstance(salt, str):
        return False
    try:
        return bool(salt.encode())
    except UnicodeEncodeError:
        return False
