"""`tokenmill bench` on a tiny model, with the real engine."""

from __future__ import annotations

import io
import json
import logging
from contextlib import redirect_stderr, redirect_stdout

import pytest

from helpers.cli import Result
from helpers.tiny import write_wide_llama
from tokenmill import LLM
from tokenmill.entrypoints.bench import kernel_cases, serving
from tokenmill.entrypoints.bench.profile import STAGES
from tokenmill.entrypoints.bench.recorder import CORE_STEP, EngineParts, StepRecorder
from tokenmill.entrypoints.bench.serving import phases_of, random_prompts, run_requests
from tokenmill.entrypoints.cli.main import run
from tokenmill.kernels import native
from tokenmill.sampling_params import SamplingParams

ENGINE = ("--device", "cpu", "--num-kv-blocks", "64", "--max-num-batched-tokens", "64")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_wide_llama(tmp_path_factory.mktemp("bench") / "model"))


def bench(*arguments):
    logger = logging.getLogger("tokenmill")
    before = logger.handlers, logger.propagate, logger.level
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            exit_code = run(["bench", *arguments])
    finally:
        logger.handlers, logger.propagate, logger.level = before
    return Result(exit_code, out.getvalue(), err.getvalue())


def report(*arguments):
    result = bench(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def check_phase(phase):
    assert phase["tokens_per_second"] == pytest.approx(phase["num_tokens"] / phase["seconds"])
    assert phase["share_of_limit"] == pytest.approx(phase["limit_seconds"] / phase["seconds"])
    assert phase["limit_seconds"] >= 0.999 * phase["num_bytes"] / phase["read_bandwidth"]
    assert phase["read_bandwidth"] > 1e8
    assert phase["step_milliseconds"] <= phase["step_milliseconds_p99"]


def test_latency_of_a_batch(model):
    figures = report(
        *("latency", "--model", model, *ENGINE, "--batch-size", "2", "--input-len", "50"),
        *("--output-len", "9", "--num-iters", "3", "--quiet"),
    )
    assert figures["command"] == "latency"
    assert len(figures["all_seconds"]) == 3
    assert figures["seconds"] == sorted(figures["all_seconds"])[1]
    assert figures["output_tokens_per_second"] == pytest.approx(2 * 9 / figures["seconds"])
    prompts, decode = figures["phases"]
    # 64 tokens a step: 50 of the first and 14 of the second; 36 more beside the first's next token.
    assert (prompts["phase"], prompts["num_steps"], prompts["num_tokens"]) == ("prompts", 2, 101)
    assert (decode["phase"], decode["num_steps"], decode["num_tokens"]) == ("decode", 8, 2 * 7 + 1)
    check_phase(prompts)
    check_phase(decode)
    assert figures["profile"] == {}


def test_latency_with_drafts(model):
    """Random prompts repeat nothing, but greedy answers of a tiny model do."""
    lookup = '{"method": "ngram", "prompt_lookup_min": 1, "adaptive": false}'
    settings = (
        *("latency", "--model", model, *ENGINE, "--speculative-config", lookup),
        *("--output-len", "60", "--num-iters", "1", "--quiet"),
    )
    figures = report(*settings)
    drafts = figures["drafts"]
    assert drafts["num_draft_tokens"] > 0
    assert 0 <= drafts["share_held"] <= 1
    assert drafts["mean_accepted_length"] >= 1
    decode = figures["phases"][-1]
    assert (decode["phase"], decode["num_steps"] < 60) == ("decode", True)
    result = bench(*settings)
    assert f"of {drafts['num_draft_tokens']} drafts" in result.stdout


def test_throughput_with_a_profile(model):
    result = bench(
        *("throughput", "--model", model, *ENGINE, "--num-prompts", "9", "--input-len", "5"),
        *("--output-len", "4", "--profile"),
    )
    assert result.exit_code == 0, result.stderr
    assert "9 requests of 5 prompt and 4 new tokens" in result.stdout
    for stage in (*STAGES, "between", "step", "output"):
        assert f"│ {stage} " in result.stdout
    assert "prompts: a step reads" in result.stdout
    assert "decode: a step reads" in result.stdout
    for kernel in ("attention", "add_rms_norm", "gated_activation", "write_kv"):
        assert f"│ {kernel} " in result.stdout


def test_kernel_time_is_part_of_the_stages(model, monkeypatch):
    measured = []

    def run_and_keep(*arguments, **options):
        measured.append(run_requests(*arguments, **options))
        return measured[-1]

    monkeypatch.setattr(serving, "run_requests", run_and_keep)
    figures = report("latency", "--model", model, *ENGINE, "--output-len", "9", "--profile")
    for stages in figures["profile"].values():
        by_name = {stage["stage"]: stage for stage in stages}
        assert list(by_name) == [*STAGES, "between", "step", "output"]
        for name in ("forward", "logits", "sample", "step"):
            assert 0 < by_name[name]["kernel_milliseconds"] <= by_name[name]["milliseconds"]
        for name in ("schedule", "settle", "output"):
            assert by_name[name]["kernel_milliseconds"] == 0
            assert by_name[name]["milliseconds"] > 0
    assert figures["host_milliseconds"].keys() == figures["profile"].keys()
    # Taken from a run of its own, the last one, whose clocks stop at whole steps.
    for phase, steps in phases_of(measured[-1].steps).items():
        step_times = [step.stages[CORE_STEP] for step in steps]
        assert all(0 < each.kernel_seconds < each.seconds for each in step_times)
        outside = sorted(1e3 * (each.seconds - each.kernel_seconds) for each in step_times)
        assert outside[0] <= figures["host_milliseconds"][phase] <= outside[-1]
    for phase, kernels in figures["kernels"].items():
        assert phase in figures["profile"]
        assert sum(kernel["share"] for kernel in kernels) == pytest.approx(1)
        assert {kernel["kernel"].split()[0] for kernel in kernels} >= {"attention", "write_kv"}


def test_recording_leaves_no_trace_and_knows_what_was_computed(model):
    with LLM(model, device="cpu", num_kv_blocks=64, block_size=32) as llm:
        parts = EngineParts.of(llm)
        before = [dict(vars(part)) for part in (parts.runner, parts.core, parts.core.scheduler)]
        prompt = random_prompts(1, 70, llm.llm_engine.config.model.vocab_size)[0]
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        with StepRecorder(llm, profile=True) as recorder:
            for request_id in ("a", "b"):  # the second finds two blocks of the first in the cache
                llm.llm_engine.add_request(request_id, prompt, params)
                while llm.llm_engine.has_unfinished_requests():
                    recorder.step()
        work = [(step.num_tokens, step.work[0].seq_len, step.is_decode) for step in recorder.steps]
        assert work == [(70, 70, False), (1, 71, True), (6, 70, False), (1, 71, True)]
        for part, names in zip(
            (parts.runner, parts.core, parts.core.scheduler), before, strict=True
        ):
            assert vars(part).keys() == names.keys()
        assert type(parts.core.journal).__name__ == "NoJournal"
        assert type(native.module().sample).__name__ != "function"
        assert not hasattr(native.module().Program.replay, "__wrapped__")


def test_kernels_in_the_shapes_of_the_model(model, monkeypatch):
    monkeypatch.setattr(kernel_cases, "WORKING_SET", 1 << 20)
    figures = report(
        *("kernels", "--model", model, *ENGINE, "--rows", "1,3", "--contexts", "40"),
        *("--formats", "bf16,Q8_0,torch", "--seconds", "0.001"),
    )
    assert set(figures["peaks"]) == {"dense", "blocks"}
    by_group = {figure["group"]: [] for figure in figures["figures"]}
    for figure in figures["figures"]:
        by_group[figure["group"]].append(figure)
        assert figure["seconds"] > 0
        assert figure["share_of_limit"] == pytest.approx(
            max(figure["share_of_bandwidth"], figure["share_of_peak"])
        )
    products = by_group["matrix products"]
    assert {f["kernel"] for f in products} == {"bf16", "Q8_0", "torch"}
    head = next(f for f in products if f["shape"].startswith("gate, up") and f["num_rows"] == 3)
    assert head["shape"] == "gate, up 256 x 128"
    assert head["num_bytes"] == 2 * 256 * 128
    assert head["flops"] == 2 * 3 * 256 * 128
    decode = [f for f in by_group["attention"] if f["shape"].startswith("decode, 40")]
    assert {(f["kernel"], f["num_rows"]) for f in decode} == {
        (f"{dtype} KV", rows) for dtype in ("bfloat16", "float32", "int8") for rows in (1, 3)
    }
    int8 = next(f for f in decode if f["kernel"] == "int8 KV" and f["num_rows"] == 3)
    assert int8["num_bytes"] == 3 * 40 * 2 * (64 + 4)
    assert {f["kernel"] for f in by_group["fused"]} >= {"add, norm to int8", "greedy token"}


def test_formats_that_are_not_here_are_refused(model):
    result = bench("kernels", "--model", model, *ENGINE, "--formats", "bf17")
    assert result.exit_code == 2
    assert "'bf17' is not one of those of the" in result.stderr


def test_startup_and_its_memory(model):
    figures = report("startup", "--model", model, *ENGINE, "--num-iters", "1")
    stages = figures["stages"]
    names = list(stages)
    assert names[:5] == [
        *("start Python", "import torch", "import the rest", "open the model"),
        "settle the settings",
    ]
    assert names[-1] == "first token"
    after_torch = sum(stages[name] for name in names[2:])
    assert after_torch == pytest.approx(figures["to_first_token"], abs=1e-6)
    assert figures["whole"] == pytest.approx(
        after_torch + stages["start Python"] + stages["import torch"]
    )
    memory = figures["memory"]
    assert 50 << 20 < memory["anonymous"] < memory["limit"]
    assert memory["limit"] == memory["weights"] + memory["kv_pool"] + memory["allowance"]


def test_a_start_that_fails_says_why(model):
    result = bench("startup", "--model", model, *ENGINE, "--block-size", "33")
    assert result.exit_code == 2
    assert "block_size=33 must be a power of two" in result.stderr


def test_wrong_options_are_refused_before_the_model_is_looked_for():
    result = bench("latency", "--model", "no-such-model", "--batch-size", "0")
    assert result.exit_code == 2
    assert "batch_size=0" in result.stderr
