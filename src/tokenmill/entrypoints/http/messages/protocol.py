"""Bodies of POST /v1/messages and POST /v1/messages/count_tokens, and of their answers.

As in `http/protocol.py`, a field that is null counts as left out, and one that nobody knows is
ignored.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Struct

from tokenmill.entrypoints.http.field_types import (
    CacheSalt,
    ModelName,
    Priority,
    Seed,
    Timeout,
    meta,
)
from tokenmill.sampling_params import MAX_STOP_LENGTH, MAX_STOP_STRINGS, MAX_TEMPERATURE

_BLOCKS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"type": "string"}},
        "required": ["type"],
    },
}
_MESSAGES: dict[str, Any] = {
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "role": {"type": "string", "enum": ["user", "assistant", "system"]},
            "content": {"anyOf": [{"type": "string"}, _BLOCKS]},
        },
        "required": ["role", "content"],
    },
}
_TOOLS: dict[str, Any] = {
    "maxItems": 1024,
    "items": {
        "type": "object",
        "properties": {
            "type": {"enum": ["custom", None]},
            "name": {"type": "string", "pattern": "^[A-Za-z0-9_.:/-]{1,256}$"},
            "description": {"type": ["string", "null"]},
            "input_schema": {"type": "object"},
            "strict": {"type": ["boolean", "null"]},
        },
        "required": ["name", "input_schema"],
    },
}


class CountTokensRequest(Struct, kw_only=True):
    """Body of POST /v1/messages/count_tokens."""

    model: ModelName = None
    messages: Annotated[list[dict[str, Any]], meta("The conversation.", **_MESSAGES)]
    system: Annotated[
        str | list[dict[str, Any]] | None, meta("What comes first: a text, or blocks of text.")
    ] = None
    tools: Annotated[
        list[dict[str, Any]] | None, meta("Functions that the model may call.", **_TOOLS)
    ] = None
    tool_choice: Annotated[
        dict[str, Any] | None,
        meta("An object of type auto, any, tool (with its name) or none."),
    ] = None
    thinking: Annotated[
        dict[str, Any] | None,
        meta("An object of type enabled (with budget_tokens), adaptive or disabled."),
    ] = None
    output_config: Annotated[
        dict[str, Any] | None, meta("`format`, a JSON schema for the answer, and `effort`.")
    ] = None
    output_format: Annotated[dict[str, Any] | None, meta("Older name of output_config.format.")] = (
        None
    )
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, meta("Further variables for the template.")
    ] = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[
        int,
        meta("Most tokens to generate; 0 reads the prompt into the prefix cache.", minimum=0),
    ]
    stop_sequences: Annotated[
        list[str] | None,
        meta(
            "Strings that end the answer; none of them empty.",
            maxItems=MAX_STOP_STRINGS,
            minLength=1,
            maxLength=MAX_STOP_LENGTH,
        ),
    ] = None
    temperature: Annotated[
        float | None,
        meta("0 always takes the best token.", minimum=0, maximum=MAX_TEMPERATURE),
    ] = None
    top_p: Annotated[float | None, meta("In (0, 1].", exclusiveMinimum=0, maximum=1)] = None
    top_k: Annotated[int | None, meta("Best tokens to keep; 0 or -1 is off.", minimum=-1)] = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    mcp_servers: Annotated[list[Any] | None, meta("Refused unless it is empty.")] = None
    seed: Seed = None
    priority: Priority = None
    cache_salt: CacheSalt = None
    timeout: Timeout = None


class ThinkingDetails(Struct):
    thinking_tokens: int
    """Tokens between the marks of the reasoning."""


class MessageUsage(Struct, kw_only=True):
    """Token counts. The prompt has `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    """Of the prompt, without those that came from the prefix cache, if the server tells these."""
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int
    output_tokens_details: ThinkingDetails | None = None
    service_tier: str = "standard"


class MessageReply(Struct, kw_only=True):
    """Answer of POST /v1/messages."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[dict[str, Any]]
    """Blocks of type text, thinking and tool_use."""
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class CountTokensReply(Struct, kw_only=True):
    """Answer of POST /v1/messages/count_tokens."""

    input_tokens: int


class MessagesErrorDetail(Struct, kw_only=True):
    type: str
    message: str
    details: dict[str, Any]
    """`error_code`, and `param`, the path of the field at fault."""


class MessagesErrorReply(Struct, kw_only=True):
    """Whatever goes wrong on these paths."""

    type: str
    error: MessagesErrorDetail
    request_id: str


MESSAGES_STRUCTS: list[type[Struct]] = [
    MessagesRequest,
    CountTokensRequest,
    MessageReply,
    CountTokensReply,
    MessagesErrorReply,
]
