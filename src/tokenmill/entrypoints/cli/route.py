"""`tokenmill route`: several servers behind one address.

Exit codes: 0 stopped by SIGINT or SIGTERM; 2 a setting is wrong.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Group, Parameter

from tokenmill.config.route_args import RouteArgs
from tokenmill.entrypoints.cli import event_loop
from tokenmill.entrypoints.cli.flags import Quiet, option_flags
from tokenmill.entrypoints.cli.serve import (
    CONFIG,
    PRINT_CONFIG,
    check_packages,
    config_lines,
    configure_logging_of_servers,
    tell_ready,
    warn_of_open_doors,
)
from tokenmill.entrypoints.cli.serve_sources import Sources

if TYPE_CHECKING:
    from tokenmill.entrypoints.router.state import RouterState

ROUTER = Parameter(name="*", group=Group("Router", sort_key=1))

if TYPE_CHECKING:  # a class that is made at run time is no type to a checker
    RouterFlags = RouteArgs
else:
    RouterFlags = option_flags(RouteArgs)
ROUTER_DEFAULTS = RouterFlags()

NOTES = """
Every flag may come from the environment (TOKENMILL_ROUTE_PORT for --port) or from --config as well;
the command line wins over the environment, and that over the file. Backends may be servers of
tokenmill or others that speak OpenAI's protocol, on this machine or elsewhere.
"""

sources = Sources(command="route")
app = App(
    name="route",
    usage="Usage: tokenmill route --backend URL [--backend URL ...] [OPTIONS]",
    help_epilogue=NOTES.replace("\n", " ").strip(),
    config=[sources],
)


@app.default
def route(
    *,
    config: Annotated[Path | None, CONFIG] = None,
    print_config: Annotated[bool, PRINT_CONFIG] = False,
    quiet: Quiet = False,
    router: Annotated[RouterFlags, ROUTER] = ROUTER_DEFAULTS,
) -> int:
    """One address in front of several servers: by prefix and load, around those that are down."""
    args = RouteArgs(**asdict(router))
    if print_config:
        print("\n".join(config_lines(asdict(args), sources.origins)))
        return 0
    from rich.console import Console

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    configure_logging_of_servers(console, log_format=args.log_format)
    check_packages("route")
    from tokenmill.entrypoints.http.auth import api_keys
    from tokenmill.entrypoints.router.server import run_router

    warn_of_open_doors(args, num_keys=len(api_keys(args)))

    def announce(state: RouterState, address: str, seconds: float) -> None:
        text = banner(state, address, seconds)
        tell_ready(console, args, text, address, seconds, quiet=quiet)

    return event_loop.run(run_router(args, announce=announce))


def banner(state: RouterState, address: str, seconds: float) -> str:
    """Policy, backends, address; several lines."""
    import tokenmill

    lines = [f"tokenmill {tokenmill.__version__} router is ready after {seconds:.1f} s"]
    lines.append(f"  {'policy':<12} {state.args.policy}")
    for each in state.backends:
        models = "any model" if each.models is None else ", ".join(sorted(each.models))
        lines.append(f"  {'backend':<12} {each.url} ({models if each.is_up else 'down'})")
    lines.append(f"  {'address':<12} {address}")
    return "\n".join(lines)
