"""The comparison of several processes with one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.tiny import write_wide_llama


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")


def test_the_table_has_ratios_to_one_process() -> None:
    import parallel

    rates = {
        parallel.ONE: {"a": 8.0, "b": 100.0},
        "tensor parallel": "it has 9 heads",
        "replicas": {"a": 4.0, "b": 150.0},
    }
    assert parallel.table(rates, ["a", "b"]) == [
        ["", "a", "b"],
        ["one process, tokens/s", "8.0", "100.0"],
        ["tensor parallel", "-", "-"],
        ["replicas", "0.50", "1.50"],
    ]


@pytest.mark.slow
def test_every_setting_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import parallel

    path = str(write_wide_llama(tmp_path))
    parallel.main(
        ["--models", path, "--repeats", "1", "--input-len", "40", "--output-len", "4", "--json"]
    )
    rates = json.loads(capsys.readouterr().out)[path]
    assert list(rates) == list(parallel.SETTINGS)
    assert all(rate > 0 for setting in rates.values() for rate in setting.values())
