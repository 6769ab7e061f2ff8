"""Fields that bodies of several protocols have in common, with what is said of them."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta


def meta(text: str, **schema: Any) -> Meta:
    """A field's description, and what its JSON schema has beyond its type."""
    return Meta(description=" ".join(text.split()), extra_json_schema=schema or None)


ModelName = Annotated[str | None, meta("Name of the model, as /v1/models lists it.")]
Seed = Annotated[int | None, meta("The whole of the request's randomness.")]
Priority = Annotated[int | None, meta("Smaller is earlier; needs that policy.")]
CacheSalt = Annotated[
    str | None, meta("Share cached prefixes only with the same salt.", minLength=1)
]
Timeout = Annotated[float | None, meta("Seconds after which the request ends with an error.")]
