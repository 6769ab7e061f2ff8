"""The validation of the simulator, on a tiny model: that it runs, and compares what it says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from helpers.tiny import tiny_llama
from tokenmill.simulate.fitting import read_step_times

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import simulate_validation

ARGUMENTS = (
    "--rates", "50,200", "--num-requests", "8", "--input-len", "20", "--output-len", "6",
)  # fmt: skip
ENGINE = {"device": "cpu", "dtype": "float32", "num_threads": 1, "num_kv_blocks": 64}


def test_half_is_learnt_from_and_half_is_checked(tmp_path, capsys):
    path = tmp_path / "steps.jsonl"
    arguments = (*ARGUMENTS, "--model", str(tiny_llama()), "--engine", json.dumps(ENGINE))
    simulate_validation.main([*arguments, "--json", "--step-times", str(path)])
    found = json.loads(capsys.readouterr().out)
    assert found["num_steps_learnt"] == len(read_step_times(path)) > 0
    assert found["steps"]["num_steps"] > 0
    assert [check["rate"] for check in found["requests"]] == [50.0, 200.0]
    for check in found["requests"]:
        measured, simulated = check["measured"], check["simulated"]
        assert measured.keys() == simulated.keys()
        for name in simulate_validation.LATENCIES:
            assert measured[name]["mean"] > 0
            assert simulated[name]["mean"] > 0
    simulate_validation.show(found)
    shown = capsys.readouterr().out
    assert "e2el p99, ms" in shown
    assert "200 requests/s" in shown


def test_settings_that_make_no_sense():
    with pytest.raises(SystemExit):
        simulate_validation.main(["--rates", "1", "--num-requests", "x"])
