"""What is shown while a model is fetched and loaded."""

from __future__ import annotations

import io
import re
import sys

import pytest
from rich.console import Console

from tokenmill.entrypoints.cli.progress import loading_progress
from tokenmill.entrypoints.progress import start_progress
from tokenmill.observe.rate import rate


def shown_on(console, *, shown=True):
    with loading_progress(console, shown=shown) as on_progress:
        on_progress("download", 1_000_000, 4_000_000)
        on_progress("download", 4_000_000, 4_000_000)
        on_progress("load", 6_500_000, 6_500_000)
    return console.file.getvalue()


def test_a_terminal_gets_a_bar_with_bytes_for_each_stage():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown_on(console))
    assert "100 bytes" not in text  # the total of a bar that does not know its own
    assert re.search(r"download ━+ 4\.0/4\.0 MB .*0:00:00", text)
    assert re.search(r"load +━+ 6\.5/6\.5 MB", text)


def test_a_file_gets_a_line_for_each_stage_with_its_rate():
    lines = shown_on(Console(file=io.StringIO(), width=120)).splitlines()
    assert [re.sub(r"[0-9.]+ s \([0-9.]+ [MG]B/s\)$", "", line) for line in lines] == [
        "download: 4.0 MB in ",
        "load: 6.5 MB in ",
    ]


def test_nothing_is_shown_if_it_is_not_wanted():
    assert shown_on(Console(file=io.StringIO(), force_terminal=True), shown=False) == ""
    assert shown_on(Console(file=io.StringIO()), shown=False) == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_an_offline_engine_shows_bars_on_a_terminal_unless_its_caller_is_told(monkeypatch):
    monkeypatch.setattr("sys.stderr", Terminal())
    with start_progress(None) as on_progress:
        on_progress("load", 3_000_000, 6_000_000)
    assert "3.0/6.0" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", sys.stderr.getvalue())
    told: list[tuple[str, int, int]] = []
    monkeypatch.setattr("sys.stderr", Terminal())
    with start_progress(lambda *report: told.append(report)) as on_progress:
        on_progress("load", 1, 2)
    assert told == [("load", 1, 2)]
    assert sys.stderr.getvalue() == ""


def test_an_offline_engine_shows_nothing_elsewhere(monkeypatch):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with start_progress(None) as on_progress:
        assert on_progress is None


@pytest.mark.parametrize(
    ("num_bytes", "seconds", "words"),
    [
        (2_471_628_800, 1.5, "2.47 GB in 1.50 s (1.65 GB/s)"),
        (98_362_432, 0.25, "98.4 MB in 0.25 s (393.4 MB/s)"),
        (0, 0.0, "0.0 MB in 0.00 s (0.0 MB/s)"),
    ],
)
def test_rates_in_words(num_bytes, seconds, words):
    assert rate(num_bytes, seconds) == words
