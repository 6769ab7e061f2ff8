"""How logs look on the command line. A library must not choose that for its host program.

Every module logs to `logging.getLogger(__name__)`. The package adds a `NullHandler`, so used as a
library tokenmill stays quiet until the host configures logging.
"""

from __future__ import annotations

import json
import logging
import traceback
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tokenmill.observe.environment import log_level

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (RFC 3339), level, logger, message, and what `fields` holds of
    a record that was logged with `extra={"fields": {...}}`.
    """

    def format(self, record: logging.LogRecord) -> str:
        values = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            values["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
        return json.dumps(values, default=str)


def configure_logging(console: Console, *, as_json: bool = False) -> None:
    """Send tokenmill's logs to `console`: in colour on a terminal, else one plain line each, or as
    JSON wherever it goes.

    A progress bar on the same console stays in place below the logs. The level is
    `$TOKENMILL_LOG_LEVEL`, else `warning`; raises `ConfigError` if it is not a level.
    """
    level = log_level("warning")
    handler: logging.Handler
    if as_json:
        handler = logging.StreamHandler(console.file)
        handler.setFormatter(JsonFormatter())
    elif console.is_terminal:
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
