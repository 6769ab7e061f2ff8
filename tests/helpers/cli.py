"""Runs the command line, in this process with a fake engine or in one of its own."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from unittest.mock import patch

from helpers.fake_llm import FakeLLM
from tokenmill.entrypoints.cli.main import run


@dataclass
class Result:
    exit_code: int
    stdout: str
    stderr: str
    llm: FakeLLM | None = None


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run_cli(*arguments, stdin="", interactive=False, interrupt_at=None):
    """One command with `FakeLLM` as its engine."""
    made = []

    def build_llm(**engine_args):
        made.append(FakeLLM(interrupt_at, **engine_args))
        return made[-1]

    logger = logging.getLogger("tokenmill")
    before = logger.handlers, logger.propagate, logger.level
    stdin_stream = (Terminal if interactive else io.StringIO)(stdin)
    out, err = io.StringIO(), io.StringIO()
    try:
        with patch.object(sys, "stdin", stdin_stream), redirect_stdout(out), redirect_stderr(err):
            exit_code = run(arguments, build_llm)
    finally:
        logger.handlers, logger.propagate, logger.level = before
    return Result(exit_code, out.getvalue(), err.getvalue(), made[0] if made else None)


def run_process(*arguments, stdin=None, **environment):
    """The same in a process of its own, with the real engine."""
    done = subprocess.run(
        [sys.executable, "-m", "tokenmill", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    return Result(done.returncode, done.stdout, done.stderr)
