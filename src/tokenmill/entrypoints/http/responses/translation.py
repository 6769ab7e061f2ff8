"""A request of the Responses protocol as a chat."""

from __future__ import annotations

from typing import Any

from tokenmill.entrypoints.http.prompts import check_num_values
from tokenmill.entrypoints.http.protocol import ChatCompletionRequest
from tokenmill.entrypoints.http.renames import Renames, rules
from tokenmill.entrypoints.http.responses.items import ChatItems, Item
from tokenmill.entrypoints.http.responses.protocol import InputTokensRequest, ResponsesRequest
from tokenmill.entrypoints.http.responses.tools import ChatTools, chat_choice
from tokenmill.errors import invalid, shown

LOGPROBS = "message.output_text.logprobs"
"""In `include`: log-probabilities are wanted."""
TRUNCATIONS = (None, "auto", "disabled")
_MAX_METADATA = 16
_LONGEST_KEY, _LONGEST_VALUE = 64, 512
_RULES = rules(
    {
        "tool_choice.allowed_tools": "tool_choice",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "max_completion_tokens": "max_output_tokens",
        "truncate_prompt_tokens": "truncation",
        "messages": "input",
    }
)
_PHRASES = {"set truncate_prompt_tokens": "set truncation to 'auto'"}


def chat_of(
    request: InputTokensRequest, items: list[Item], history: list[Item]
) -> tuple[ChatCompletionRequest, Renames]:
    """The chat that a request amounts to, and how its errors read in the request's words.

    `items` are its own, `history` those of earlier responses. Raises `InvalidRequestError` that
    names the request's field.
    """
    check_num_values({"input": items, "previous_response_id": history, "tools": request.tools})
    if request.truncation not in TRUNCATIONS:
        raise invalid("truncation", f"is {shown(request.truncation)}; it must be auto or disabled")
    if not items and not history:
        raise invalid("input", "is empty; it needs at least one item")
    chat_items = ChatItems()
    chat_items.instructions(request.instructions)
    chat_items.history(history)
    chat_items.input(items)
    chat = ChatCompletionRequest(model=request.model, messages=chat_items.messages)
    tools = ChatTools(request.tools or [])
    chat.tools = tools.tools or None
    chat.tool_choice = chat_choice(request.tool_choice, request.tools or [])
    chat.parallel_tool_calls = request.parallel_tool_calls
    _set_form(chat, request.text or {})
    _set_effort(chat, request)
    if isinstance(request, ResponsesRequest):
        _set_sampling(chat, request)
    return chat, Renames(_RULES, {**chat_items.places, **tools.places}, _PHRASES)


def _set_form(chat: ChatCompletionRequest, text: dict[str, Any]) -> None:
    form = text.get("format")
    if form is None:
        return
    if not isinstance(form, dict):
        raise invalid("text.format", "must be an object with a type")
    if form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": form}
    chat.response_format = form


def _set_effort(chat: ChatCompletionRequest, request: InputTokensRequest) -> None:
    effort = (request.reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise invalid("reasoning.effort", "must be a string")
    variables: dict[str, Any] = {}
    if effort == "none":
        variables = {"enable_thinking": False, "thinking": False}
    else:
        chat.reasoning_effort = effort
    chat.chat_template_kwargs = {**variables, **(request.chat_template_kwargs or {})} or None


def _set_sampling(chat: ChatCompletionRequest, request: ResponsesRequest) -> None:
    for name in ("conversation", "prompt"):
        if getattr(request, name) is not None:
            raise invalid(name, "is not supported by this server; leave it out")
    _check_metadata(request.metadata or {})
    chat.max_completion_tokens = request.max_output_tokens
    for name in (
        "temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "stream", "seed",
        "priority", "cache_salt", "timeout",
    ):  # fmt: skip
        setattr(chat, name, getattr(request, name))
    if request.top_logprobs or LOGPROBS in (request.include or ()):
        chat.logprobs, chat.top_logprobs = True, request.top_logprobs or 0
    elif request.top_logprobs is not None and request.top_logprobs < 0:
        raise invalid("top_logprobs", "must be at least 0")


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > _MAX_METADATA:
        raise invalid("metadata", f"has {len(metadata)} entries; the limit is {_MAX_METADATA}")
    for key, value in metadata.items():
        if len(key) > _LONGEST_KEY or len(value) > _LONGEST_VALUE:
            raise invalid(
                "metadata",
                f"has an entry that is too long; keys have up to {_LONGEST_KEY} characters, values"
                f" up to {_LONGEST_VALUE}",
            )
