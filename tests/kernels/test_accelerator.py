"""The GPU as the driver's tool describes it."""

from __future__ import annotations

import stat

import pytest

from tokenmill.config.machine import Accelerator
from tokenmill.kernels.accelerator import find_accelerator, parse_answer

MIB = 1 << 20


def test_an_answer_is_read():
    found = parse_answer("NVIDIA H200, 9.0, 143771, 143152\n")
    assert found == Accelerator("NVIDIA H200", (9, 0), 143771 * MIB, 143152 * MIB)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("Tesla V100-SXM2-16GB, 7.0, 16160, 16000", "7.0; 8.0 is the lowest"),
        ("No devices were found", "that we do not know"),
        ("NVIDIA H200, 9.0, [N/A], 5", "that we do not know"),
    ],
)
def test_answers_that_give_no_gpu(answer, words):
    assert words in parse_answer(answer)


def make_tool(directory, monkeypatch, script):
    tool = directory / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.11.0")


def test_the_first_visible_gpu_is_asked_for(tmp_path, monkeypatch):
    make_tool(tmp_path, monkeypatch, 'for last; do :; done; echo "GPU $last, 9.0, 10, 9"')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert find_accelerator() == Accelerator("GPU --id=3", (9, 0), 10 * MIB, 9 * MIB)


def test_why_there_is_none(tmp_path, monkeypatch):
    make_tool(tmp_path, monkeypatch, "exit 9")
    assert "nvidia-smi failed" in find_accelerator()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "hides every GPU" in find_accelerator()
    monkeypatch.setenv("PATH", "/nowhere")
    assert "no NVIDIA driver" in find_accelerator()


def test_a_torch_for_cpus_is_told(tmp_path, monkeypatch):
    make_tool(tmp_path, monkeypatch, "exit 9")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0+cpu")
    assert "build for CPUs only" in find_accelerator()
