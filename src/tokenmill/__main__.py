"""`python -m tokenmill`, and what the installed command runs."""

from __future__ import annotations

import sys


def main() -> None:
    """The command line. Ctrl-C while it is loaded ends it without a traceback, as it does later."""
    try:
        from tokenmill.entrypoints.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
