"""The comparison with other engines, as far as it goes without them; and ShareGPT's file."""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from helpers.gguf import tiny_llama, write_llama_gguf
from tokenmill import LLM, SamplingParams

FOLDER = Path(__file__).parents[3] / "benchmarks"
PEERS = FOLDER / "peers"


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.syspath_prepend(PEERS)


def test_rates_follow_from_two_calls():
    from workloads import Workload, figures

    found = figures(Workload(4, 100, 11), whole_seconds=3.0, first_seconds=1.0)
    assert found.whole == pytest.approx(4 * 11 / 3)
    assert found.prompts == pytest.approx(400)
    assert found.decode == pytest.approx(4 * 10 / 2)
    assert figures(Workload(1, 100, 1), 2.0, 2.0).decode is None


def test_every_workload_is_warmed_up_and_measured(monkeypatch):
    import workloads

    now, calls = 0.0, []
    monkeypatch.setattr(workloads.time, "perf_counter", lambda: now)

    def generate(prompts, output_len):
        nonlocal now
        calls.append((len(prompts), len(prompts[0]), output_len))
        now += 1 + output_len
        return len(prompts) * output_len

    found = workloads.measure(generate, {"a": workloads.Workload(3, 5, 9)}, repeats=2)
    assert calls == [(3, 5, 8), (3, 5, 1), (3, 5, 1), (3, 5, 9), (3, 5, 9)]
    assert found["a"].decode == pytest.approx(3 * 8 / (10 - 2))
    with pytest.raises(AssertionError, match="0 new tokens"):
        workloads.measure(lambda prompts, output_len: 0, workloads.QUICK, repeats=1)


def test_prompts_are_ordinary_tokens_and_differ():
    from workloads import FULL

    prompts = FULL["many"].prompts()
    assert len(prompts) == 64
    assert len({tuple(prompt[:32]) for prompt in prompts}) == 64
    assert all(len(p) == 128 and min(p) >= 1_000 and max(p) < 49_000 for p in prompts)


def test_the_best_of_ours_is_compared_with_the_best_of_theirs():
    from compare import merged, ratios

    def figures(**decode):
        return {
            name.replace("_", " "): {"one": {"decode": rate, "whole": 1.0, "prompts": 1.0}}
            for name, rate in decode.items()
        }

    rounds = [
        {"tokenmill Q4_1": v["tokenmill"], "llama.cpp Q4_1": v["llama"]}
        for v in (
            figures(tokenmill=300.0, llama=100.0),
            figures(tokenmill=100.0, llama=50.0),
            figures(tokenmill=200.0, llama=80.0),
        )
    ]
    found = merged(rounds)
    assert found["tokenmill Q4_1"]["one"]["decode"] == 200.0
    first, second, *_ = ratios(found)
    assert first["ratio"] == pytest.approx(200 / 80)
    assert (first["bar"], first["best_of_theirs"]) == (1.8, ("llama.cpp Q4_1", 80.0))
    assert second["ratio"] is None  # OpenVINO is not there
    many = {"whole": 10.0, "decode": 1.0, "prompts": 1.0}
    found |= {
        "tokenmill Q4_1": {"many": many},
        "tokenmill bf16": {"many": {**many, "whole": 30.0}},
        "vLLM bf16": {"many": many},
    }
    row = next(row for row in ratios(found) if row["workload"] == "many" and row["bar"] == 3.0)
    assert row["best_of_ours"] == ("tokenmill bf16", 30.0)
    assert (row["ratio"], row["stretch"]) == (3.0, 4.0)


def test_engines_that_are_missing_or_fail_are_reported(tmp_path):
    import compare

    said = Console(record=True, file=io.StringIO(), width=300)
    missing = compare.Engine("Peer", ["x"], [tmp_path / "no-such-python"])
    assert compare.run(missing, "quick", 1, said) is None
    broken = compare.Engine("Other", [sys.executable, "-c", "raise SystemExit('out of luck')"], [])
    assert compare.run(broken, "quick", 1, said) is None
    text = said.export_text()
    assert f"Peer: missing, there is no {tmp_path / 'no-such-python'}" in text
    assert "Other: failed, out of luck" in text


def test_a_report_is_found_among_other_lines():
    import compare

    code = (
        "import sys; from workloads import *;"
        "report('x', 1.5, {'one': figures(Workload(1, 2, 3), 2.0, 1.0)}); print('bye')"
    )
    engine = compare.Engine("X", [sys.executable, "-c", code], [])
    found = compare.run(engine, "quick", 1, Console(file=io.StringIO()))
    assert (found["engine"], found["start_seconds"]) == ("x", 1.5)
    assert found["figures"]["one"] == {"whole": 1.5, "prompts": 2.0, "decode": 2.0}


def test_commands_name_what_a_peer_needs(tmp_path, monkeypatch):
    import compare

    monkeypatch.setattr(compare, "convert", lambda model, directory: directory)
    monkeypatch.setattr(compare, "resolve_model", lambda model: Path("/models/x.gguf"))
    options = argparse.Namespace(
        peers=tmp_path,
        vllm_python=tmp_path / "vllm/bin/python",
        openvino_python=tmp_path / "openvino/bin/python",
        llama_cpp=tmp_path / "llama-batched-bench",
    )
    by_name = {engine.name: engine for engine in compare.engines(options, num_threads=3)}
    assert set(by_name) == {*compare.OURS, *compare.OPENVINO, compare.VLLM, compare.LLAMA_CPP}
    assert all(not by_name[name].missing() for name in compare.OURS)
    assert by_name[compare.VLLM].environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-2"
    assert str(tmp_path / "vllm/lib/libiomp5.so") in by_name[compare.VLLM].environment["LD_PRELOAD"]
    assert by_name[compare.LLAMA_CPP].command[-2:] == ["/models/x.gguf", "3"]
    for engine in by_name.values():
        assert (PEERS / engine.command[1]).is_file()
    named = {name for bar in compare.BARS for name in (*bar.ours, *bar.theirs)}
    assert named <= set(by_name)


def test_a_converted_model_computes_the_same(tmp_path):
    from convert import convert

    gguf = tmp_path / "model.gguf"
    write_llama_gguf(gguf, tiny_llama(), "Q4_1")
    directory = convert(str(gguf), tmp_path / "hf", "float32")
    changed = (directory / "config.json").stat().st_mtime_ns
    assert convert(str(gguf), directory, "float32") == directory  # is there already
    assert (directory / "config.json").stat().st_mtime_ns == changed
    params = SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=1, ignore_eos=True)
    found = []
    for model in (gguf, directory):
        with LLM(str(model), dtype="float32", device="cpu", num_kv_blocks=16) as llm:
            (output,) = llm.generate(["some text"], params)
            found.append(
                (output.prompt_token_ids, output.outputs[0].token_ids, output.prompt_logprobs)
            )
    assert found[0] == found[1]


def test_sharegpt_is_read_up_to_its_last_whole_record(tmp_path):
    from sharegpt import conversations, messages

    records = [
        {"id": str(i), "conversations": [{"from": "human", "value": f"hé {i}"}]} for i in range(3)
    ]
    whole = json.dumps(records, indent=2)
    path = tmp_path / "data.json"
    path.write_text(whole)
    assert [c[0]["value"] for c in conversations(path)] == ["hé 0", "hé 1", "hé 2"]
    path.write_text(whole[:-20])
    assert [c[0]["value"] for c in conversations(path)] == ["hé 0", "hé 1"]
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "h"},
        {"from": "gpt", "value": "g"},
    ]
    assert messages(turns) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "h"},
        {"role": "assistant", "content": "g"},
    ]
