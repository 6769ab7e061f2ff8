"""`tokenmill generate`: prompts in, their continuations out."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import App, Parameter

from tokenmill.engine.prompts import Prompt, TextPrompt
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
from tokenmill.errors import GenerationError, InvalidRequestError
from tokenmill.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from tokenmill.entrypoints.llm import LLM
    from tokenmill.lora_request import LoRARequest
    from tokenmill.outputs import RequestOutput


PROMPTS = Parameter(help="Texts to continue. Without any, stdin is one prompt.")
PROMPT_FILE = Parameter(
    alias="-f",
    help="A file that is one prompt, without its last newline; may be given several times.",
)
JSON = Parameter(negative=(), help="One JSON object and line for each prompt, when it is complete.")

if TYPE_CHECKING:  # a class that is made at run time is no type to a checker
    GenerateSampling = Any
else:
    GenerateSampling = sampling_flags("GenerateSampling", without=NOT_ON_THE_COMMAND_LINE)
SAMPLING_DEFAULTS = GenerateSampling()

NOTES = """
Without --max-tokens the model writes until it stops or its context is full. Several prompts run
together and come out in their order, with a blank line between. Sampling flags that are not given
have the model's own defaults.
"""

# Without the usage line cyclopts would collect all flags once more, for 30 ms.
app = App(
    name="generate",
    usage="Usage: tokenmill generate [-m MODEL] [OPTIONS] [PROMPTS...]",
    help_epilogue=NOTES.replace("\n", " ").strip(),
)


@app.default
def generate(
    *prompts: Annotated[str, PROMPTS],
    prompt_file: Annotated[list[Path] | None, PROMPT_FILE] = None,
    json: Annotated[bool, JSON] = False,
    image: Images = None,
    lora: Lora = None,
    quiet: Quiet = False,
    sampling: Annotated[GenerateSampling, SAMPLING] = SAMPLING_DEFAULTS,
    engine: Annotated[EngineFlags, ENGINE] = ENGINE_DEFAULTS,
    build_llm: Annotated[BuildLLM, NOT_A_FLAG],
) -> int:
    """Continue prompts, as they are: no chat template is applied (see `tokenmill chat`).

    Every prompt gets the images, and holds a mark of the model's, such as <image>, for each.
    """
    given = given_params(sampling)
    if not json and {"logprobs", "prompt_logprobs", "logprob_token_ids"} & given.keys():
        raise InvalidRequestError(
            "--logprobs and --prompt-logprobs need --json: text has no place for them.",
            parameter="logprobs",
        )
    texts = [_with_images(text, image or []) for text in _read_prompts(prompts, prompt_file or [])]
    console = open_console()
    with open_llm(engine, build_llm, console, quiet=quiet, lora=lora) as llm:
        tally = Tally()
        try:
            (_print_json if json else _print_text)(llm, texts, given, adapter(lora), tally)
        finally:
            if tally.num_sequences and not quiet:
                console.print(tally.line(), style="dim")
    return 0


def _read_prompts(prompts: tuple[str, ...], files: list[Path]) -> list[str]:
    """Arguments, then files, else stdin. Raises `InvalidRequestError`."""
    texts = [*prompts, *(_read_file(path) for path in files)]
    if texts:
        return texts
    with stdin_is_text():
        text = "" if sys.stdin.isatty() else sys.stdin.read().removesuffix("\n")
    if not text:
        raise InvalidRequestError(
            "There is no prompt. Give one as an argument, with --prompt-file, or on stdin.",
            parameter="prompts",
        )
    return [text]


def _with_images(text: str, images: list[Path]) -> Prompt:
    return TextPrompt(prompt=text, multi_modal_data={"image": images}) if images else text


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n")
    except OSError as error:
        raise InvalidRequestError(
            f"--prompt-file {path}: cannot be read: {error.strerror}.", parameter="prompt_file"
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"--prompt-file {path}: is no UTF-8 text (byte {error.start}).",
            parameter="prompt_file",
        ) from error


class InOrder:
    """Writes many streams one after the other: the first that is not complete is written as it
    grows, the others wait.
    """

    def __init__(self, keys: list[Any], write: Callable[[str], None], separator: str) -> None:
        self._turns = deque(keys)
        self._held = dict.fromkeys(keys, "")
        self._complete: set[Any] = set()
        self._write = write
        self._separator = separator

    def add(self, key: Any, text: str, *, complete: bool) -> None:
        """More text of the stream `key`."""
        self._held[key] += text
        if complete:
            self._complete.add(key)
        while self._turns:
            first = self._turns[0]
            self._write(self._held[first])
            self._held[first] = ""
            if first not in self._complete:
                return
            self._turns.popleft()
            self._write(self._separator if self._turns else "\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _print_text(
    llm: LLM, texts: list[Prompt], given: dict[str, Any], lora: LoRARequest | None, tally: Tally
) -> None:
    params = llm.get_default_sampling_params().replace(**given, output_kind=RequestOutputKind.DELTA)
    prompts = {str(number): text for number, text in enumerate(texts)}
    keys = [(request_id, index) for request_id in prompts for index in range(params.n)]
    printer, errors = InOrder(keys, _write, separator="\n\n"), []
    for output in run_requests(llm, prompts, params, lora, tally):
        errors += _errors(output)
        for sequence in output.outputs:
            key = (output.request_id, sequence.index)
            printer.add(key, sequence.text, complete=sequence.finished)
    _raise_first(errors)


def _print_json(
    llm: LLM, texts: list[Prompt], given: dict[str, Any], lora: LoRARequest | None, tally: Tally
) -> None:
    params = llm.get_default_sampling_params().replace(
        **given, output_kind=RequestOutputKind.FINAL_ONLY
    )
    prompts = {str(number): text for number, text in enumerate(texts)}
    printer, errors = InOrder(list(prompts), _write, separator="\n"), []
    for output in run_requests(llm, prompts, params, lora, tally):
        errors += _errors(output)
        printer.add(output.request_id, _as_json(output), complete=True)
    _raise_first(errors)


def _as_json(output: RequestOutput) -> str:
    own = Tally()
    own.add(output)
    fields = {
        "prompt": output.prompt,
        "outputs": output.outputs,
        "prompt_logprobs": output.prompt_logprobs,
        "num_prompt_tokens": own.num_prompt_tokens,
        "num_cached_tokens": output.num_cached_tokens,
        "num_new_tokens": own.num_new_tokens,
        "time_to_first_token": own.time_to_first_token,
        "tokens_per_second": own.tokens_per_second,
    }
    return msgspec.json.encode(fields).decode()


def _errors(output: RequestOutput) -> list[str]:
    return [
        f"Prompt {int(output.request_id) + 1} failed: {sequence.error}"
        for sequence in output.outputs
        if sequence.finish_reason == "error"
    ]


def _raise_first(errors: list[str]) -> None:
    if errors:
        more = f" ({len(errors)} failed.)" if len(errors) > 1 else ""
        raise GenerationError(errors[0] + more)
