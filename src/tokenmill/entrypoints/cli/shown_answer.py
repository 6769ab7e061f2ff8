"""An answer in the terminal, while it comes."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tokenmill.entrypoints.parsers.answer import AnswerParser
from tokenmill.entrypoints.parsers.events import ContentPiece, Event, ReasoningPiece
from tokenmill.entrypoints.parsers.reasoning import open_after_text
from tokenmill.tokenizer.reasoning import reasoning_format

if TYPE_CHECKING:
    from rich.console import Console

    from tokenmill.entrypoints.llm import LLM
    from tokenmill.sampling_params import SamplingParams


def with_marks(llm: LLM, params: SamplingParams) -> SamplingParams:
    """The parameters with which the marks of reasoning are in the text, whatever they are."""
    name, tokenizer = llm.reasoning_parser, llm.llm_engine.tokenizer
    if name is None or tokenizer is None:
        return params
    ids = map(tokenizer.token_to_id, reasoning_format(name).tokens)
    if tokenizer.special_token_ids.isdisjoint(ids):
        return params
    return params.replace(skip_special_tokens=False)


class ShownAnswer:
    """Writes the answer to stdout, so that it can be piped, and the reasoning to the console."""

    def __init__(self, llm: LLM, prompt: Any, console: Console | None) -> None:
        """Without a console the reasoning is not shown."""
        name = llm.reasoning_parser
        form = None if name is None else reasoning_format(name)
        self._parser = AnswerParser(
            reasoning=form,
            is_open=None if form is None else open_after_text(form, prompt["prompt"]),
        )
        self._console = console
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self.has_begun = False

    def show(self, text: str) -> None:
        """More of it."""
        self.has_begun = True
        self._write(self._parser.push(text))

    def end(self) -> None:
        """The end, whatever the reason."""
        self._write(self._parser.finish())
        if self._content:
            sys.stdout.write("\n")
            sys.stdout.flush()
        elif self._reasoning and self._console is not None:
            self._console.print()

    @property
    def message(self) -> dict[str, str]:
        """As the conversation remembers it."""
        message = {"role": "assistant", "content": "".join(self._content)}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        return message

    def _write(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case ReasoningPiece(text):
                    self._reasoning.append(text)
                    if self._console is not None:
                        self._console.print(text, style="dim", end="")
                case ContentPiece(text):
                    if self._reasoning and not self._content and self._console is not None:
                        self._console.print("\n")
                    self._content.append(text)
                    sys.stdout.write(text)
                    sys.stdout.flush()
