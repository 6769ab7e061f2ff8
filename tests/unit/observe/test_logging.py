"""Quiet as a library, plain or in colour on the command line."""

from __future__ import annotations

import io
import logging
import subprocess
import sys

import pytest
from rich.console import Console

from tokenmill.observe.logging import configure_logging


@pytest.fixture(autouse=True)
def logger():
    logger = logging.getLogger("tokenmill")
    before = logger.handlers, logger.propagate, logger.level
    yield logger
    logger.handlers, logger.propagate, logger.level = before


def test_as_a_library_nothing_is_printed():
    code = "import logging, tokenmill; logging.getLogger('tokenmill.x').error('not shown')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_plain_lines_where_there_is_no_terminal(logger, monkeypatch):
    monkeypatch.setenv("TOKENMILL_LOG_LEVEL", "info")
    stream = io.StringIO()
    configure_logging(Console(file=stream))
    logging.getLogger("tokenmill.part").info("[bold] %d", 3)
    logging.getLogger("tokenmill.part").debug("not shown")
    assert stream.getvalue().endswith(" INFO tokenmill.part: [bold] 3\n")
    assert stream.getvalue().count("\n") == 1


def test_colour_on_a_terminal(logger):
    stream = io.StringIO()
    configure_logging(Console(file=stream, force_terminal=True, color_system="standard"))
    logging.getLogger("tokenmill.part").warning("careful")
    logging.getLogger("tokenmill.part").info("below the default level")
    assert "\x1b[" in stream.getvalue()
    assert "careful" in stream.getvalue()
    assert "below" not in stream.getvalue()


def test_configuring_twice_does_not_print_twice(logger):
    stream = io.StringIO()
    configure_logging(Console(file=stream))
    configure_logging(Console(file=stream))
    logging.getLogger("tokenmill.part").warning("once")
    assert stream.getvalue().count("once") == 1
