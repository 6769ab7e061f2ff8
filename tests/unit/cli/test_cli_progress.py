"""What is shown while a model is fetched and loaded."""

from __future__ import annotations

import io
import re

from rich.console import Console

from tokenmill.entrypoints.cli.progress import loading_progress


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


def test_a_file_gets_a_line_for_each_stage():
    lines = shown_on(Console(file=io.StringIO(), width=120)).splitlines()
    assert [re.sub(r"[0-9.]+ s$", "", line) for line in lines] == [
        "download: 4.0 MB in ",
        "load: 6.5 MB in ",
    ]


def test_nothing_is_shown_if_it_is_not_wanted():
    assert shown_on(Console(file=io.StringIO(), force_terminal=True), shown=False) == ""
    assert shown_on(Console(file=io.StringIO()), shown=False) == ""
