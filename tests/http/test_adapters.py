"""Adapters over HTTP: chosen by name, loaded and unloaded by operators, no way to other files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from transformers import LlamaForCausalLM

from helpers.adapters import logprobs_of, merged, write_adapter
from helpers.fake_engine import FakeEngine
from helpers.live_server import LiveServer, chunks_of
from helpers.pooling import encoder, with_tokenizer
from helpers.pooling_engine import PoolingEngine
from helpers.serve_process import ServeProcess
from helpers.tiny import tiny_llama
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.serve_args import ServeArgs
from tokenmill.entrypoints.http.adapters import check_first_adapters, parse_adapters
from tokenmill.errors import ConfigError, shown
from tokenmill.lora_request import LoRARequest

KEY = "sk-operator"


def empty_adapter(path: Path) -> Path:
    """Files that are there: the fake engine reads none."""
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(b"")
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("sql", "chat/v2"):
        empty_adapter(tmp_path / "root" / name)
    empty_adapter(tmp_path / "elsewhere")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "elsewhere")
    return tmp_path / "root"


def server_of(root: Path | None, **args: object) -> LiveServer:
    given = {"api_key": [KEY], "enable_lora_updates": True, **args}
    if root is not None:
        given["lora_root"] = str(root)
    return LiveServer(FakeEngine(enable_lora=True, max_loras=3), **given)


def load(server: LiveServer, name: str = "sql", path: str = "sql", **fields: object):
    return server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **fields})


def test_adapters_are_models(root: Path) -> None:
    with server_of(root) as server:
        assert load(server).json["parent"] == "fake/model"
        assert load(server, "talk", "chat/v2").status == 200
        listed = {each["id"]: each for each in server.get("/v1/models").json["data"]}
        assert list(listed) == ["fake/model", "sql", "talk"]
        assert listed["fake/model"]["parent"] is None
        assert listed["sql"]["root"] == str(root / "sql")
        assert server.get("/v1/models/talk").json == listed["talk"]

        for name in ("sql", "fake/model", None, "talk"):
            fields = {} if name is None else {"model": name}
            assert server.complete(**fields).json["model"] == (name or "fake/model")
            assert server.chat(**fields).json["model"] == (name or "fake/model")
            chunks = chunks_of(server.chat(stream=True, **fields))
            assert {each["model"] for each in chunks} == {name or "fake/model"}
        asked = [None if ref is None else ref.name for ref in server.engine.adapters_asked]
        assert asked == ["sql"] * 3 + [None] * 6 + ["talk"] * 3
        server.engine.adapters_asked.clear()
        assert server.complete(model="sql", use_beam_search=True, n=2, max_tokens=2).status == 200
        assert {ref.name for ref in server.engine.adapters_asked} == {"sql"}
        assert server.post("/tokenize", {"model": "sql", "prompt": "a"}).status == 200

        missing = server.complete(model="sqk")
        assert missing.status == 404
        assert missing.error["code"] == "model_not_found"
        assert "'sql'" in missing.error["message"]


def test_load_and_unload(root: Path) -> None:
    with server_of(root) as server:
        first = load(server)
        assert first.status == 200
        again = load(server, "sql", "chat/v2")
        assert (again.status, again.error["param"]) == (400, "lora_name")
        replaced = load(server, "sql", "chat/v2", load_inplace=True)
        assert replaced.json["root"] == str(root / "chat/v2")
        own = load(server, "fake/model")
        assert (own.status, own.error["param"]) == (400, "lora_name")
        for name in ("", " ", "x" * 300):
            assert load(server, name).error["param"] == "lora_name"
        assert server.post("/v1/load_lora_adapter", {"lora_name": "x"}).status == 400

        assert server.post("/v1/unload_lora_adapter", {"lora_name": "sql"}).json["id"] == "sql"
        gone = server.post("/v1/unload_lora_adapter", {"lora_name": "sql"})
        assert (gone.status, gone.error["code"]) == (404, "model_not_found")
        assert server.complete(model="sql").status == 404
        assert [each["id"] for each in server.get("/v1/models").json["data"]] == ["fake/model"]


@pytest.mark.parametrize(
    "path",
    [
        "../elsewhere", "link", ".", "", "..", "nowhere", "sql/adapter_config.json", "/", "/etc",
        "sql/../../elsewhere", "a\0b", "x" * 5000,
    ],
)  # fmt: skip
def test_no_request_reaches_other_files(root: Path, path: str) -> None:
    with server_of(root) as server:
        reply = load(server, "other", path)
        assert (reply.status, reply.error["param"]) == (400, "lora_path")
        assert "names no directory of adapters" in reply.error["message"]
        assert str(root.parent) not in reply.error["message"].replace(path or "-", "")
        # What is there and what is not cannot be told apart.
        messages = set()
        for outside in (str(root.parent / "elsewhere"), str(root.parent / "nowhere")):
            message = load(server, "other", outside).error["message"]
            assert shown(outside) in message
            messages.add(message.replace(shown(outside), ""))
        assert len(messages) == 1
        assert load(server, "sql", str(root / "sql")).status == 200


def test_who_may(root: Path) -> None:
    with server_of(root) as server:
        server.headers = {}
        assert load(server).status == 401
    with server_of(None) as server:
        reply = load(server)
        assert (reply.status, reply.error["code"]) == (403, "admin_disabled")
    with server_of(root, enable_lora_updates=False) as server:
        assert load(server).status == 403
        assert server.post("/v1/unload_lora_adapter", {"lora_name": "sql"}).status == 403
    engine = FakeEngine()
    with LiveServer(engine, api_key=[KEY], enable_lora_updates=True, lora_root=str(root)) as server:
        reply = load(server)
        assert (reply.status, reply.error["code"]) == (400, "invalid_adapter")


def test_settings_that_cannot_work(root: Path) -> None:
    with pytest.raises(ConfigError, match="API key"):
        ServeArgs(enable_lora_updates=True)
    for given in (["sql"], ["=x"], ["sql="], ["a=x", "a=y"], ["fake/model=x"]):
        with pytest.raises(ConfigError, match="lora_modules"):
            parse_adapters(given, ("fake/model",))
    assert parse_adapters(["a=b=c"], ()) == [LoRARequest("a", "b=c")]
    sql = ServeArgs(lora_modules=[f"sql={root / 'sql'}"])
    with pytest.raises(ConfigError, match="enable_lora=True"):
        check_first_adapters(sql, EngineArgs(model="m"))
    with pytest.raises(ConfigError, match="enable_lora_updates needs enable_lora"):
        check_first_adapters(
            ServeArgs(enable_lora_updates=True, api_key=["k"]), EngineArgs(model="m")
        )
    check_first_adapters(sql, EngineArgs(model="m", enable_lora=True))
    gone = ServeArgs(lora_modules=["sql=/nowhere"])
    with pytest.raises(ConfigError, match="sql: /nowhere"):
        check_first_adapters(gone, EngineArgs(model="m", enable_lora=True))


def lora_info(text: str) -> dict[str, str]:
    (family,) = [
        each
        for each in text_string_to_metric_families(text)
        if each.name == "vllm:lora_requests_info"
    ]
    (sample,) = family.samples
    assert sample.value > 1e9
    return sample.labels


def test_a_server_with_adapters(tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(tiny_llama())
    first = write_adapter(tmp_path / "first", model, rank=4, seed=1, strength=2.0)
    write_adapter(tmp_path / "second", model, rank=3, seed=2, strength=2.0)
    with ServeProcess(
        "--enable-lora", "--max-loras", "1", "--lora-modules", f"first={first}",
        "--lora-root", str(tmp_path), "--enable-lora-updates", "--api-key", KEY,
    ) as server:  # fmt: skip
        client = server.client()
        client.headers = {"authorization": f"Bearer {KEY}"}
        loaded = client.post(
            "/v1/load_lora_adapter", {"lora_name": "second", "lora_path": "second"}
        )
        assert loaded.status == 200, loaded.body
        ids = [each["id"] for each in client.get("/v1/models").json["data"]]
        assert ids == [str(tiny_llama()), "first", "second"]
        fields = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
        for name in ids:
            choice = client.complete(model=name, **fields).json["choices"][0]
            changed = model if name == ids[0] else merged(model, tmp_path / name)
            prompt, answer = choice["prompt_token_ids"], choice["token_ids"]
            wanted = logprobs_of(changed, [*prompt, *answer])[len(prompt) - 1 : -1]
            assert wanted.argmax(-1).tolist() == answer, name
        labels = lora_info(client.get("/metrics").body.decode())
        assert labels["max_lora"] == "1"
        assert labels["running_lora_adapters"] == ""

        # Under way when its name goes.
        connection = client.open(
            "/v1/completions",
            {
                "model": "first",
                "prompt": "One",
                "max_tokens": 150,
                "ignore_eos": True,
                "stream": True,
            },
        )
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        labels = lora_info(client.get("/metrics").body.decode())
        assert labels["running_lora_adapters"] == "first"
        assert client.post("/v1/unload_lora_adapter", {"lora_name": "first"}).status == 200
        assert client.complete(model="first").status == 404
        rest = response.read()
        assert rest.endswith(b"data: [DONE]\n\n")
        assert json.loads(rest.split(b"\n\n")[-3][6:])["choices"][0]["finish_reason"] == "length"
        connection.close()
        wide = write_adapter(tmp_path / "wide", model, rank=20)
        reply = client.post(
            "/v1/load_lora_adapter", {"lora_name": "wide", "lora_path": os.path.basename(wide)}
        )
        assert (reply.status, reply.error["code"]) == (400, "invalid_adapter")
        assert "max_lora_rank=16" in reply.error["message"]


def test_embeddings_choose_adapters(tmp_path: Path) -> None:
    model, path = encoder("BertModel", vocab_size=400)
    adapter = write_adapter(tmp_path / "a", model, targets=("query", "value"), rank=4)
    engine = PoolingEngine(with_tokenizer(path), enable_lora=True)
    with LiveServer(
        engine, api_key=[KEY], enable_lora_updates=True, lora_root=str(tmp_path)
    ) as server:
        assert load(server, "a", adapter.name).status == 200

        def embed(**fields: object) -> list[float]:
            reply = server.post("/v1/embeddings", {"input": "One two", **fields})
            assert reply.json["model"] == (fields.get("model") or engine.config.model.name)
            return reply.json["data"][0]["embedding"]

        plain, changed = embed(), embed(model="a")
        assert max(abs(x - y) for x, y in zip(plain, changed, strict=True)) > 0.01
        assert embed() == plain
        assert server.post("/v1/embeddings", {"input": "One", "model": "b"}).status == 404


def test_a_bad_adapter_stops_the_start(tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(tiny_llama())
    wide = write_adapter(tmp_path / "wide", model, rank=20)
    for arguments, message in (
        (("--enable-lora", "--lora-modules", f"wide={wide}"), "rank 20"),
        (("--lora-modules", f"wide={wide}"), "enable_lora"),
    ):
        with ServeProcess(*arguments) as server:
            assert server.wait(60) == 2
            assert message in server.stderr
