"""Text, ids and messages as prompts for the engine; what takes time is done in a thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from tokenmill.engine.prompts import Prompt, TokensPrompt
from tokenmill.entrypoints.chat.render import RenderedChat, render_chat
from tokenmill.entrypoints.http.images import prepared_images
from tokenmill.entrypoints.http.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    TokenizeRequest,
)
from tokenmill.entrypoints.http.state import ServerState
from tokenmill.errors import ContextLengthExceededError, InvalidRequestError

MAX_TEMPLATE_VALUES = 100_000
"""Strings, numbers, objects and lists that a chat may hand to its template."""


def completion_prompts(fields: CompletionRequest, max_prompts: int) -> list[str | list[int]]:
    """The prompts of a completion, which may hold one or many.

    Raises `InvalidRequestError` for an empty list, too many, or a mixture that has no meaning.
    """
    return given_prompts(fields.prompt, "prompt", max_prompts, " (max_prompts)")


def given_prompts(
    given: str | list[int | str | list[int]], name: str, max_prompts: int, setting: str = ""
) -> list[str | list[int]]:
    """The prompts in the field `name`. Raises as `completion_prompts` does; `setting` says what the
    limit follows from.
    """
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequestError(f"{name} is empty; give at least one.", parameter=name)
    if isinstance(given[0], int):
        if set(map(type, given)) != {int}:  # there may be millions, and the event loop waits
            raise _mixture(name)
        return [cast(list[int], given)]
    if len(given) > max_prompts:
        raise too_many_prompts(name, len(given), max_prompts, setting)
    prompts = [each for each in given if not isinstance(each, int)]
    if len(prompts) < len(given):
        raise _mixture(name)
    return prompts


def too_many_prompts(
    name: str, count: int, max_prompts: int, setting: str = ""
) -> InvalidRequestError:
    """What a client is told that sends more than `max_prompts` at a time."""
    return InvalidRequestError(
        f"{name} holds {count} prompts, but a request may bring {max_prompts}{setting}; send fewer"
        f" at a time.",
        parameter=name,
    )


def _mixture(name: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{name} mixes token ids with texts or lists; give the ids of one prompt, or a list of"
        f" prompts.",
        parameter=name,
    )


async def as_engine_prompt(
    state: ServerState, prompt: str | list[int], fields: CompletionRequest, *, is_alone: bool
) -> Prompt:
    """A prompt as the engine takes it. A text alone, with special tokens, it tokenizes itself; of
    several each is tokenized before the first of them is computed, so that one that is refused
    is so before a stream has begun.
    """
    special = fields.add_special_tokens is not False
    if isinstance(prompt, str) and not (special and is_alone):
        check_length(state, len(prompt), fields.truncate_prompt_tokens, "prompt")
        ids = await state.engine.encode(prompt, add_special_tokens=special)
        return TokensPrompt(prompt=prompt, prompt_token_ids=ids)
    return prompt


def check_length(state: ServerState, num_chars: int, truncation: int | None, what: str) -> None:
    """Refuse text that is certainly too long before time is spent on it."""
    context = state.engine.config.model.max_model_len
    longest = context * state.tokenizer.max_token_chars
    if truncation is None and num_chars > longest:
        raise ContextLengthExceededError(
            f"{what} has {num_chars} characters, more than {context} tokens (max_model_len) can"
            f" hold; shorten it, or set truncate_prompt_tokens.",
            parameter=what,
        )


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as the engine takes it."""

    text: str
    token_ids: list[int]
    """With the placeholders of images."""
    prompt: TokensPrompt
    """For the engine, which puts them there itself."""


async def chat_prompt(
    state: ServerState, fields: ChatCompletionRequest | TokenizeRequest
) -> ChatPrompt:
    """The prompt that a conversation amounts to, its images fetched and prepared.

    Raises what `render_chat` raises, and `InvalidRequestError` for a template of the client's
    own that the server does not trust, and for an image that cannot be taken.
    """
    template = state.chat_template
    if fields.chat_template is not None:
        if not state.args.trust_request_chat_template:
            raise InvalidRequestError(
                "chat_template is not taken from requests by this server"
                " (trust_request_chat_template); leave it out.",
                parameter="chat_template",
            )
        template = fields.chat_template
    continued = bool(fields.continue_final_message)
    generation_prompt = fields.add_generation_prompt
    variables = dict(fields.chat_template_kwargs or {})
    if fields.documents is not None:
        variables["documents"] = fields.documents
    if fields.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", fields.reasoning_effort)

    given = {
        "messages": fields.messages,
        "tools": fields.tools,
        "documents": fields.documents,
        "chat_template_kwargs": fields.chat_template_kwargs,
    }

    def render() -> RenderedChat:
        check_num_values(given)
        return render_chat(
            state.tokenizer,
            fields.messages or [],
            chat_template=template,
            add_generation_prompt=not continued if generation_prompt is None else generation_prompt,
            continue_final_message=continued,
            tools=fields.tools or None,
            chat_template_kwargs=variables,
            add_special_tokens=bool(fields.add_special_tokens),
            images=state.engine.images,
        )

    rendered = await state.in_text_thread(render)
    text, token_ids = rendered.text, rendered.token_ids
    prompt = TokensPrompt(prompt=text, prompt_token_ids=token_ids)
    if rendered.images and state.engine.images is not None:
        images = await prepared_images(state, rendered.images, fields.mm_processor_kwargs)
        prompt["multi_modal_data"] = {"image": images}
        token_ids, _ = state.engine.images.expand(token_ids, images)
    return ChatPrompt(text, token_ids, prompt)


def check_num_values(given: Mapping[str, Any]) -> None:
    """Refuse what would keep a template and its checks busy for longer than a prompt is worth."""
    room = MAX_TEMPLATE_VALUES
    for name, value in given.items():
        stack = [value]
        while stack and room >= 0:
            each = stack.pop()
            items = list(each.values()) if isinstance(each, dict) else each
            if isinstance(items, list):
                room -= len(items)
                stack += items
        if room < 0:
            raise InvalidRequestError(
                f"{name} brings the values for the chat template to more than"
                f" {MAX_TEMPLATE_VALUES}, counted at every depth; send less.",
                parameter=name,
            )


def num_message_chars(messages: list[dict[str, Any]]) -> int:
    """Characters of the messages' contents: a lower bound of what their prompt has."""
    total = 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            total += len(content)
        elif isinstance(content, list):
            total += sum(
                len(part["text"])
                for part in content
                if isinstance(part, Mapping) and isinstance(part.get("text"), str)
            )
    return total
