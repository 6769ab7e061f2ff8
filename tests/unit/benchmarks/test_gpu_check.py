"""The script that checks and measures the CUDA path, where there is no GPU."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tokenmill.checkpoint.dummy import open_dummy
from tokenmill.models.loader import tensor_shapes

FOLDER = Path(__file__).parents[3] / "benchmarks" / "gpu"
SOURCE = Path(__file__).parents[3] / "src"


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)


def run_script(*arguments: str, timeout: float = 100.0) -> subprocess.CompletedProcess[str]:
    """With a bare copy of the source: neither what only the command line needs nor the compiled
    kernels can be imported.
    """
    code = (
        "import runpy, sys\n"
        "sys.modules['cyclopts'] = sys.modules['tokenmill._native'] = None\n"
        f"sys.path[:0] = [{str(FOLDER)!r}, {str(SOURCE)!r}]\n"
        f"runpy.run_path({str(FOLDER / 'check.py')!r}, run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """What all parts find on a tiny model."""
    path = tmp_path_factory.mktemp("gpu") / "results.json"
    done = run_script("--device", "cpu", "--quick", "--profile", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    return path


def test_every_part_runs_and_every_check_holds(results):
    found = json.loads(results.read_text())
    assert [(part, state["status"]) for part, state in found["parts"].items()] == [
        (part, "done") for part in ("limits", "kernels", "exact", "decode", "prefill", "families")
    ]
    checked = [row for row in found["rows"] if row["ok"] is not None]
    assert len(checked) > 30
    assert all(row["ok"] for row in checked)
    cases = {row["case"]: row for row in found["rows"]}
    assert cases["tiny (2 layers), preempted"]["figures"]["preempted"] > 0
    assert cases["tiny (2 layers), from the prefix cache"]["figures"]["cached"] > 0
    assert 0 < cases["tiny (2 layers), beside float32"]["figures"]["error"] < 0.02
    decoding = cases["tiny, 4"]
    assert decoding["figures"]["tok/s"] == pytest.approx(4e3 / decoding["ms"])
    assert decoding["share"] == pytest.approx(decoding["limit_ms"] / decoding["ms"])
    assert found["profiles"]["tiny, 4"][-1]["kernel"] == "all"


def test_every_kernel_has_a_case(results):
    found = json.loads(results.read_text())
    (row,) = (row for row in found["rows"] if row["case"] == "kernels without a case here")
    assert not row["figures"]["number"], f"benchmarks/gpu/gpucheck/cases lacks {row['figures']}"


def test_markdown_has_a_table_for_each_part(results):
    done = run_script("--markdown", str(results))
    assert done.returncode == 0, done.stderr
    for heading in (
        "Limits",
        "Kernels",
        "Exact",
        "Decode",
        "Prefill",
        "Families",
        "Kernels of a step: tiny, 1",
    ):
        assert f"### {heading}\n\n| " in done.stdout
    tables = [block for block in done.stdout.split("\n\n") if block.startswith("| ")]
    for table in tables:
        widths = {line.replace("\\|", "").count("|") for line in table.strip().splitlines()}
        assert len(widths) == 1, table


@pytest.mark.parametrize(
    "arguments", [("--only", "decod"), ("--shape", "70b"), ("--device", "tpu")]
)
def test_an_unknown_name_is_refused(arguments):
    done = run_script(*arguments)
    assert done.returncode == 2
    assert arguments[1] in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("name", ["tiny", "1b", "8b"])
def test_bytes_of_a_step_are_those_of_the_model(name, tmp_path):
    from gpucheck.models import SHAPES

    shape = SHAPES[name]
    (tmp_path / "config.json").write_text(json.dumps(shape.config()))
    shapes = open_dummy(tmp_path, tensor_shapes=tensor_shapes, seed=0).tensor_shapes
    matrices = sum(
        math.prod(size)
        for tensor, size in shapes.items()
        if len(size) == 2 and (shape.tied or tensor != "model.embed_tokens.weight")
    )
    assert shape.decode_bytes(0) == 2 * matrices
    assert shape.decode_bytes(10) - shape.decode_bytes(0) == 10 * shape.kv_bytes_per_token
    assert {"1b": 1.24e9, "8b": 7.50e9, "tiny": 1.44e6}[name] == pytest.approx(matrices, rel=0.01)
    # A prompt of one token costs what a step of one request does.
    assert shape.prefill_flops(1) == shape.decode_flops(1, 1)


def test_a_wrong_kernel_is_found():
    from gpucheck.cases.case import ROUNDED, SAME, Case, Place
    from gpucheck.kernels import _row
    from gpucheck.report import Report

    place, report = Place("cpu", small=True, quick=True), Report()
    right = place.randn(64, 64, dtype=torch.float32)

    def verdict(change, tolerance=ROUNDED):
        left = right.clone()
        change(left)
        case = Case("op", "sizes", lambda i: None, lambda: [(left, right, tolerance)])
        return _row(case, place, report)

    assert verdict(lambda left: None).ok
    assert verdict(lambda left: left.mul_(1.001)).ok
    assert not verdict(lambda left: left.mul_(1.01)).ok
    assert not verdict(lambda left: left[3, 5].add_(0.5)).ok
    assert not verdict(lambda left: left[3, 5].fill_(torch.nan)).ok

    assert verdict(lambda left: None, SAME).ok
    assert not verdict(lambda left: left[3, 5].mul_(1 + 2**-23), SAME).ok

    def raises(i):
        raise RuntimeError("no such kernel")

    row = _row(Case("op", "sizes", raises, list), place, report)
    assert row.ok is False
    assert "no such kernel" in row.figures["failed"]


def test_results_that_differ_by_a_bit_are_found():
    from gpucheck.exactness import _row
    from gpucheck.models import SHAPES

    alone = {"a": ((1, 2), ((1, -0.5, 1),)), "b": ((3,), ((3, -1.5, 1),))}
    none = {"preempted": 0}

    def verdict(found, counts=none, **more):
        return _row(SHAPES["tiny"], "somehow", alone, found, counts, **more)

    assert verdict(dict(alone)).ok
    other_bits = verdict(alone | {"b": ((3,), ((3, math.nextafter(-1.5, 0), 1),))})
    assert other_bits.ok is False
    assert (other_bits.figures["other bits"], other_bits.figures["other tokens"]) == (1, 0)
    assert verdict(alone | {"a": ((1, 3), ((1, -0.5, 1),))}).figures["other tokens"] == 1
    assert verdict(dict(alone), cause="preempted").ok is False
    assert verdict(dict(alone), {"preempted": 1}, cause="preempted").ok


def test_a_part_that_breaks_off_keeps_its_rows(tmp_path, monkeypatch, capsys):
    import check
    from gpucheck.report import OutOfTime, Report, Row

    def rows(part, options, report, budget):
        yield Row(part, "first", 1.0)
        raise {"limits": OutOfTime, "exact": RuntimeError("broken")}[part]

    monkeypatch.setattr(check, "rows_of", rows)
    path = tmp_path / "results.json"
    code = check.main(["--device", "cpu", "--only", "limits,exact", "--json", str(path)])
    report = Report.load(path)
    assert [row.part for row in report.rows] == ["limits", "exact"]
    assert report.parts["limits"].status == "out of time"
    assert report.parts["exact"].status == "failed: RuntimeError: broken"
    assert code == 1
    assert "FAILED  exact: failed: RuntimeError: broken" in capsys.readouterr().out


def test_parts_in_processes_of_their_own_leave_what_they_found(tmp_path):
    path = tmp_path / "results.json"
    done = run_script(
        *("--device", "cpu", "--isolate", "--quick", "--only", "prefill", "--json", str(path))
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert [state["status"] for state in found["parts"].values()] == ["done", "done"]
    limits = {
        row["case"]: row["figures"]["T/s"]
        for row in found["rows"]
        if row["part"] == "limits" and "T/s" in row["figures"]
    }
    (prefill,) = (row for row in found["rows"] if row["case"] == "tiny, 1 x 48")
    done_flops = prefill["figures"]["TFLOP/s"]
    assert prefill["share"] == pytest.approx(done_flops / limits["bf16 matmul"])
    assert prefill["figures"]["first token ms"] == prefill["ms"]


@pytest.mark.parametrize(
    ("overrun", "num_started"), [(0.0, 6), (20.0, 5)], ids=["in time", "all hang"]
)
def test_a_run_ends_in_time_whatever_its_parts_do(overrun, num_started, monkeypatch):
    """Each part takes all that it may, or is ended; where these overrun, the last is left out."""
    import check
    from gpucheck import report

    now, started = [0.0], []

    def end_of(command, seconds):
        now[0] += seconds - check.GRACE_SECONDS + overrun
        started.append(command[command.index("--only") + 1])
        return ""

    monkeypatch.setattr(report, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(check, "end_of", end_of)
    check.main(["--device", "cpu", "--isolate"])
    assert started == list(check.SECONDS)[:num_started]
    assert now[0] <= check.TOTAL_SECONDS
    if not overrun:
        assert now[0] == sum(check.SECONDS.values()), "none got less than its own time"


def test_a_process_that_dies_or_hangs_is_reported(tmp_path):
    import check
    from gpucheck.report import Report, Row

    def ended(code: str, seconds: float = 20.0) -> str:
        return check.end_of([sys.executable, "-c", code], seconds)

    assert ended("") == ended("raise SystemExit(1)") == ""
    assert ended("import os; os.abort()") == "failed: exit code -6"
    assert ended("import time; time.sleep(60)", 0.5) == "failed: had not ended after 0 s"

    found = tmp_path / "decode.json"
    Report(path=found).add(Row("decode", "first", 1.0))
    report = Report()
    check.take(report, "decode", found, "failed: exit code -6")
    assert [row.case for row in report.rows] == ["first"]
    assert report.failures == ["decode: failed: exit code -6"]
    check.take(report, "exact", tmp_path / "missing.json", "")
    assert report.parts["exact"].status == "failed: wrote nothing"
