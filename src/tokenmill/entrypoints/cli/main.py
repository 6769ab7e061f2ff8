"""The command `tokenmill`.

Exit codes: 0 done; 2 the command line or the request is wrong; 1 anything else went wrong; 130
interrupted by Ctrl-C.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Parameter, UnusedCliTokensError

import tokenmill
from tokenmill.entrypoints.cli.session import BuildLLM, build_llm
from tokenmill.errors import ConfigError, InvalidRequestError, TokenmillError
from tokenmill.observe.environment import wants_tracebacks

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_OUTPUT_LOST = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}

app = App(
    name="tokenmill",
    help="An engine for LLM inference and serving.",
    version=f"tokenmill {tokenmill.__version__}",
    help_format="plaintext",  # rendering Markdown would double the time of --help
    default_parameter=Parameter(negative_iterable=()),
)
_COMMANDS = (
    ("chat", "chat:app", "Talk with a model, or ask it one question."),
    ("generate", "generate:app", "Continue prompts."),
    ("serve", "serve:app", "Serve a model over HTTP."),
    ("route", "route:app", "One address in front of several servers, by prefix and load."),
    ("run-batch", "run_batch:app", "Answer a file of requests."),
    ("models", "models:app", "List, fetch and remove models."),
    (
        "inspect",
        "inspect:inspect_command",
        "Print what a model is, what it needs, and whether it fits this machine.",
    ),
    (
        "quantize",
        "quantize:quantize_command",
        "Write a model's weights in fewer bits, packed for the CPU's kernels.",
    ),
    ("bench", "bench:app", "Measure this machine: figures beside their limits."),
    ("simulate", "simulate:app", "Say what engines would do with a load, without running one."),
    (
        "collect-env",
        "collect_env:collect_env",
        "Print what a bug report needs to say about this machine.",
    ),
)
"""Name, place in this package, and what it does: what is used most comes first in --help too."""
for _place, (_name, _where, _help) in enumerate(_COMMANDS):
    app.command(f"{__package__}.{_where}", name=_name, help=_help, sort_key=_place)


def main() -> None:
    """Entry point of the installed command."""
    _prepare_streams()
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str], build_llm: BuildLLM = build_llm) -> int:
    """Run one command and return its exit code; `build_llm` makes its engine."""
    try:
        exit_code = _run(arguments, build_llm)
        sys.stdout.flush()
        return exit_code
    except UnusedCliTokensError as error:
        left = " ".join(map(repr, error.unused_tokens or ()))
        why = (
            f"the command takes fewer arguments: {left} would be unused. See --help; where a"
            " command runs a model, --model names it."
        )
        return _report(ConfigError(why), EXIT_USAGE)
    except (CycloptsError, InvalidRequestError, ConfigError) as error:
        return _report(error, EXIT_USAGE)
    except TokenmillError as error:
        return _report(error, EXIT_FAILURE)
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.filename is not None or error.errno not in _OUTPUT_LOST:
            raise
        # What stdout still holds is dropped, not tried again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:  # its reader has left, as in `tokenmill ... | head`
            return EXIT_FAILURE
        return _report(TokenmillError(f"Cannot write the output: {error.strerror}."), EXIT_FAILURE)


def _prepare_streams() -> None:
    """Standard streams that are closed are empty, here and in processes that are started; text that
    stdout has no bytes for reads as `?`, and bytes of stdin that are no text are an error, whatever
    the locale makes of them.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    for stream, errors in ((sys.stdin, "strict"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _run(arguments: Sequence[str], build_llm: BuildLLM) -> int:
    *words, last = arguments or [""]
    if last in app.help_flags and not app.parse_commands(words)[2]:
        # Only commands before it: parsing would collect all flags once more, for 50 ms.
        app.help_print(words)
        return 0
    command, bound, not_parsed = app.parse_args(arguments, exit_on_error=False, print_error=False)
    handed_in = {"build_llm": build_llm} if "build_llm" in not_parsed else {}
    return command(*bound.args, **bound.kwargs, **handed_in) or 0


def _report(error: Exception, exit_code: int) -> int:
    if wants_tracebacks():
        traceback.print_exception(error)
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return exit_code
