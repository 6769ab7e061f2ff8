"""Settings of what prompts may hold besides text."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill.config.argument_types import at_least
from tokenmill.config.engine_args import EngineArgs
from tokenmill.errors import ConfigError, did_you_mean, shown

MODALITIES = ("image",)
MAX_IMAGES = 16
"""Of one prompt, unless somebody sets another number."""
MAX_IMAGE_PIXELS = 1 << 27
"""Pillow itself takes somewhat more."""
_DOMAIN = re.compile(r"(\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*)(:\d{1,5})?")


@dataclass(frozen=True, slots=True)
class MultiModalConfig:
    """What may come with a prompt, and from where."""

    max_images: int = MAX_IMAGES
    """Of one prompt; 0 takes none."""
    processor_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the model's image processor; a request's own come over them."""
    cache_bytes: int = 1 << 28
    """Processed images that are kept."""
    max_image_pixels: int = 1 << 25
    local_path: str | None = None
    """Directory below which `file:` URLs may name files, links resolved; None allows none."""
    domains: tuple[str, ...] = ()
    """Hosts that http(s) URLs may name, as `EngineArgs.allowed_media_domains` has them."""


def resolve_multimodal(args: EngineArgs) -> MultiModalConfig:
    """Raises `ConfigError` that names the setting."""
    gigabytes = args.mm_processor_cache_gb
    if not (math.isfinite(gigabytes) and gigabytes >= 0):
        raise ConfigError(f"mm_processor_cache_gb={shown(gigabytes)} must be 0 or more.")
    pixels = at_least("max_image_pixels", args.max_image_pixels, 1)
    if pixels > MAX_IMAGE_PIXELS:
        raise ConfigError(f"max_image_pixels={pixels} must be at most {MAX_IMAGE_PIXELS}.")
    return MultiModalConfig(
        max_images=_max_images(args.limit_mm_per_prompt),
        processor_options=args.mm_processor_kwargs,
        cache_bytes=int(gigabytes * 2**30),
        max_image_pixels=pixels,
        local_path=_local_path(args.allowed_local_media_path),
        domains=_domains(args.allowed_media_domains),
    )


def _max_images(limits: Mapping[str, Any]) -> int:
    for name, limit in limits.items():
        if name not in MODALITIES:
            raise ConfigError(
                f"limit_mm_per_prompt has an unknown kind {shown(name)}."
                f"{did_you_mean(str(name), MODALITIES)} It takes: {', '.join(MODALITIES)}."
            )
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise ConfigError(
                f"limit_mm_per_prompt: {name}={shown(limit)} must be an integer of 0 or more."
            )
    return int(limits.get("image", MAX_IMAGES))


def _local_path(given: str | None) -> str | None:
    if given is None:
        return None
    path = os.path.realpath(os.path.expanduser(given))
    if not os.path.isdir(path):
        raise ConfigError(
            f"allowed_local_media_path={shown(given)} is no directory; give one whose files every"
            f" client may have read."
        )
    return path


def _domains(given: Sequence[object] | None) -> tuple[str, ...]:
    domains = []
    for each in given or ():
        domain = each.strip().lower() if isinstance(each, str) else ""
        if not _DOMAIN.fullmatch(domain):
            raise ConfigError(
                f"allowed_media_domains holds {shown(each)}; it takes hosts such as"
                f" images.example.org, *.example.org for those below it, example.org:8443 with a"
                f" port, or * for every public host."
            )
        domains.append(domain)
    return tuple(domains)
