"""An engine for the length of one command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tokenmill.entrypoints.cli.progress import loading_progress
from tokenmill.errors import InvalidRequestError
from tokenmill.lora_request import LoRARequest

if TYPE_CHECKING:
    from rich.console import Console

    from tokenmill.entrypoints.cli.flags import EngineFlags
    from tokenmill.entrypoints.llm import LLM
    from tokenmill.outputs import RequestOutput
    from tokenmill.sampling_params import SamplingParams


class BuildLLM(Protocol):
    """Takes the keywords of `LLM`. Commands get it handed in, so that they run on any engine."""

    def __call__(self, **engine_args: Any) -> LLM: ...


def build_llm(**engine_args: Any) -> LLM:
    """The real engine; imported here, since that takes as long as everything else together."""
    from tokenmill.entrypoints.llm import LLM

    return LLM(**engine_args)


@contextmanager
def stdin_is_text() -> Iterator[None]:
    """Raises `InvalidRequestError` if what is read from stdin in the block is no text."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"stdin is no {error.encoding.upper()} text (byte {error.start}).", parameter="prompts"
        ) from error


def open_console() -> Console:
    """stderr, with tokenmill's logs going there too. Raises `ConfigError` for a bad log level."""
    from rich.console import Console

    from tokenmill.observe.logging import configure_logging

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    configure_logging(console)
    return console


def adapter(directory: Path | None) -> LoRARequest | None:
    """What --lora names."""
    return None if directory is None else LoRARequest(directory.resolve().name, str(directory))


@contextmanager
def open_llm(
    engine: EngineFlags,
    build: BuildLLM,
    console: Console,
    *,
    quiet: bool,
    lora: Path | None = None,
) -> Iterator[LLM]:
    """The loaded model, ready for an adapter if --lora names one; closed at the end."""
    arguments = asdict(engine)
    arguments["enable_lora"] |= lora is not None
    with loading_progress(console, shown=not quiet) as on_progress:
        llm = build(**arguments, on_progress=on_progress)
    if not quiet:
        console.print(llm.llm_engine.summary, style="dim")
    try:
        yield llm
    finally:
        llm.close()


@dataclass(slots=True)
class Tally:
    """Figures over the requests of one answer or one command."""

    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    num_sequences: int = 0
    time_to_first_token: float | None = None
    """Of the request that had its first token first, in seconds."""
    first_token_time: float | None = None
    last_token_time: float | None = None
    finish_reasons: set[str] = field(default_factory=set)

    def add(self, output: RequestOutput) -> None:
        """Count one output: a delta, or a whole request that comes in one piece."""
        for sequence in output.outputs:
            self.num_new_tokens += len(sequence.token_ids)
            if sequence.finish_reason is not None:
                self.finish_reasons.add(sequence.finish_reason)
                self.num_sequences += 1
        if output.finished:
            self.num_prompt_tokens += len(output.prompt_token_ids)
        metrics = output.metrics
        if metrics.first_token_time is not None and (
            self.first_token_time is None or metrics.first_token_time < self.first_token_time
        ):
            self.first_token_time = metrics.first_token_time
            self.time_to_first_token = metrics.time_to_first_token
        if metrics.last_token_time is not None:
            self.last_token_time = max(self.last_token_time or 0.0, metrics.last_token_time)

    @property
    def tokens_per_second(self) -> float | None:
        """Rate after the first tokens, which the prompts' computation precedes."""
        if self.first_token_time is None or self.last_token_time is None:
            return None
        seconds = self.last_token_time - self.first_token_time
        return (self.num_new_tokens - self.num_sequences) / seconds if seconds > 0 else None

    def line(self) -> str:
        """All of it for a reader."""
        parts = [
            f"{number} {kind} token{'s' if number != 1 else ''}"
            for kind, number in (("prompt", self.num_prompt_tokens), ("new", self.num_new_tokens))
        ]
        if self.time_to_first_token is not None:
            parts.append(f"first token after {self.time_to_first_token:.2f} s")
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:.1f} tokens/s")
        if "length" in self.finish_reasons:
            parts.append("cut off at --max-tokens or the end of the context")
        if "abort" in self.finish_reasons:
            parts.append("interrupted")
        return ", ".join(parts)


def run_requests(
    llm: LLM,
    prompts: Mapping[str, Any],
    params: SamplingParams,
    lora_request: LoRARequest | None,
    tally: Tally,
) -> Iterator[RequestOutput]:
    """Outputs of all prompts (request id to prompt) as they come, counted in `tally`.

    Requests that are unfinished when the caller stops listening, or at Ctrl-C, are aborted.
    """
    engine, unfinished = llm.llm_engine, set(prompts)
    try:
        for request_id, prompt in prompts.items():
            engine.add_request(request_id, prompt, params, lora_request=lora_request)
        while unfinished:
            for output in engine.step():
                if output.finished:
                    unfinished.discard(output.request_id)
                tally.add(output)
                yield output
    finally:
        for output in engine.abort_request(sorted(unfinished)):
            tally.add(output)
