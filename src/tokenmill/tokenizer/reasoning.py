"""Where a model's reasoning begins and ends: the marks of each family, as texts and as token ids.

A family's name is what `reasoning_parser` (--reasoning-parser) takes. The texts are what
`entrypoints/parsers/reasoning.py` splits answers at; the ids are for those who look at tokens: a
budget of reasoning tokens, and a grammar that counts from the end of reasoning on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from tokenmill.errors import ConfigError, did_you_mean, shown

if TYPE_CHECKING:
    from tokenmill.tokenizer.tokenizer import Tokenizer

AUTO = "auto"
NONE = "none"
MAX_BLANKS = 2
"""Tokens that a template writes behind its own mark at the end of a prompt: blank lines. A mark
before those is an older turn's."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models marks its reasoning in text."""

    start: str = "<think>"
    end: str = "</think>"
    assumed_open: bool = False
    """An answer begins within the reasoning, even if neither it nor its prompt has the start."""
    answer: tuple[str, str] | None = None
    """Marks around what follows the reasoning, if the family has them."""
    is_harmony: bool = False
    """An answer is a sequence of messages, and its reasoning some of them."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """Texts that a parser must get to see, though they may be special tokens."""
        if self.is_harmony:
            return _HARMONY_TOKENS
        return (self.start, self.end, *(self.answer or ()))


_HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_THINK = ReasoningFormat()
_OPEN_THINK = ReasoningFormat(assumed_open=True)
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "cohere_command3": ReasoningFormat(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "deepseek_r1": _OPEN_THINK,
    "deepseek_v3": _THINK,
    "glm45": _THINK,
    "glm47": _THINK,
    "holo2": _THINK,
    "kimi_k2": _THINK,
    "mimo": _THINK,
    "minimax_m2": _OPEN_THINK,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "nemotron_v3": _THINK,
    "olmo3": _THINK,
    "openai_gptoss": ReasoningFormat(
        "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", is_harmony=True
    ),
    "qwen3": _THINK,
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "step3": _OPEN_THINK,
    "step3p5": _OPEN_THINK,
}
"""Value of `reasoning_parser` to its marks."""


class ReasoningMarkers(msgspec.Struct, frozen=True, array_like=True):
    """The marks of one model as ids of its tokenizer."""

    start_ids: tuple[int, ...]
    """Begin the reasoning; one id for almost every model."""
    end_ids: tuple[int, ...]
    """End it."""
    assumed_open: bool = False
    """See `ReasoningFormat`."""

    def open_after(self, prompt_token_ids: Sequence[int]) -> bool | None:
        """Whether an answer to this prompt begins within the reasoning.

        True: the prompt's end has opened it. False: the prompt's end has opened and closed it, so
        that there will be none. None: the prompt leaves it to the model, which may open it with its
        first tokens; `assumed_open` models have done so already.
        """
        for num_blanks in range(MAX_BLANKS + 1):
            if _ends_with(prompt_token_ids, self.start_ids, num_blanks):
                return True
            if _ends_with(prompt_token_ids, self.end_ids, num_blanks):
                return False
        return True if self.assumed_open else None


def _ends_with(ids: Sequence[int], mark: tuple[int, ...], num_blanks: int) -> bool:
    """Whether the mark is followed by exactly so many more ids."""
    end = len(ids) - num_blanks
    return end >= len(mark) and tuple(ids[end - len(mark) : end]) == mark


def reasoning_markers(tokenizer: Tokenizer, name: str) -> ReasoningMarkers:
    """The ids of a family's marks. Raises `ConfigError` for a name that nobody knows."""
    form = reasoning_format(name)
    return ReasoningMarkers(
        tuple(tokenizer.encode(form.start, add_special_tokens=False)),
        tuple(tokenizer.encode(form.end, add_special_tokens=False)),
        form.assumed_open,
    )


def reasoning_format(name: str) -> ReasoningFormat:
    """Raises `ConfigError` for a name that nobody knows."""
    check_reasoning_parser(name)
    return REASONING_FORMATS[name]


def check_reasoning_parser(setting: str) -> str:
    """The setting, if it is one. Raises `ConfigError` for a name that nobody knows."""
    names = ("", AUTO, NONE, *REASONING_FORMATS)
    if setting not in names:
        raise ConfigError(
            f"reasoning_parser={shown(setting)} is not one of: {', '.join(names[1:])}."
            f"{did_you_mean(setting, names)}"
        )
    return setting


def resolve_reasoning_parser(setting: str, tokenizer: Tokenizer | None) -> str | None:
    """The family that a setting means; None for no reasoning.

    `auto` recognises models whose vocabulary has both marks as one token each and whose chat
    template knows the end of the reasoning: such marks mean nothing else. Raises `ConfigError` for
    a name that nobody knows.
    """
    if check_reasoning_parser(setting) in ("", NONE):
        return None
    if setting != AUTO:
        return setting
    if tokenizer is None:
        return None
    templates = "".join(tokenizer.chat_templates.values())
    for name, form in _RECOGNISED.items():
        known = all(tokenizer.token_to_id(mark) is not None for mark in form)
        if known and form[-1] in templates:
            return name
    return None


_RECOGNISED = {
    "qwen3": ("<think>", "</think>"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "cohere_command3": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "openai_gptoss": ("<|start|>", "<|channel|>", "<|message|>"),
}
"""Families by tokens that only their models have; the last one is also in their templates. Of those
that write `<think>`, the one that assumes nothing stands for all."""
