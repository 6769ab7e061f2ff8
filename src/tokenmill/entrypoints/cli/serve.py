"""`tokenmill serve`: a model behind OpenAI's protocol.

Exit codes: 0 stopped by SIGINT or SIGTERM; 1 the model or the engine could not be started; 2 a
setting is wrong; 3 the engine died too often to be started again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import App, Group, Parameter

from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.route_args import RouteArgs
from tokenmill.config.serve_args import ServeArgs
from tokenmill.engine.serve_options import ServeOptions
from tokenmill.entrypoints.cli import event_loop
from tokenmill.entrypoints.cli.flags import Quiet, engine_flags, option_flags
from tokenmill.entrypoints.cli.serve_sources import Sources
from tokenmill.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from tokenmill.engine.async_llm import AsyncLLM
    from tokenmill.entrypoints.http.state import ServerState

MODEL = Parameter(
    alias="-m", help="The model to serve: a directory, a GGUF file, a hub id, or an alias."
)
CONFIG = Parameter(help="A YAML, TOML or JSON file with flags as `max_model_len: 2048`.")
PRINT_CONFIG = Parameter(
    negative=(), help="Print all settings, and where they come from, as a --config file; no start."
)
SERVER = Parameter(name="*", group=Group("Server", sort_key=1))
RECOVERY = Parameter(name="*", group=Group("Queue and recovery", sort_key=2))
SERVED_ENGINE = Parameter(name="*", group=Group("Engine", sort_key=3))

if TYPE_CHECKING:  # classes that are made at run time are no types to a checker
    ServerFlags = ServeArgs
    RecoveryFlags = ServeOptions
    ServedEngineFlags = EngineArgs
else:
    ServerFlags = option_flags(ServeArgs)
    RecoveryFlags = option_flags(ServeOptions)
    ServedEngineFlags = engine_flags("ServedEngineFlags", without={"model", "skip_tokenizer_init"})
SERVER_DEFAULTS = ServerFlags()
RECOVERY_DEFAULTS = RecoveryFlags()
ENGINE_DEFAULTS = ServedEngineFlags()

SECRETS = ("api_key", "backend_api_key")
"""Settings that are not printed."""

NOTES = """
Every flag may come from the environment (TOKENMILL_SERVE_PORT for --port) or from --config as well;
the command line wins over the environment, and that over the file. SIGTERM or Ctrl-C lets running
requests finish; a second one ends them.
"""

sources = Sources()
# Without the usage line cyclopts would collect all flags once more, for 30 ms.
app = App(
    name="serve",
    usage="Usage: tokenmill serve [MODEL] [OPTIONS]",
    help_epilogue=NOTES.replace("\n", " ").strip(),
    config=[sources],
)


@app.default
def serve(
    model: Annotated[str, MODEL] = EngineArgs.model,
    *,
    config: Annotated[Path | None, CONFIG] = None,
    print_config: Annotated[bool, PRINT_CONFIG] = False,
    quiet: Quiet = False,
    server: Annotated[ServerFlags, SERVER] = SERVER_DEFAULTS,
    recovery: Annotated[RecoveryFlags, RECOVERY] = RECOVERY_DEFAULTS,
    engine: Annotated[ServedEngineFlags, SERVED_ENGINE] = ENGINE_DEFAULTS,
) -> int:
    """Serve a model over HTTP: completions, chats, tokens, metrics."""
    args = EngineArgs(model=model, **asdict(engine))
    serve_args = ServeArgs(**asdict(server))
    options = ServeOptions(**asdict(recovery))
    if print_config:
        settings = {"model": model, **asdict(serve_args), **asdict(options), **asdict(engine)}
        print("\n".join(config_lines(settings, sources.origins)))
        return 0
    return _run(args, serve_args, options, quiet=quiet)


def config_lines(settings: dict[str, Any], origins: dict[str, str]) -> list[str]:
    """Lines of a YAML file, each with the setting's source behind it; secrets are left out."""
    lines = []
    for name, value in settings.items():
        origin = origins.get(name, "default")
        if name in SECRETS and value:
            lines.append(f"# {name}: {len(value)} not shown  # {origin}")
        else:
            lines.append(f"{name}: {msgspec.json.encode(value).decode()}  # {origin}")
    return lines


def _run(args: EngineArgs, serve_args: ServeArgs, options: ServeOptions, *, quiet: bool) -> int:
    from rich.console import Console

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    configure_logging_of_servers(console, log_format=serve_args.log_format)
    if serve_args.headless:
        from tokenmill.engine.headless import run_headless

        return run_headless(args)
    check_packages("serve")
    return event_loop.run(_serve(args, serve_args, options, console, quiet=quiet))


def check_packages(command: str) -> None:
    """Raise `ConfigError` if a package is missing that servers need."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
        import zmq  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"tokenmill {command} needs the packages of the extra serve, and {error.name} is"
            f" missing: pip install 'tokenmill[serve]'."
        ) from error


async def _serve(
    args: EngineArgs, serve_args: ServeArgs, options: ServeOptions, console: Console, *, quiet: bool
) -> int:
    from tokenmill.engine.async_llm import AsyncLLM
    from tokenmill.entrypoints.chat.templates import is_source, read_template
    from tokenmill.entrypoints.cli.progress import loading_progress
    from tokenmill.entrypoints.http.adapters import check_first_adapters
    from tokenmill.entrypoints.http.answer_settings import check_answer_settings
    from tokenmill.entrypoints.http.auth import api_keys
    from tokenmill.entrypoints.http.server import run_server
    from tokenmill.entrypoints.http.traces import check_traces

    # What can be wrong is found before minutes go into loading a model.
    template = read_template(args.chat_template)
    if template is not None and is_source(template):
        _check_template(template)
    check_answer_settings(serve_args, args.reasoning_parser)
    check_first_adapters(serve_args, args)
    check_traces(serve_args)
    warn_of_open_doors(serve_args, num_keys=len(api_keys(serve_args)))

    async def start_engine() -> AsyncLLM:
        shown = not quiet and serve_args.log_format == "text"
        with loading_progress(console, shown=shown) as on_progress:
            return await AsyncLLM.start(args, options=options, on_progress=on_progress)

    return await run_server(
        serve_args,
        options,
        start_engine,
        chat_template=args.chat_template,
        announce=_announcer(console, serve_args, quiet=quiet),
    )


def _check_template(source: str) -> None:
    """Raise `ConfigError` if the server's own template is none: no chat would ever be answered."""
    from tokenmill.entrypoints.chat.templates import ChatTemplate
    from tokenmill.errors import ChatTemplateError

    try:
        ChatTemplate(source)
    except ChatTemplateError as error:
        raise ConfigError(f"chat_template: {error}") from error


def _announcer(
    console: Console, serve_args: ServeArgs, *, quiet: bool
) -> Callable[[ServerState, str, float], None]:
    """Tells that the server is ready."""

    def announce(state: ServerState, address: str, seconds: float) -> None:
        from tokenmill.entrypoints.http.banner import banner

        text = banner(state.engine.config, state.model_names, address, seconds)
        tell_ready(console, serve_args, text, address, seconds, quiet=quiet)

    return announce


def tell_ready(
    console: Console,
    args: ServeArgs | RouteArgs,
    text: str,
    address: str,
    seconds: float,
    *,
    quiet: bool,
) -> None:
    """Say `text` in the form that a server's logs have."""
    if args.log_format == "json":
        fields = {"address": address, "seconds": round(seconds, 3)}
        logging.getLogger("tokenmill.access").info("%s", text, extra={"fields": fields})
    elif not quiet:
        console.print(text)


def configure_logging_of_servers(console: Console, *, log_format: str) -> None:
    """Warnings of everything, and what the server itself has to tell."""
    from tokenmill.observe.environment import log_level
    from tokenmill.observe.logging import configure_logging

    configure_logging(console, as_json=log_format == "json")
    ours = logging.getLogger("tokenmill")
    level = log_level("info").upper()
    names = ("tokenmill.access", "tokenmill.entrypoints.http", "tokenmill.entrypoints.router")
    for name in names:
        logging.getLogger(name).setLevel(level)
    uvicorn_logger = logging.getLogger("uvicorn")
    uvicorn_logger.handlers = ours.handlers
    uvicorn_logger.propagate = False
    uvicorn_logger.setLevel(logging.WARNING)


def warn_of_open_doors(serve_args: ServeArgs | RouteArgs, *, num_keys: int) -> None:
    """Log a warning if everybody may use a server."""
    loopback = serve_args.host in ("localhost", "::1") or serve_args.host.startswith("127.")
    if serve_args.uds is None and not loopback and not num_keys:
        logging.getLogger(__name__).warning(
            "host=%s without an API key: everybody who reaches it may use the server; set"
            " --api-key-file",
            serve_args.host,
        )
