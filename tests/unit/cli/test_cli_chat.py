"""`tokenmill chat`, with an engine that says the question again in capitals."""

from __future__ import annotations

from pathlib import Path

from helpers.cli import run_cli
from tokenmill.lora_request import LoRARequest


def contents(conversation):
    return [(message["role"], message["content"]) for message in conversation]


def test_one_question_is_answered_and_that_is_all():
    result = run_cli("chat", "how are you", "--system", "be brief", stdin="never read\n")
    assert result.exit_code == 0
    assert result.stdout == "HOW ARE YOU\n"
    assert contents(result.llm.conversations[0]) == [
        ("system", "be brief"),
        ("user", "how are you"),
    ]
    assert "new tokens, first token after 1.00 s, 1.0 tokens/s" in result.stderr
    assert result.llm.closed


def test_every_turn_has_the_adapter(tmp_path):
    result = run_cli("chat", "--lora", str(tmp_path / "sql"), stdin="one\ntwo\n")
    expected = LoRARequest("sql", str(tmp_path / "sql"))
    assert result.llm.engine_args["enable_lora"] is True
    assert result.llm.llm_engine.lora_requests == [expected, expected]


def test_a_conversation_remembers_its_turns():
    result = run_cli("chat", stdin="one two\n\nthree\n")
    assert result.exit_code == 0
    assert result.stdout == "ONE TWO\nTHREE\n"
    assert contents(result.llm.conversations[1]) == [
        ("user", "one two"),
        ("assistant", "ONE TWO"),
        ("user", "three"),
    ]


def test_reset_forgets_the_turns_and_keeps_the_system_message():
    result = run_cli("chat", "-s", "be brief", stdin="one\n/reset\ntwo\n")
    assert contents(result.llm.conversations[1]) == [("system", "be brief"), ("user", "two")]


def test_system_starts_anew_with_another_system_message():
    result = run_cli("chat", "-s", "a", stdin="one\n/system be long\ntwo\n/system\nthree\n")
    assert contents(result.llm.conversations[1]) == [("system", "be long"), ("user", "two")]
    assert contents(result.llm.conversations[2]) == [("user", "three")]


def test_images_go_with_the_first_question_and_stay_in_the_conversation():
    result = run_cli("chat", "--image", "a.png", "-i", "b.png", stdin="one\ntwo\n")
    assert result.stdout == "ONE\nTWO\n"
    shown = [
        {"type": "image", "image": Path("a.png")},
        {"type": "image", "image": Path("b.png")},
        {"type": "text", "text": "one"},
    ]
    assert contents(result.llm.conversations[1]) == [
        ("user", shown),
        ("assistant", "ONE"),
        ("user", "two"),
    ]


def test_an_image_is_shown_with_the_next_question(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "a b.png"
    path.touch()
    commands = ("/image ~/a b.png", "/image", "/image ~/none.png", "two", f"/image {path}")
    result = run_cli("chat", stdin="\n".join(["one", *commands, "/reset", "three", ""]))
    shown = {"type": "image", "image": path}
    assert result.llm.conversations[1][-1]["content"] == [shown, {"type": "text", "text": "two"}]
    assert contents(result.llm.conversations[2]) == [("user", "three")]
    assert "/image PATH" in result.stderr
    assert f"There is no file '{tmp_path}/none.png'." in result.stderr


def test_exit_leaves():
    assert run_cli("chat", stdin="one\n/exit\ntwo\n").stdout == "ONE\n"


def test_unknown_commands_are_not_sent_to_the_model():
    result = run_cli("chat", stdin="/rest\n/help\n")
    assert "There is no command /rest. Did you mean '/reset'?" in result.stderr
    assert "/system TEXT" in result.stderr
    assert result.llm.conversations == []


def test_ctrl_c_stops_the_answer_and_keeps_the_session():
    result = run_cli("chat", stdin="a b c d\ne\n", interactive=True, interrupt_at=3)
    assert result.exit_code == 0
    assert result.stdout == "> A B\n> E\n> "
    assert result.llm.llm_engine.aborted == ["chat"]
    assert contents(result.llm.conversations[1]) == [
        ("user", "a b c d"),
        ("assistant", "A B"),  # what was shown is remembered
        ("user", "e"),
    ]


def test_ctrl_c_ends_a_question_that_was_asked_on_the_command_line():
    result = run_cli("chat", "a b c d", interrupt_at=2)
    assert result.exit_code == 130
    assert result.stdout == "A\n"


def test_a_refused_question_is_reported_and_forgotten():
    result = run_cli("chat", stdin="one\ntoo long\nboom\ntwo\n", interactive=True)
    assert result.exit_code == 0
    assert "error: prompt: too long." in result.stderr
    assert "error: The answer failed: it went boom" in result.stderr
    assert contents(result.llm.conversations[3]) == [
        ("user", "one"),
        ("assistant", "ONE"),
        ("user", "two"),
    ]


def test_a_failure_in_a_pipe_ends_with_an_exit_code():
    assert run_cli("chat", stdin="too long\n").exit_code == 2
    assert run_cli("chat", "boom").exit_code == 1


def test_reasoning_is_shown_beside_the_answer_and_remembered_apart():
    family = ("--reasoning-parser", "mistral")
    asked = "[THINK]so it is[/THINK]yes no\nc\n"
    result = run_cli("chat", *family, stdin=asked)
    assert result.stdout == "YES NO\nC\n"
    assert "SO IT IS" in result.stderr
    assert result.llm.conversations[1][1] == {
        "role": "assistant",
        "content": "YES NO",
        "reasoning_content": "SO IT IS",
    }
    quiet = run_cli("chat", "-q", *family, stdin=asked)
    assert quiet.stdout == result.stdout
    assert quiet.stderr == ""
