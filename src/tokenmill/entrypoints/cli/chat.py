"""`tokenmill chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from tokenmill.entrypoints.cli.flags import (
    ENGINE,
    ENGINE_DEFAULTS,
    NOT_A_FLAG,
    NOT_ON_THE_COMMAND_LINE,
    SAMPLING,
    EngineFlags,
    Images,
    Lora,
    Quiet,
    given_params,
    sampling_flags,
)
from tokenmill.entrypoints.cli.session import (
    BuildLLM,
    Tally,
    adapter,
    open_console,
    open_llm,
    run_requests,
    stdin_is_text,
)
from tokenmill.errors import (
    ContextLengthExceededError,
    GenerationError,
    TokenmillError,
    did_you_mean,
)
from tokenmill.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from tokenmill.entrypoints.cli.shown_answer import ShownAnswer
    from tokenmill.entrypoints.llm import LLM
    from tokenmill.lora_request import LoRARequest

COMMANDS = {
    "/system": "/system TEXT sets the system message (without TEXT: none) and starts anew",
    "/image": "/image PATH shows an image with the next question",
    "/reset": "/reset forgets the conversation",
    "/help": "/help shows this",
    "/exit": "/exit leaves, as Ctrl-D does; Ctrl-C stops an answer",
}

QUESTION = Parameter(help="Answer this and exit.")
SYSTEM = Parameter(alias="-s", help="System message.")

NOT_IN_A_CHAT = {
    "n", "logprobs", "logprob_token_ids", "prompt_logprobs", "truncate_prompt_tokens",
}  # fmt: skip
"""A conversation has one answer, and nobody reads numbers there."""

if TYPE_CHECKING:  # a class that is made at run time is no type to a checker
    ChatSampling = Any
else:
    ChatSampling = sampling_flags("ChatSampling", without=NOT_ON_THE_COMMAND_LINE | NOT_IN_A_CHAT)
SAMPLING_DEFAULTS = ChatSampling()

NOTES = """
Without a question the conversation goes on until Ctrl-D or /exit; /help lists the commands. Each
line of a piped stdin is one turn. Without --max-tokens an answer ends where the model stops, or at
the end of its context. Sampling flags that are not given have the model's own defaults.
"""

# Without the usage line cyclopts would collect all flags once more, for 30 ms.
app = App(
    name="chat",
    usage="Usage: tokenmill chat [-m MODEL] [OPTIONS] [QUESTION]",
    help_epilogue=NOTES.replace("\n", " ").strip(),
)


@app.default
def chat(
    question: Annotated[str | None, QUESTION] = None,
    /,
    *,
    system: Annotated[str | None, SYSTEM] = None,
    image: Images = None,
    lora: Lora = None,
    quiet: Quiet = False,
    sampling: Annotated[ChatSampling, SAMPLING] = SAMPLING_DEFAULTS,
    engine: Annotated[EngineFlags, ENGINE] = ENGINE_DEFAULTS,
    build_llm: Annotated[BuildLLM, NOT_A_FLAG],
) -> int:
    """Talk with a model, or ask it one question; images go with the first."""
    from tokenmill.entrypoints.cli.shown_answer import with_marks

    given = given_params(sampling)
    console = open_console()
    with open_llm(engine, build_llm, console, quiet=quiet, lora=lora) as llm:
        params = llm.get_default_sampling_params().replace(
            **given, output_kind=RequestOutputKind.DELTA
        )
        params = with_marks(llm, params)
        conversation = Conversation(
            llm, params, console, lora_request=adapter(lora), system=system, quiet=quiet
        )
        conversation.images = list(image or [])
        if question is not None:
            conversation.ask(question)
        else:
            _converse(conversation, console)
    return 0


class Conversation:
    """The messages so far, and the engine that answers."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        console: Console,
        *,
        lora_request: LoRARequest | None,
        system: str | None,
        quiet: bool,
    ) -> None:
        self._llm = llm
        self._params = params
        self._lora_request = lora_request
        self._console = console
        self._quiet = quiet
        self.start(system)

    def start(self, system: str | None) -> None:
        """Begin anew with this system message."""
        self._system = system
        self.images: list[Path] = []
        """They go with the next question."""
        self.messages: list[dict[str, Any]] = (
            [] if system is None else [{"role": "system", "content": system}]
        )

    def reset(self) -> None:
        """Forget all but the system message."""
        self.start(self._system)

    def ask(self, question: str) -> None:
        """Stream the answer to stdout and remember both.

        If the answer is interrupted (`KeyboardInterrupt`), what was shown of it is remembered. If
        it fails (`TokenmillError`), the question is forgotten.
        """
        content: Any = question
        if self.images:
            parts = [{"type": "image", "image": path} for path in self.images]
            content = [*parts, {"type": "text", "text": question}]
            self.images = []
        asked = [*self.messages, {"role": "user", "content": content}]
        prompt: Any = self._llm.chat_prompt(asked)
        from tokenmill.entrypoints.cli.shown_answer import ShownAnswer

        answer = ShownAnswer(self._llm, prompt, None if self._quiet else self._console)
        tally = Tally()
        try:
            self._stream(prompt, answer, tally)
        finally:
            answer.end()
            if answer.has_begun and not self._quiet:
                self._console.print(tally.line(), style="dim")
            if answer.has_begun and "error" not in tally.finish_reasons:
                self.messages = [*asked, answer.message]

    def _stream(self, prompt: Any, answer: ShownAnswer, tally: Tally) -> None:
        for output in run_requests(
            self._llm, {"chat": prompt}, self._params, self._lora_request, tally
        ):
            (sequence,) = output.outputs
            if sequence.finish_reason == "error":
                raise GenerationError(f"The answer failed: {sequence.error}")
            answer.show(sequence.text)


def _converse(conversation: Conversation, console: Console) -> None:
    interactive = sys.stdin.isatty()
    if interactive:
        _enable_line_editing()
        console.print("Ctrl-D leaves, /help lists the commands.", style="dim")
    while True:
        try:
            with stdin_is_text():
                line = input("> " if interactive else "").strip()
            if line.split(" ")[0] == "/exit":
                return
            if line.startswith("/"):
                console.print(_obey(line, conversation), style="dim")
            elif line:
                conversation.ask(line)
        except EOFError:
            return
        except KeyboardInterrupt:  # stops the answer or clears the line
            if not interactive:
                raise
            console.print()
        except ContextLengthExceededError as error:
            if not interactive:
                raise
            console.print(
                f"error: {error} /reset starts anew; a larger --max-model-len holds more."
            )
        except TokenmillError as error:
            if not interactive:
                raise
            console.print(f"error: {error}")


def _obey(line: str, conversation: Conversation) -> str:
    """Carry out a command; returns what to tell the user."""
    command, _, argument = line.partition(" ")
    match command:
        case "/reset":
            conversation.reset()
            return "The conversation is forgotten."
        case "/system":
            conversation.start(argument.strip() or None)
            return "The conversation starts anew."
        case "/image":
            if not argument.strip():
                return COMMANDS[command]
            path = Path(argument.strip()).expanduser()
            if not path.is_file():
                return f"There is no file {str(path)!r}."
            conversation.images.append(path)
            return "The image goes with the next question."
        case "/help":
            return "\n".join(COMMANDS.values())
        case _:
            return f"There is no command {command}.{did_you_mean(command, COMMANDS)} See /help."


def _enable_line_editing() -> None:
    """Arrow keys and history for `input`; Python on some systems comes without."""
    try:
        import readline  # noqa: F401
    except ImportError:
        return
