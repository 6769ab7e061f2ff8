"""Which LoRA adapter a request runs with."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tokenmill.errors import InvalidRequestError, shown

_MAX_NAME = 256


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter in PEFT's format: `LoRARequest("sql", "/adapters/sql")`.

    The name is what errors and outputs call it. Files that have changed since the last request are
    read again; results and cached prefixes go by the content, never by the name. Raises
    `InvalidRequestError` for a name or path that cannot be one.
    """

    name: str
    path: str
    """The directory with adapter_config.json and adapter_model.safetensors."""

    def __post_init__(self) -> None:
        check_adapter_name(self.name)
        path: object = self.path
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise InvalidRequestError(
                f"lora_request.path={shown(path)} must be the path of a directory.",
                parameter="lora_request",
            )
        object.__setattr__(self, "path", os.fspath(path))


def check_adapter_name(name: object, parameter: str = "lora_request") -> None:
    """Raise `InvalidRequestError` for what cannot be a name."""
    if not isinstance(name, str) or not name.strip() or len(name) > _MAX_NAME:
        raise InvalidRequestError(
            f"{parameter}: the adapter's name is {shown(name)}; it must be a text of 1 to"
            f" {_MAX_NAME} characters.",
            parameter=parameter,
        )
