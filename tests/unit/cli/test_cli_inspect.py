"""`tokenmill inspect`: arithmetic on headers, no torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from helpers.cli import run_cli
from helpers.tiny import tiny_llama, write_tiny_llama
from tokenmill.config.machine import Machine
from tokenmill.engine import inspection

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
}


def report_of(*arguments):
    result = run_cli("inspect", *arguments, "--json", "--quiet", "--device", "cpu")
    assert result.exit_code == 0
    return json.loads(result.stdout)


def test_a_tiny_model(tmp_path):
    path = write_tiny_llama(tmp_path, num_hidden_layers=3, max_position_embeddings=5000)
    report = report_of(str(path), "--dtype", "float32")
    sizes = report["parameters"]
    vocab_size = sizes["vocab_size"]
    per_layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128 + 2 * 64
    assert report["is_supported"]
    assert report["num_parameters"] == 2 * vocab_size * 64 + 3 * per_layer + 64
    assert report["formats"] == {"F32": report["num_parameters"]}
    assert report["file_bytes"] == report["weight_bytes"] == 4 * report["num_parameters"]
    assert [need["context"] for need in report["needs"]] == [1024, 4096, 5000]
    per_token = 3 * 2 * 32 * 4
    block = 32 * per_token
    assert report["needs"][0]["kv_cache"] == (1024 // 32 + 1) * block
    assert report["needs"][2]["kv_cache"] == (-(-5000 // 32) + 1) * block
    assert all(need["fits"] for need in report["needs"])


def test_what_does_not_fit_says_so(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    arguments = (str(tmp_path), "--load-format", "dummy", "--dtype", "bfloat16")
    report = report_of(*arguments)
    assert report["num_parameters"] > 4 * 128 * 3 * 768 * 2048  # those of the experts
    totals = [need["total"] for need in report["needs"]]
    assert totals == sorted(totals)
    small = Machine(2, total_memory=16 << 30, available_memory=(totals[0] + totals[-1]) // 2)
    monkeypatch.setattr(inspection, "find_machine", lambda args: small)
    fits = [need["fits"] for need in report_of(*arguments)["needs"]]
    assert fits[0]
    assert not fits[-1]
    text = run_cli("inspect", str(tmp_path), "--load-format", "dummy", "-q").stdout
    assert "Qwen3MoeForCausalLM" in text
    assert "40,960" in text
    assert "does not fit" in text
    assert "2.50 B" in text


def test_an_architecture_that_is_not_ours(tmp_path):
    path = write_tiny_llama(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    assert not report_of(str(path))["is_supported"]
    assert "MambaForCausalLM (not supported)" in run_cli("inspect", str(path), "-q").stdout


@pytest.mark.parametrize("arguments", [["inspect", "--help"], ["inspect", "MODEL", "-q"]])
def test_no_torch_is_loaded(arguments):
    arguments = [str(tiny_llama()) if each == "MODEL" else each for each in arguments]
    code = (
        "import sys; from tokenmill.entrypoints.cli.main import run;"
        f"code = run({arguments!r}); print('MODULES', *sys.modules); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "torch" not in done.stdout.split("MODULES")[1].split()
