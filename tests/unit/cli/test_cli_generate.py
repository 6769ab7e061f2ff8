"""`tokenmill generate`, with an engine that says the prompt again in capitals."""

from __future__ import annotations

import json
from pathlib import Path

from helpers.cli import run_cli
from tokenmill.lora_request import LoRARequest
from tokenmill.sampling_params import RequestOutputKind, SamplingParams


def test_one_prompt_goes_to_stdout_and_figures_to_stderr():
    result = run_cli("generate", "the sky is blue")
    assert result.exit_code == 0
    assert result.stdout == "THE SKY IS BLUE\n"
    assert "load: 3.0 MB" in result.stderr
    assert "fake: capitals, 1 thread" in result.stderr
    # 4 tokens, the first at second 1 of a request that came at 0, the last at second 4
    assert "4 prompt tokens, 4 new tokens, first token after 1.00 s, 1.0 tokens/s" in result.stderr
    assert result.llm.closed


def test_quiet_leaves_stderr_empty():
    assert run_cli("generate", "the sky", "--quiet").stderr == ""


def test_one_token_is_no_plural():
    assert "1 prompt token, 1 new token, first" in run_cli("generate", "sky").stderr


def test_prompts_that_run_together_come_out_in_their_order():
    result = run_cli("generate", "a b c d e f", "g", "h i")
    assert result.stdout == "A B C D E F\n\nG\n\nH I\n"
    assert "9 prompt tokens, 9 new tokens" in result.stderr


def test_every_sequence_of_a_prompt_is_shown():
    assert run_cli("generate", "a b", "c", "--n", "2").stdout == "A B\n\nA B\n\nC\n\nC\n"


def test_stdin_is_the_prompt_if_there_is_no_other():
    assert run_cli("generate", stdin="from a pipe\n").stdout == "FROM A PIPE\n"


def test_a_file_is_a_prompt(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("from a file\n")
    assert (
        run_cli("generate", "first", "--prompt-file", str(path)).stdout == "FIRST\n\nFROM A FILE\n"
    )


def test_every_prompt_gets_the_images():
    result = run_cli("generate", "a <image>", "b <image>", "--image", "a.png", "--image", "b.png")
    assert result.stdout == "A <IMAGE>\n\nB <IMAGE>\n"
    images = {"image": [Path("a.png"), Path("b.png")]}
    assert result.llm.llm_engine.prompts == [
        {"prompt": "a <image>", "multi_modal_data": images},
        {"prompt": "b <image>", "multi_modal_data": images},
    ]


def test_without_a_prompt_no_model_is_loaded():
    for stdin in ({"interactive": True}, {"stdin": ""}, {"stdin": "\n"}):
        result = run_cli("generate", **stdin)
        assert result.exit_code == 2
        assert result.stderr.startswith("error: There is no prompt.")
        assert result.llm is None


def test_files_that_cannot_be_read_are_refused(tmp_path):
    binary = tmp_path / "weights.bin"
    binary.write_bytes(b"ab\xff")
    assert "no UTF-8 text (byte 2)" in run_cli("generate", "-f", str(binary)).stderr
    missing = run_cli("generate", "-f", str(tmp_path / "missing"))
    assert missing.exit_code == 2
    assert "No such file" in missing.stderr


def test_json_is_one_object_for_each_prompt():
    result = run_cli("generate", "a b c", "d", "--json", "--logprobs", "2")
    first, second = map(json.loads, result.stdout.splitlines())
    assert first["prompt"] == "a b c"
    assert first["outputs"][0]["text"] == "A B C"
    assert first["outputs"][0]["token_ids"] == [0, 1, 2]
    assert first["outputs"][0]["finish_reason"] == "stop"
    assert first["num_prompt_tokens"] == first["num_new_tokens"] == 3
    assert first["time_to_first_token"] == 1.0
    assert first["tokens_per_second"] == 1.0
    assert second["prompt"] == "d"


def test_logprobs_without_json_are_refused_before_the_model_is_loaded():
    result = run_cli("generate", "a", "--logprobs", "2")
    assert result.exit_code == 2
    assert "--json" in result.stderr
    assert result.llm is None


def test_bad_sampling_parameters_are_refused_before_the_model_is_loaded():
    result = run_cli("generate", "a", "--temperature", "5")
    assert result.exit_code == 2
    assert result.stderr == "error: temperature=5.0: must lie in [0, 2].\n"
    assert result.llm is None


def test_flags_replace_the_models_defaults_and_nothing_else():
    result = run_cli("generate", "a b c", "--top-k", "3", "--stop", "X", "--stop", "Y", "--json")
    (params,) = result.llm.llm_engine.params
    assert params == SamplingParams(
        temperature=0.25,  # the fake model's default
        top_k=3,
        stop=["X", "Y"],
        max_tokens=None,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def test_max_tokens_is_mentioned_when_it_cuts():
    result = run_cli("generate", "a b c", "--max-tokens", "2")
    assert result.stdout == "A B\n"
    assert "cut off at --max-tokens" in result.stderr


def test_a_failed_request_harms_no_other_and_the_exit_code_tells():
    result = run_cli("generate", "boom", "fine too")
    assert result.stdout == "BOOM\n\nFINE TOO\n"
    assert result.exit_code == 1
    assert result.stderr.endswith("error: Prompt 1 failed: it went boom\n")


def test_ctrl_c_aborts_and_still_gives_figures():
    result = run_cli("generate", "a b c d", interrupt_at=3)
    assert result.exit_code == 130
    assert result.stdout == "A B"
    assert "2 new tokens" in result.stderr
    assert "interrupted" in result.stderr
    assert result.llm.llm_engine.aborted == ["0"]
    assert result.llm.closed


def test_a_refused_prompt_has_no_figures():
    result = run_cli("generate", "too long")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.splitlines()[2:] == ["error: prompt: too long."]


def test_engine_flags_reach_the_engine():
    result = run_cli(
        *("generate", "a", "-m", "my/model", "--max-model-len", "-1", "--no-enable-prefix-caching"),
        *("--hf-overrides", '{"rope_parameters": {"type": "yarn", "factor": 2.0}}'),
    )
    assert result.llm.engine_args["model"] == "my/model"
    assert result.llm.engine_args["max_model_len"] == -1
    assert result.llm.engine_args["enable_prefix_caching"] is False
    assert result.llm.engine_args["hf_overrides"] == {
        "rope_parameters": {"type": "yarn", "factor": 2.0}
    }


def test_an_adapter_is_for_all_prompts_and_turns_adapters_on(tmp_path):
    result = run_cli("generate", "a", "b", "--lora", str(tmp_path / "sql"))
    assert result.llm.engine_args["enable_lora"] is True
    expected = LoRARequest("sql", str(tmp_path / "sql"))
    assert result.llm.llm_engine.lora_requests == [expected, expected]
    assert run_cli("generate", "a").llm.llm_engine.lora_requests == [None]


def test_sampling_flags_that_are_objects_and_lists():
    result = run_cli(
        *("generate", "a", "--presence-penalty", "0.5", "--repetition-penalty", "1.1"),
        *("--logit-bias", '{"5": 2, "7": -300}', "--bad-words", "x", "--bad-words", "y z"),
        *("--allowed-token-ids", "3", "--allowed-token-ids", "4"),
        *("--repetition-detection", '{"max_pattern_size": 3}', "--extra-args", '{"k": [1]}'),
        *("--logits-processors", "a.b:C", "--logits-processors", "d"),
    )
    (params,) = result.llm.llm_engine.params
    assert (params.presence_penalty, params.repetition_penalty) == (0.5, 1.1)
    assert params.logit_bias == {5: 2.0, 7: -100.0}
    assert params.bad_words == ["x", "y z"]
    assert params.allowed_token_ids == [3, 4]
    assert params.repetition_detection.max_pattern_size == 3
    assert params.extra_args == {"k": [1]}
    assert result.llm.engine_args["logits_processors"] == ["a.b:C", "d"]
    wrong = run_cli("generate", "a", "--repetition-detection", '{"max_pattern_size": 0}')
    assert wrong.exit_code == 2
    assert "repetition_detection.max_pattern_size=0" in wrong.stderr


def test_overrides_that_are_no_json_object_are_refused():
    for value in ("[1]", "{oops", "3"):
        result = run_cli("generate", "a", "--hf-overrides", value)
        assert result.exit_code == 2
        assert f"--hf-overrides: {value} must be a JSON object" in result.stderr
