"""A request of Anthropic's Messages as a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenmill.entrypoints.http.answer_settings import AnswerSettings
from tokenmill.entrypoints.http.messages.protocol import CountTokensRequest, MessagesRequest
from tokenmill.entrypoints.http.messages.turns import ChatTurns
from tokenmill.entrypoints.http.prompts import check_num_values
from tokenmill.entrypoints.http.protocol import ChatCompletionRequest
from tokenmill.entrypoints.http.renames import Renames, rules
from tokenmill.errors import InvalidRequestError, invalid, shown

_RULES = rules(
    {
        "tools[i].function.parameters": "tools[i].input_schema",
        "tools[i].function": "tools[i]",
        "response_format.json_schema.schema": "output_config.format.schema",
        "response_format": "output_config.format",
        "thinking_token_budget": "thinking.budget_tokens",
        "reasoning_effort": "output_config.effort",
        "stop": "stop_sequences",
    }
)
_PHRASES = {", or set truncate_prompt_tokens": ""}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING = ("enabled", "adaptive", "between_tools", "disabled")


def chat_of(
    request: CountTokensRequest, settings: AnswerSettings
) -> tuple[ChatCompletionRequest, Renames]:
    """The chat that a request amounts to, and how its errors read in the request's words.

    Raises `InvalidRequestError` that names the request's field.
    """
    check_num_values(
        {"system": request.system, "messages": request.messages, "tools": request.tools}
    )
    turns = ChatTurns()
    turns.system(request.system)
    turns.turns(request.messages)
    chat = ChatCompletionRequest(model=request.model, messages=turns.messages)
    chat.tools = _tools(request.tools)
    _set_choice(chat, request.tool_choice)
    _set_thinking(chat, request, settings)
    _set_output(chat, request)
    _continue_answer(chat, len(request.messages))
    if isinstance(request, MessagesRequest):
        _set_sampling(chat, request)
    return chat, Renames(_RULES, turns.places, _PHRASES)


def _tools(given: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    if given is None:
        return None
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(given)]


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise invalid(
            f"{where}.type",
            f"is {shown(kind)}; this server runs no tools itself and knows none by their type:"
            f" describe the tool with a name and an input_schema",
        )
    if not isinstance(tool.get("input_schema"), dict):
        raise invalid(f"{where}.input_schema", "must be an object, a JSON schema")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    for name in ("description", "strict"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    return {"type": "function", "function": function}


def _set_choice(chat: ChatCompletionRequest, choice: dict[str, Any] | None) -> None:
    if choice is None:
        return
    kind = choice.get("type")
    if kind == "tool":
        chat.tool_choice = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(kind, str) and kind in _CHOICES:
        chat.tool_choice = _CHOICES[kind]
    else:
        raise invalid("tool_choice.type", f"is {shown(kind)}; it must be auto, any, tool or none")
    alone = choice.get("disable_parallel_tool_use")
    if alone is not None and not isinstance(alone, bool):
        raise invalid("tool_choice.disable_parallel_tool_use", "must be true or false")
    chat.parallel_tool_calls = not alone


def _set_thinking(
    chat: ChatCompletionRequest, request: CountTokensRequest, settings: AnswerSettings
) -> None:
    """Whether to reason, under the names that templates have for it, and for how long. A model that
    marks no reasoning has nothing to bound.
    """
    variables: dict[str, Any] = {}
    thinking = request.thinking
    if thinking is not None:
        kind = thinking.get("type")
        if kind not in _THINKING:
            raise invalid("thinking.type", f"is {shown(kind)}; it must be {', '.join(_THINKING)}")
        wanted = kind != "disabled"
        variables = {"enable_thinking": wanted, "thinking": wanted}
        if kind == "enabled":
            budget = thinking.get("budget_tokens")
            if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
                raise invalid("thinking.budget_tokens", "must be an integer of at least 1")
            if settings.reasoning_parser is not None:
                chat.thinking_token_budget = budget
        if thinking.get("display") == "omitted":
            chat.include_reasoning = False
    variables |= request.chat_template_kwargs or {}
    chat.chat_template_kwargs = variables or None


def _set_output(chat: ChatCompletionRequest, request: CountTokensRequest) -> None:
    """The form of the answer, and the effort."""
    config: Mapping[str, Any] = request.output_config or {}
    effort = config.get("effort")
    if effort is not None and not isinstance(effort, str):
        raise invalid("output_config.effort", "must be a string")
    chat.reasoning_effort = effort
    name = "output_config.format" if config.get("format") is not None else "output_format"
    form = config.get("format") or request.output_format
    if form is None:
        return
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise invalid(name, "must be an object of type json_schema with a schema")
    schema = {"name": "answer", "schema": form.get("schema")}
    chat.response_format = {"type": "json_schema", "json_schema": schema}


def _continue_answer(chat: ChatCompletionRequest, num_messages: int) -> None:
    """An assistant's turn at the end is the beginning of the answer."""
    last = chat.messages[-1]
    if last["role"] != "assistant":
        return
    if "tool_calls" in last:
        raise invalid(
            f"messages[{num_messages - 1}]",
            "calls tools, and their results are missing; send them as tool_result blocks in a"
            " user's message",
        )
    chat.continue_final_message = True


def _set_sampling(chat: ChatCompletionRequest, request: MessagesRequest) -> None:
    if request.mcp_servers:
        raise invalid("mcp_servers", "is not supported by this server; leave it out")
    if request.max_tokens < 0:
        raise InvalidRequestError(
            f"max_tokens={request.max_tokens} must be at least 0.", parameter="max_tokens"
        )
    # What reads a prompt into the cache is the generation of a token that nobody gets to see.
    chat.max_tokens = max(1, request.max_tokens)
    chat.stop = request.stop_sequences
    for name in ("temperature", "top_p", "top_k", "stream", "seed", "priority", "cache_salt"):
        setattr(chat, name, getattr(request, name))
    chat.timeout = request.timeout
