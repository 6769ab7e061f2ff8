"""`tokenmill run-batch`: a file of requests, answered into a file of results.

Exit codes: 0 every request has an answer; 1 some have an error, or the engine failed; 2 the file or
a setting is wrong.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

from cyclopts import App, Group, Parameter

from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.serve_args import ServeArgs
from tokenmill.entrypoints.cli import event_loop
from tokenmill.entrypoints.cli.flags import Quiet, engine_flags, option_flags
from tokenmill.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from rich.console import Console

    from tokenmill.entrypoints.http.batch import BatchLine
    from tokenmill.entrypoints.http.engine import Engine

INPUT = Parameter(
    alias="-i",
    allow_leading_hyphen=True,  # for - alone
    help="Requests, one a line, in OpenAI's batch format; - is standard input.",
)
OUTPUT = Parameter(
    alias="-o",
    allow_leading_hyphen=True,
    help="Where results go, one a line; - is standard output.",
)
RESUME = Parameter(
    negative=(), help="Go on with an output file: requests that it has an answer to are left out."
)
MODEL = Parameter(alias="-m", help="The model: a directory, a GGUF file, a hub id, or an alias.")
ANSWERS = Parameter(name="*", group=Group("Answers", sort_key=1))
BATCH_ENGINE = Parameter(name="*", group=Group("Engine", sort_key=2))

if TYPE_CHECKING:  # classes that are made at run time are no types to a checker
    AnswerFlags = ServeArgs
    BatchEngineFlags = EngineArgs
else:
    AnswerFlags = option_flags(
        ServeArgs,
        only=(
            "served_model_name", "lora_modules", "request_timeout", "max_body_bytes", "max_n",
            "max_prompts", "tool_call_parser", "enable_auto_tool_choice", "reasoning_field",
            "trust_request_chat_template", "enable_prompt_tokens_details",
        ),
    )  # fmt: skip
    BatchEngineFlags = engine_flags("BatchEngineFlags", without={"model", "skip_tokenizer_init"})
ANSWER_DEFAULTS = AnswerFlags()
ENGINE_DEFAULTS = BatchEngineFlags()

NOTES = """
A line of the input is {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body":
{...}}; one of the output has the same custom_id and the status and body of the response. Results
come in the order in which they are ready.
"""

# Without the usage line cyclopts would collect all flags once more, for 30 ms.
app = App(
    name="run-batch",
    usage="Usage: tokenmill run-batch -i FILE -o FILE [MODEL] [OPTIONS]",
    help_epilogue=NOTES.replace("\n", " ").strip(),
)


@app.default
def run_batch(
    model: Annotated[str, MODEL] = EngineArgs.model,
    *,
    input_file: Annotated[str, INPUT],
    output_file: Annotated[str, OUTPUT],
    resume: Annotated[bool, RESUME] = False,
    quiet: Quiet = False,
    answers: Annotated[AnswerFlags, ANSWERS] = ANSWER_DEFAULTS,
    engine: Annotated[BatchEngineFlags, BATCH_ENGINE] = ENGINE_DEFAULTS,
) -> int:
    """Answer a file of requests: completions, chats, responses, messages, embeddings, scores."""
    from rich.console import Console

    from tokenmill.entrypoints.cli.serve import check_packages, configure_logging_of_servers

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    configure_logging_of_servers(console, log_format="text")
    check_packages("run-batch")
    serve_args = ServeArgs(**asdict(answers))
    args = EngineArgs(model=model, **asdict(engine))
    lines = _read(input_file)  # all are looked at before minutes go into loading a model
    done = _answered(output_file, resume=resume)
    lines = [line for line in lines if line.custom_id not in done]
    with _output(output_file, resume=resume) as output:
        try:
            return event_loop.run(_run(args, serve_args, lines, output, console, quiet=quiet))
        except KeyboardInterrupt:
            if output_file != "-":
                console.print("interrupted: the same command with --resume answers the rest")
            raise


async def _run(
    args: EngineArgs,
    serve_args: ServeArgs,
    lines: list[BatchLine],
    output: IO[bytes],
    console: Console,
    *,
    quiet: bool,
) -> int:
    from tokenmill.engine.async_llm import AsyncLLM
    from tokenmill.entrypoints.cli.progress import loading_progress
    from tokenmill.entrypoints.http.adapters import check_first_adapters
    from tokenmill.entrypoints.http.answer_settings import check_answer_settings
    from tokenmill.entrypoints.http.traces import check_traces

    check_answer_settings(serve_args, args.reasoning_parser)
    check_first_adapters(serve_args, args)
    check_traces(serve_args)
    with loading_progress(console, shown=not quiet) as on_progress:
        engine = await AsyncLLM.start(args, on_progress=on_progress)
    try:
        return await answer_all(
            engine, serve_args, lines, output, console, chat_template=args.chat_template,
            quiet=quiet,
        )  # fmt: skip
    finally:
        await engine.shutdown()


async def answer_all(
    engine: Engine,
    serve_args: ServeArgs,
    lines: list[BatchLine],
    output: IO[bytes],
    console: Console,
    *,
    chat_template: str | None = None,
    quiet: bool = False,
) -> int:
    """Write a result for each request; the exit code."""
    from tokenmill.entrypoints.http.adapters import load_first_adapters, parse_adapters
    from tokenmill.entrypoints.http.batch import BatchRunner
    from tokenmill.entrypoints.http.state import make_state

    state = make_state(engine, serve_args, chat_template=chat_template)
    await load_first_adapters(engine, parse_adapters(serve_args.lora_modules, state.model_names))
    runner = BatchRunner(state)
    started = time.monotonic()
    with _progress(console, len(lines), shown=not quiet) as advance:

        def write(result: bytes) -> None:
            output.write(result)
            output.flush()  # what is written is not asked again after an interruption
            advance()

        await runner.run(lines, write)
    counts, metrics = runner.counts, state.metrics
    await state.responses.close()
    state.traces.close()
    if not quiet:
        console.print(
            f"{counts.num_done} requests in {time.monotonic() - started:.2f} s,"
            f" {counts.num_failed} failed; {metrics.num_prompt_tokens} prompt tokens,"
            f" {metrics.num_output_tokens} new tokens"
        )
    return 1 if counts.num_failed else 0


def _read(path: str) -> list[BatchLine]:
    """The requests of a file. Raises `InvalidRequestError`, `ConfigError`."""
    from tokenmill.entrypoints.http.batch import read_batch

    if path == "-":
        return list(read_batch(sys.stdin.buffer))
    try:
        with Path(path).expanduser().open("rb") as file:
            return list(read_batch(file))
    except OSError as error:
        raise ConfigError(f"input_file={path!r} cannot be read: {error.strerror}.") from error


def _answered(path: str, *, resume: bool) -> set[str]:
    """Requests that need no answer any more. Raises `InvalidRequestError` for a file that would be
    lost.
    """
    from tokenmill.entrypoints.http.batch import answered_ids

    file = Path(path).expanduser()
    if path == "-" or not file.exists():
        return set()
    if not resume and file.stat().st_size > 0:
        raise InvalidRequestError(
            f"output_file={path!r} has results already; go on with it (--resume), or give another"
            f" name.",
            parameter="output_file",
        )
    with file.open("rb") as lines:
        return answered_ids(lines)


@contextlib.contextmanager
def _output(path: str, *, resume: bool) -> Iterator[IO[bytes]]:
    """What results are written to; with `resume`, behind what is there. Raises `ConfigError`."""
    if path == "-":
        yield sys.stdout.buffer
        return
    try:
        file = Path(path).expanduser().open("a+b" if resume else "wb")
    except OSError as error:
        raise ConfigError(f"output_file={path!r} cannot be written: {error.strerror}.") from error
    with file:
        if resume and file.tell() > 0:
            file.seek(-1, 2)
            if file.read(1) != b"\n":  # the last result was cut off
                file.write(b"\n")
        yield file


@contextlib.contextmanager
def _progress(console: Console, total: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """Give a function to be called for each result: a bar on a terminal, else nothing."""
    if not (shown and console.is_terminal):
        yield lambda: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda: bar.advance(task)
