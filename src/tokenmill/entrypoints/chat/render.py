"""Messages to a prompt: the one way, for the offline call and for every endpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tokenmill.entrypoints.chat.contents import Contents
from tokenmill.entrypoints.chat.marks import Marks
from tokenmill.entrypoints.chat.messages import Message, normalise_messages, plain
from tokenmill.entrypoints.chat.templates import ChatTemplate, is_source
from tokenmill.errors import ChatTemplateError, InvalidRequestError, shown
from tokenmill.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenmill.features.multimodal.images import ImagePart, Images

TOOL_TEMPLATE = "tool_use"
"""Name of the template for conversations with tools, where a model has several."""
RESERVED_VARIABLES = frozenset(
    (
        # arguments of their own
        "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template",
        "chat_template_kwargs", "conversation", "tokenize",
        # the tokenizer's
        "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
        # the environment's
        "raise_exception", "strftime_now", "range", "dict", "namespace", "self", "loop", "caller",
        "varargs", "kwargs",
    )
)  # fmt: skip
"""Names that `chat_template_kwargs` may not set. `documents` is not among them: it has no argument
of its own."""
_END_MARK = "\ue0f0end of the final message\ue0f1 "
"""Put behind a message that is to be continued, to find its end in the prompt. The blank at the end
tells whether the template trims its messages."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as a prompt."""

    text: str
    token_ids: list[int]
    images: list[ImagePart] = field(default_factory=list)
    """In the order of their marks among the ids."""


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_special_tokens: bool = False,
    images: Images | None = None,
) -> RenderedChat:
    """Render a conversation with the model's chat template and encode it.

    Encoding adds no special tokens unless told so: the template writes all of them, BOS included.
    Special tokens that a user writes into a message are parsed as such, as they are by transformers
    and vLLM: whoever puts untrusted text into messages has to look for them first. The mark of an
    image is not among them: written by a user it is plain text.

    Args:
        tokenizer: gives the template, its special tokens, and the ids.
        messages: at least one; see `messages.normalise_messages`.
        chat_template: a template's source, or the name of one of the model's; None for its default.
        add_generation_prompt: end with what begins an answer.
        continue_final_message: end within the last message, so that the model continues it.
        tools: function schemas, as the template wants them.
        chat_template_kwargs: further variables for the template, such as `enable_thinking`.
        add_special_tokens: add what the tokenizer itself puts around a text.
        images: what the model makes of images; None for one that takes none.

    Raises `InvalidRequestError` for messages or arguments of a wrong form, `ChatTemplateError` if
    there is no template or it refuses or fails.
    """
    if add_generation_prompt and continue_final_message:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other;"
            " set add_generation_prompt=False to continue the last message.",
            parameter="continue_final_message",
        )
    template = ChatTemplate(_template_source(tokenizer, chat_template, has_tools=bool(tools)))
    marks = None if images is None else Marks(images)
    contents = Contents(template, marks)
    conversation = normalise_messages(messages, template, contents)
    if continue_final_message:
        _mark_end(conversation[-1])
    variables = {
        **_extra_variables(chat_template_kwargs or {}),
        "messages": conversation,
        "tools": None if tools is None else _tools(tools),
        "add_generation_prompt": add_generation_prompt,
    }
    if marks is not None:
        variables = marks.disguised(variables)
    text = template.render({**tokenizer.special_tokens, **variables})
    if continue_final_message:
        text = _up_to_mark(text)
    if marks is None:
        return RenderedChat(text, tokenizer.encode(text, add_special_tokens=add_special_tokens))
    text, token_ids = marks.encode(tokenizer, text, contents.images, add_special_tokens)
    return RenderedChat(text, token_ids, contents.images)


def _mark_end(message: dict[str, Any]) -> None:
    """Put a mark behind a message's content."""
    content = message["content"] or ""
    if isinstance(content, str):
        message["content"] = content + _END_MARK
    elif content[-1]["type"] == "text":
        content[-1]["text"] += _END_MARK
    else:
        content.append({"type": "text", "text": _END_MARK})


def _template_source(tokenizer: Tokenizer, chat_template: str | None, *, has_tools: bool) -> str:
    templates = tokenizer.chat_templates
    if chat_template is not None:
        if not isinstance(chat_template, str):
            raise InvalidRequestError(
                f"chat_template has type {type(chat_template).__name__}; it must be a string.",
                parameter="chat_template",
            )
        if chat_template in templates or is_source(chat_template):
            return templates.get(chat_template, chat_template)
        known = f" The model's are: {', '.join(sorted(templates))}." if templates else ""
        raise ChatTemplateError(
            f"chat_template={shown(chat_template)} is neither a template nor the name of one of the"
            f" model's.{known}",
            parameter="chat_template",
        )
    if has_tools and TOOL_TEMPLATE in templates:
        return templates[TOOL_TEMPLATE]
    if tokenizer.chat_template is None:
        known = f" It has templates named {', '.join(sorted(templates))}." if templates else ""
        raise ChatTemplateError(
            f"the model has no default chat template.{known} Give one with `chat_template`"
            f" (--chat-template), or use a completion with a prompt of your own.",
            parameter="chat_template",
        )
    return tokenizer.chat_template


def _tools(tools: Any) -> list[dict[str, Any]]:
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise InvalidRequestError("tools must be a list of objects.", parameter="tools")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise InvalidRequestError(f"tools[{i}] must be an object.", parameter=f"tools[{i}]")
    normal: list[dict[str, Any]] = plain(tools, "tools")
    return normal


def _extra_variables(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(kwargs, Mapping):
        raise InvalidRequestError(
            "chat_template_kwargs must be an object.", parameter="chat_template_kwargs"
        )
    for name in kwargs:
        if not str(name).isidentifier() or name.startswith("_") or name in RESERVED_VARIABLES:
            raise InvalidRequestError(
                f"chat_template_kwargs may not set {str(name)[:80]!r}; it is for variables of the"
                f" template's own. Use the argument of that name, if there is one.",
                parameter=f"chat_template_kwargs.{str(name)[:80]}",
            )
    extra: dict[str, Any] = plain(kwargs, "chat_template_kwargs")
    return extra


def _up_to_mark(text: str) -> str:
    """The prompt up to the end of the final message."""
    end = text.rfind(_END_MARK.rstrip())
    if end < 0:
        raise ChatTemplateError(
            "the chat template leaves out the final message, so it cannot be continued;"
            " set continue_final_message=False.",
            parameter="continue_final_message",
        )
    keeps_blanks = text.startswith(_END_MARK, end)
    return text[:end] if keeps_blanks else text[:end].rstrip()
