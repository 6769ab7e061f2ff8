"""Bodies of the requests that load and unload adapters."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class LoadAdapterRequest(Struct, kw_only=True):
    """Body of POST /v1/load_lora_adapter."""

    lora_name: Annotated[str, Meta(description="Requests choose the adapter by it, as `model`.")]
    lora_path: Annotated[str, Meta(description="A directory below the operator's lora_root.")]
    load_inplace: Annotated[
        bool | None, Meta(description="Replace an adapter of this name; else it is refused.")
    ] = None


class UnloadAdapterRequest(Struct, kw_only=True):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: str


ADAPTER_STRUCTS = [LoadAdapterRequest, UnloadAdapterRequest]
