"""Response bodies. Fields that OpenAI's clients expect are always there, null if need be; those
that only this server and vLLM have are left out unless they were asked for.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType


class PromptTokensDetails(Struct):
    cached_tokens: int
    """Prompt tokens that came from the prefix cache."""


class CompletionTokensDetails(Struct):
    reasoning_tokens: int
    """Tokens between the marks of the reasoning."""


class Usage(Struct, kw_only=True):
    """Token counts; a prompt counts once, whatever its `n`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class Timings(Struct, kw_only=True):
    """Where a request's time went, under llama.cpp's names; milliseconds and tokens a second."""

    queued_ms: float | None
    """From arrival until the first step."""
    prompt_n: int
    prompt_ms: float | None
    """From the first step to the first token."""
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float | None
    """From the first token to the last."""
    predicted_per_second: float | None
    """Of the tokens after the first."""
    cache_n: int | None
    """Prompt tokens from the prefix cache; null unless the server tells them."""


class CompletionLogprobs(Struct, kw_only=True):
    """Parallel arrays, one entry a token."""

    text_offset: list[int]
    """Where each token begins in the choice's text, in characters."""
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class CompletionChoice(Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    """The stop string or id that ended it."""
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET


class CompletionReply(Struct, kw_only=True):
    """Answer of POST /v1/completions."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None
    timings: Timings | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET
    """For the request that goes on with the prompt's KV."""


class TopLogprob(Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None


class FunctionCall(Struct, kw_only=True):
    name: str
    arguments: str
    """JSON, as the model wrote it."""


class CustomCall(Struct, kw_only=True):
    name: str
    input: str
    """Any text."""


class ToolCall(Struct, kw_only=True):
    """A call of a function, or of a custom tool."""

    id: str
    type: str = "function"
    function: FunctionCall | UnsetType = UNSET
    custom: CustomCall | UnsetType = UNSET


class ChatMessage(Struct, kw_only=True):
    role: str
    content: str | None
    """Null where there is only reasoning, or calls."""
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """The same, by its other name."""
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatReply(Struct, kw_only=True):
    """Answer of POST /v1/chat/completions."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class Model(Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "tokenmill"
    root: str
    """The model behind the name; of an adapter, its directory."""
    parent: str | None = None
    """Of an adapter, the model that it changes."""
    max_model_len: int


class ModelList(Struct, kw_only=True):
    object: str = "list"
    data: list[Model]


class TokenizeReply(Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeReply(Struct, kw_only=True):
    prompt: str


class ErrorDetail(Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    """Path of the field at fault."""
    code: str | None


class ErrorReply(Struct, kw_only=True):
    """Whatever goes wrong."""

    error: ErrorDetail
