"""`tokenmill run-batch`: requests in a file, results in another."""

from __future__ import annotations

import asyncio
import io
import json

import pytest
from rich.console import Console

from helpers.cli import run_cli, run_process
from helpers.fake_engine import FakeEngine, Script
from helpers.pooling import encoder, with_tokenizer
from helpers.pooling_engine import PoolingEngine
from helpers.tiny import tiny_llama
from tokenmill.config.serve_args import ServeArgs
from tokenmill.entrypoints.cli import event_loop
from tokenmill.entrypoints.cli.run_batch import answer_all
from tokenmill.entrypoints.http.batch import answered_ids, read_batch
from tokenmill.errors import EngineDeadError

HELLO = [{"role": "user", "content": "Hi"}]


def line(custom_id, url="/v1/completions", method="POST", **body):
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body})


def answer(lines, engine=None, **args):
    """(exit code, results by their ids, what is said of it)"""
    output, console = io.BytesIO(), Console(file=io.StringIO(), width=200)
    raw = [each if isinstance(each, bytes) else each.encode() for each in lines]
    requests = list(read_batch(raw))
    code = asyncio.run(
        answer_all(engine or FakeEngine(), ServeArgs(**args), requests, output, console)
    )
    written = output.getvalue().splitlines()
    results = [json.loads(each) for each in written]
    assert len({each["id"] for each in results}) == len(results)
    found = {each["custom_id"]: each["response"] for each in results}
    assert len(found) == len(results)
    return code, found, console.file.getvalue()


def test_every_kind_of_request_has_the_answer_of_a_server():
    code, found, said = answer(
        [
            line("text", prompt="One two"),
            line("chat", "/v1/chat/completions", messages=HELLO, n=2, temperature=1),
            "",
            line("response", "/v1/responses", input="Hi"),
            line("message", "/v1/messages", max_tokens=50, messages=HELLO),
        ]
    )
    assert code == 0
    assert {each["status_code"] for each in found.values()} == {200}
    assert found["text"]["body"]["choices"][0]["text"] == "One two"
    assert len(found["chat"]["body"]["choices"]) == 2
    assert found["response"]["body"]["output"][0]["type"] == "message"
    assert found["message"]["body"]["content"][0]["type"] == "text"
    assert "4 requests in " in said
    assert ", 0 failed; " in said


def test_a_request_that_fails_costs_the_others_nothing():
    code, found, said = answer(
        [
            line("bad", prompt="One", temperature=9),
            line("good", prompt="One"),
            line("missing", prompt="One", model="other"),
            line("stream", prompt="One", stream=True),
            line("later", "/v1/responses", input="Hi", background=True),
        ]
    )
    assert code == 1
    assert [found[each]["status_code"] for each in ("bad", "good", "missing")] == [400, 200, 404]
    assert found["bad"]["body"]["error"]["param"] == "temperature"
    for name in ("stream", "later"):
        assert found[name]["status_code"] == 400
        assert "whole answers" in found[name]["body"]["error"]["message"]
    assert ", 4 failed; " in said


def test_embeddings():
    path = with_tokenizer(encoder("BertModel", vocab_size=400)[1])
    code, found, _ = answer(
        [line("a", "/v1/embeddings", input="a"), line("b", prompt="One")], PoolingEngine(path)
    )
    assert code == 1
    assert len(found["a"]["body"]["data"][0]["embedding"]) > 1
    assert found["b"]["status_code"] == 400


def test_many_run_at_once_and_wide_ones_wait_for_room():
    most = 0

    class Watched(FakeEngine):
        async def generate(self, *arguments, **keywords):
            nonlocal most
            async for output in super().generate(*arguments, **keywords):
                most = max(most, len(self.running))
                yield output

    engine = Watched(lambda p, s: Script(p[:2], step_seconds=0.001), max_num_seqs=4)
    lines = [line(str(i), prompt=f"Say {i}") for i in range(60)]
    lines[20:20] = [line(f"wide {i}", prompt="One", n=300, temperature=1) for i in range(8)]
    code, found, _ = answer(lines, engine, max_n=300)
    assert code == 0
    assert len(found) == 68
    assert 4 < most <= 8
    assert len(found["wide 7"]["body"]["choices"]) == 300


def test_a_dead_engine_ends_the_run():
    class Dying(FakeEngine):
        async def generate(self, *arguments, **keywords):
            if len(self.calls) >= 5:
                raise EngineDeadError("it died too often.")
            async for output in super().generate(*arguments, **keywords):
                yield output

    for request in (
        {"url": "/v1/completions", "prompt": "One"},
        {"url": "/v1/messages", "messages": HELLO, "max_tokens": 9},  # says it with another status
    ):
        with pytest.raises(EngineDeadError, match="remain"):
            answer([line(str(i), **request) for i in range(100)], Dying(max_num_seqs=1))


def test_bodies_that_cannot_be_read_cost_the_others_nothing():
    bad = b'{"custom_id": "bad", "url": "/v1/completions", "body": {"stream": "\xff"}}'
    code, found, _ = answer([bad, line("good", prompt="One")])
    assert (code, found["bad"]["status_code"], found["good"]["status_code"]) == (1, 400, 200)


def test_results_that_cannot_be_read_are_none():
    good = b'{"custom_id": "a", "response": {"status_code": 200}}'
    assert answered_ids([b"[" * 99_999, b'"\xff"', good]) == {"a"}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "line 2 is no request"),
        ("[]", "line 2 is no request"),
        (line("b").replace("{}", '{"a": ' + "[" * 99_999 + "]" * 99_999 + "}"), "line 2 is no req"),
        (json.dumps({"custom_id": "b", "url": "/v1/completions"}), "missing required field `body`"),
        (line("a", prompt="One"), "custom_id 'a' of an earlier line"),
        (line("b" * 2_000, prompt="One"), "more than 1024"),
        (line("b", method="GET"), "must be POST"),
        (line("b", url="/metrics"), "must be one of /v1/chat/completions"),
        ('{"custom_id": "b", "url": "/v1/completions", "body": [1]}', "body that is no object"),
    ],
)
def test_a_file_that_is_wrong_is_refused_before_a_model_is_loaded(tmp_path, text, what):
    given = tmp_path / "in.jsonl"
    given.write_text(line("a", prompt="One") + "\n" + text + "\n")
    result = run_cli("run-batch", "-i", str(given), "-o", str(tmp_path / "out.jsonl"), "missing")
    assert result.exit_code == 2
    assert what in result.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_files_that_cannot_be_had_are_refused(tmp_path):
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text(line("a", prompt="One"))
    missing = run_cli("run-batch", "-i", str(tmp_path / "no"), "-o", str(out), "missing")
    assert (missing.exit_code, "No such file" in missing.stderr) == (2, True)
    nowhere = run_cli("run-batch", "-i", str(given), "-o", str(tmp_path / "no" / "x"), "missing")
    assert (nowhere.exit_code, "cannot be written" in nowhere.stderr) == (2, True)
    out.write_text("{}\n")
    full = run_cli("run-batch", "-i", str(given), "-o", str(out), "missing")
    assert (full.exit_code, "--resume" in full.stderr) == (2, True)
    assert out.read_text() == "{}\n"


def test_a_dash_is_standard_input():
    result = run_process("run-batch", "-i", "-", "-o", "-", "missing", stdin=line("a", url="/x"))
    assert (result.exit_code, "line 1 has the url" in result.stderr) == (2, True), result.stderr


def test_a_run_goes_on_where_it_stopped(tmp_path):
    """In a process of its own, with a real engine; what has an answer is not asked again."""
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "One", "max_tokens": 3}
    given.write_text("\n".join(line(each, **body) for each in "abcd"))
    kept = json.dumps({"custom_id": "b", "response": {"status_code": 200}})
    failed = json.dumps({"custom_id": "c", "response": {"status_code": 400}})
    out.write_text(f"{kept}\n{failed}\n" + '{"custom_id": "d", "resp')
    small = ["--dtype", "float32", "--num-kv-blocks", "64", "--num-threads", "1"]
    result = run_process(
        "run-batch", str(tiny_llama()), "-i", str(given), "-o", str(out), "--resume", *small
    )
    assert result.exit_code == 0, result.stderr
    assert "3 requests in" in result.stderr
    lines = out.read_text().splitlines()
    assert lines[:2] == [kept, failed]
    new = [json.loads(each) for each in lines[3:]]
    assert sorted(each["custom_id"] for each in new) == ["a", "c", "d"]
    assert all(each["response"]["body"]["choices"][0]["text"] for each in new)


def test_whoever_interrupts_a_run_learns_how_it_goes_on(tmp_path, monkeypatch):
    def interrupted(main):
        main.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(event_loop, "run", interrupted)
    given = tmp_path / "in.jsonl"
    given.write_text(line("a", prompt="One"))
    result = run_cli("run-batch", "-i", str(given), "-o", str(tmp_path / "out.jsonl"))
    assert result.exit_code == 130
    assert "--resume answers the rest" in result.stderr
