"""`tokenmill simulate` on a tiny model's headers, and on steps that its engine has made."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout

import pytest

from helpers.cli import run_cli
from helpers.tiny import tiny_llama
from tokenmill.entrypoints.cli.main import run

ENGINE = ("--model", str(tiny_llama()), "--device", "cpu", "--num-kv-blocks", "64")
MACHINE = ("--bandwidth", "0.1", "--tflops", "0.001")
SLOW = (*MACHINE, "--step-overhead", "20", "--max-num-seqs", "4")
LOAD = ("--num-requests", "40", "--input-len", "40", "--output-len", "8")


def simulate(*arguments):
    return run_cli("simulate", *ENGINE, "--quiet", *arguments)


def figures(*arguments):
    result = simulate(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_tables():
    goals = ("--goodput", "ttft:1000", "--priorities", "0:1,1:1", "--percentiles", "50,99.9")
    policy = ("--scheduling-policy", "priority", "--num-workers", "2", "--routing", "prefix")
    result = simulate(*MACHINE, *LOAD, *goals, *policy)
    assert result.exit_code == 0, result.stderr
    for words in ("on 2 workers (prefix): 40 requests", "p99.9", "TTFT", "priority 1", "queue",
                  "KV cache", "goodput", "keep ttft:1000"):  # fmt: skip
        assert words in result.stdout
    assert "simulated in" in result.stderr


def test_priorities_that_would_change_nothing():
    result = simulate(*MACHINE, *LOAD, "--priorities", "0:1,1:1")
    assert result.exit_code == 2
    assert "scheduling_policy='fcfs'; set it to 'priority'" in result.stderr


def test_one_json_object_and_the_same_again():
    first, second = figures(*MACHINE, *LOAD), figures(*MACHINE, *LOAD)
    assert first == second
    assert first["command"] == "simulate"
    assert first["options"]["request_rate"] == 1.0
    assert (first["num_completed"], first["num_output_tokens"]) == (40, 320)
    assert first["goodput"] is None
    other = figures(*MACHINE, *LOAD, "--seed", "1")
    assert other["ttft"] != first["ttft"]


def test_a_faster_machine_is_faster():
    slow = figures(*MACHINE, *LOAD)
    fast = figures("--bandwidth", "10", "--tflops", "1", *LOAD)
    assert fast["e2el"]["mean"] < slow["e2el"]["mean"]


def test_this_machine_is_measured_where_nothing_is_given():
    found = figures(*LOAD, "--bandwidth", "5")
    assert found["num_completed"] == 40
    assert found["e2el"]["mean"] > 0


def test_the_largest_rate():
    found = figures(*SLOW, *LOAD, "--search", "rate", "--goodput", "e2el:500")
    rate = found["options"]["request_rate"]
    assert found["share_good"] >= 0.99
    assert {each["value"] for each in found["trials"] if each["keeps"]} >= {rate}
    assert all(each["value"] > rate for each in found["trials"] if not each["keeps"])
    result = simulate(*SLOW, *LOAD, "--search", "rate", "--goodput", "e2el:500")
    assert "too few" in result.stdout
    assert "requests/s are the most with which 99.0% of the requests keep e2el:500" in result.stdout


def test_the_fewest_workers():
    load = (*LOAD, "--request-rate", "100", "--goodput", "ttft:200", "--search", "workers")
    found = figures(*SLOW, *load, "--routing", "least_loaded")
    assert found["num_workers"] > 1
    assert found["options"]["num_workers"] == found["num_workers"]


def test_a_gpu_that_is_not_here():
    gpu = ("--model", str(tiny_llama()), "--device", "cuda", "--memory", "80")
    machine = ("--bandwidth", "3000", "--tflops", "500")
    found = run_cli("simulate", *gpu, *machine, *LOAD, "--json", "--quiet")
    assert found.exit_code == 0, found.stderr
    assert json.loads(found.stdout)["num_completed"] == 40


def test_steps_that_an_engine_has_made(tmp_path):
    steps = tmp_path / "steps.jsonl"
    bench = ("--num-prompts", "8", "--input-len", "40", "--output-len", "8", "--num-threads", "1")
    with redirect_stdout(io.StringIO()):  # a real engine
        assert run(["bench", "throughput", *ENGINE, *bench, "-q", "--step-times", str(steps)]) == 0
    times = [json.loads(line) for line in steps.read_text().splitlines()]
    assert sum(each["num_tokens"] for each in times) == 8 * (40 + 7)
    assert sum(each["num_logits"] for each in times) == 8 * 8
    # Of each request, the keys that tokens 0 to 46 see, in each layer.
    num_layers = sum(each["num_scores"] for each in times) // (8 * sum(range(1, 48)))
    assert num_layers >= 1
    assert sum(each["num_scores"] for each in times) == num_layers * 8 * sum(range(1, 48))
    found = figures(*LOAD, "--step-times", str(steps))
    assert found["num_completed"] == 40


def test_conversations(tmp_path):
    path = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "a" * 80}, {"from": "gpt", "value": "b" * 40}]
    path.write_text(json.dumps([{"conversations": turns}]))
    found = figures(*MACHINE, "--num-requests", "5", "--sharegpt", str(path))
    assert (found["num_prompt_tokens"], found["num_output_tokens"]) == (5 * 20, 5 * 10)


def test_a_trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"time": 3, "input_len": 20, "output_len": 4}\n')
    found = figures(*MACHINE, "--trace", str(path))
    assert (found["num_completed"], found["num_output_tokens"]) == (1, 4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--request-rate", "0"), "request_rate=0.0 must be more than 0"),
        (("--search", "rate"), "search=rate needs goals"),
        (("--trace", "/none"), "cannot be read"),
        (("--num-workers", "100000000"), "Raise block_size"),
        (("--runner", "pooling"), "pools (runner='pooling'), which `tokenmill simulate` does not"),
        (("--data-parallel-size", "2"), "num_workers says how many"),
        (("--tensor-parallel-size", "2"), "is divided among 2 processes"),
        (("--kv-offload-dir", "/tmp"), "KV is kept outside"),
    ],
)
def test_what_cannot_be_is_said(arguments, words):
    result = simulate(*MACHINE, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
