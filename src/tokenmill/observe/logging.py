"""How logs look on the command line. A library must not choose that for its host program.

Every module logs to `logging.getLogger(__name__)`. The package adds a `NullHandler`, so used as a
library tokenmill stays quiet until the host configures logging.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tokenmill.observe.environment import log_level

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging(console: Console, default_level: str = "warning") -> None:
    """Send tokenmill's logs to `console`: in colour on a terminal, else one plain line each.

    A progress bar on the same console stays in place below the logs. The level is
    `$TOKENMILL_LOG_LEVEL`, else `default_level`; raises `ConfigError` if it is not a level.
    """
    level = log_level(default_level)
    handler: logging.Handler
    if console.is_terminal:
        from rich.logging import RichHandler

        handler = RichHandler(console=console, show_path=False, omit_repeated_times=False)
        handler.setFormatter(logging.Formatter("%(message)s", datefmt="%H:%M:%S"))
    else:
        handler = logging.StreamHandler(console.file)
        handler.setFormatter(logging.Formatter(PLAIN_FORMAT))
    logger = logging.getLogger("tokenmill")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())
