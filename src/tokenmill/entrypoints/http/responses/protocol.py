"""Bodies of the Responses endpoints.

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
from tokenmill.sampling_params import MAX_PENALTY, MAX_TEMPERATURE

_INPUT: dict[str, Any] = {"anyOf": [
    {"type": "string"},
    {"type": "array", "items": {"type": "object"}},
    {"type": "null"},
]}  # fmt: skip
_TOOLS: dict[str, Any] = {
    "maxItems": 1024,
    "items": {
        "type": "object",
        "properties": {
            "type": {"enum": ["function", "custom", "namespace"]},
            "name": {"type": "string", "pattern": "^[A-Za-z0-9_.:/-]{1,256}$"},
            "description": {"type": ["string", "null"]},
        },
        "required": ["type", "name"],
    },
}
_PENALTY = {"minimum": -MAX_PENALTY, "maximum": MAX_PENALTY}


class InputTokensRequest(Struct, kw_only=True):
    """Body of POST /v1/responses/input_tokens."""

    model: ModelName = None
    input: Annotated[
        str | list[dict[str, Any]] | None,
        meta("A text, or items: messages, calls and their outputs, reasoning.", **_INPUT),
    ] = None
    instructions: Annotated[
        str | None, meta("What comes before everything; of this request only.")
    ] = None
    previous_response_id: Annotated[
        str | None, meta("A response that was kept; its items come before the input.")
    ] = None
    tools: Annotated[list[dict[str, Any]] | None, meta("Functions and custom tools.", **_TOOLS)] = (
        None
    )
    tool_choice: Annotated[
        Any, meta("none, auto, required, or an object that names a tool or allows some.")
    ] = None
    parallel_tool_calls: Annotated[bool | None, meta("False: at most one call.")] = None
    text: Annotated[dict[str, Any] | None, meta("`format`: text, json_object, or json_schema.")] = (
        None
    )
    reasoning: Annotated[dict[str, Any] | None, meta("`effort`, for the template.")] = None
    truncation: Annotated[
        str | None,
        meta(
            "auto leaves out the oldest items of an input that is too long.",
            enum=["auto", "disabled", None],
        ),
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, meta("Further variables for the template.")
    ] = None


class ResponsesRequest(InputTokensRequest, kw_only=True):
    """Body of POST /v1/responses."""

    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    store: Annotated[bool | None, meta("Keep the response; true unless given.")] = None
    background: Annotated[
        bool | None, meta("Answer at once, and compute meanwhile; ask again for the result.")
    ] = None
    max_output_tokens: Annotated[
        int | None, meta("Most tokens to generate; up to the context unless given.", minimum=1)
    ] = None
    max_tool_calls: Annotated[int | None, meta("Of tools that the server runs: none.")] = None
    temperature: Annotated[
        float | None,
        meta("0 always takes the best token.", minimum=0, maximum=MAX_TEMPERATURE),
    ] = None
    top_p: Annotated[float | None, meta("In (0, 1].", exclusiveMinimum=0, maximum=1)] = None
    top_k: Annotated[int | None, meta("Best tokens to keep; 0 or -1 is off.", minimum=-1)] = None
    presence_penalty: Annotated[
        float | None, meta("Taken from tokens that the answer has.", **_PENALTY)
    ] = None
    frequency_penalty: Annotated[
        float | None, meta("The same, each time that it has them.", **_PENALTY)
    ] = None
    top_logprobs: Annotated[
        int | None, meta("Log-probabilities, of so many best tokens per position.", minimum=0)
    ] = None
    include: Annotated[
        list[str] | None, meta("message.output_text.logprobs; others have no effect.")
    ] = None
    metadata: Annotated[
        dict[str, str] | None,
        meta(
            "Up to 16 texts of the client's own, given back.",
            type=["object", "null"],
            additionalProperties={"type": "string", "maxLength": 512},
            maxProperties=16,
        ),
    ] = None
    user: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    conversation: Annotated[Any, meta("Not supported.", enum=[None])] = None
    prompt: Annotated[Any, meta("Not supported.", enum=[None])] = None
    seed: Seed = None
    priority: Priority = None
    cache_salt: CacheSalt = None
    timeout: Timeout = None


class InputTokensDetails(Struct, kw_only=True):
    cached_tokens: int
    """From the prefix cache; 0 unless the server tells."""
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseReply(Struct, kw_only=True):
    """Answer of POST /v1/responses, and what is kept of it."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str = "in_progress"
    """in_progress, completed, incomplete, failed or cancelled."""
    background: bool = False
    error: dict[str, Any] | None = None
    """`code` and `message`."""
    incomplete_details: dict[str, Any] | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]] = []
    """Items of type message, reasoning, function_call and custom_tool_call."""
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None


class InputTokensReply(Struct, kw_only=True):
    """Answer of POST /v1/responses/input_tokens."""

    object: str = "response.input_tokens"
    input_tokens: int


class InputItemsReply(Struct, kw_only=True):
    """Answer of GET /v1/responses/{id}/input_items."""

    object: str = "list"
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


class DeletedReply(Struct, kw_only=True):
    """Answer of DELETE /v1/responses/{id}."""

    id: str
    object: str = "response"
    deleted: bool = True


RESPONSES_STRUCTS: list[type[Struct]] = [
    ResponsesRequest,
    InputTokensRequest,
    ResponseReply,
    InputTokensReply,
    InputItemsReply,
    DeletedReply,
]
