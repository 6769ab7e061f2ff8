"""`tokenmill serve` before anything is served: its settings, and what is refused."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys

import pytest
import yaml

from helpers.cli import run_cli
from tokenmill.config.serve_args import ServeArgs
from tokenmill.entrypoints.cli import serve
from tokenmill.entrypoints.http.banner import banner
from tokenmill.entrypoints.http.listener import bind
from tokenmill.errors import ConfigError
from tokenmill.observe.logging import JsonFormatter


@pytest.fixture
def environ(monkeypatch):
    """Variables of these tests only."""
    values = {}
    monkeypatch.setattr(serve.sources, "_environ", values)
    return values


def settings(*arguments):
    """What `--print-config` prints: values, and the source of each."""
    result = run_cli("serve", *arguments, "--print-config")
    assert result.exit_code == 0, result.stderr
    values = yaml.safe_load(result.stdout)
    sources = {}
    for line in result.stdout.splitlines():
        name = line.removeprefix("# ").partition(":")[0]
        sources[name] = line.rpartition("  # ")[2]
    return values, sources


def refusal(*arguments):
    result = run_cli("serve", *arguments, "--print-config")
    assert result.exit_code == 2
    return result.stderr


def test_defaults(environ):
    values, sources = settings()
    assert values["host"] == "127.0.0.1"
    assert values["model"] == "smollm2-135m"
    assert set(sources.values()) == {"default"}


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(environ, tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("port: 1\nmax-model-len: 2\nseed: 3\nhost: 10.0.0.1\n")
    environ["TOKENMILL_SERVE_PORT"] = "4"
    environ["TOKENMILL_SERVE_MAX_MODEL_LEN"] = "5"
    environ["TOKENMILL_SERVE_MODEL"] = "from-environment"
    values, sources = settings("--port", "6", "--config", str(path))
    assert (values["port"], values["max_model_len"], values["seed"]) == (6, 5, 3)
    assert values["model"] == "from-environment"
    assert sources["port"] == "command line"
    assert sources["max_model_len"] == "TOKENMILL_SERVE_MAX_MODEL_LEN"
    assert sources["seed"] == str(path)
    assert settings("given", "--config", str(path))[0]["model"] == "given"


def test_the_file_may_be_named_by_the_environment(environ, tmp_path):
    path = tmp_path / "serve.toml"
    path.write_text('model = "m"\nlog_requests = true\n[hf_overrides]\na = 1\n')
    environ["TOKENMILL_SERVE_CONFIG"] = str(path)
    values, _ = settings()
    assert (values["model"], values["log_requests"]) == ("m", True)
    assert values["hf_overrides"] == {"a": 1}


def test_lists_and_switches(environ, tmp_path):
    path = tmp_path / "serve.json"
    path.write_text(json.dumps({"served_model_name": ["a", "b"], "enable_admin": True}))
    assert settings("--config", str(path))[0]["served_model_name"] == ["a", "b"]
    environ["TOKENMILL_SERVE_SERVED_MODEL_NAME"] = '["c", "d"]'
    environ["TOKENMILL_SERVE_ENABLE_ADMIN"] = "false"
    values, _ = settings("--config", str(path))
    assert (values["served_model_name"], values["enable_admin"]) == (["c", "d"], False)
    environ["TOKENMILL_SERVE_SERVED_MODEL_NAME"] = "one"
    assert settings()[0]["served_model_name"] == ["one"]
    values, _ = settings("--served-model-name", "x", "--served-model-name", "y", "--enable-admin")
    assert (values["served_model_name"], values["enable_admin"]) == (["x", "y"], True)


def test_sizes_of_several_processes_have_short_flags(environ):
    values, sources = settings("m", "-tp", "2", "-pp", "3", "--headless")
    names = ("tensor_parallel_size", "pipeline_parallel_size", "headless")
    assert [values[name] for name in names] == [2, 3, True]
    assert {sources[name] for name in names} == {"command line"}


def test_what_is_printed_can_be_read_back_and_holds_no_key(environ, tmp_path):
    result = run_cli("serve", "m", "--api-key", "secret", "--port", "5", "--print-config")
    assert "secret" not in result.stdout
    assert "# api_key: 1 not shown" in result.stdout
    path = tmp_path / "again.yaml"
    path.write_text(result.stdout)
    values, sources = settings("--config", str(path))
    assert (values["model"], values["port"]) == ("m", 5)
    assert sources["port"] == str(path)


def test_names_that_do_not_exist_are_refused_with_the_nearest(environ, tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("max_modl_len: 5\n")
    assert "Did you mean 'max_model_len'?" in refusal("--config", str(path))
    environ["TOKENMILL_SERVE_PROT"] = "1"
    assert "Did you mean 'TOKENMILL_SERVE_PORT'?" in refusal()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.yaml", "- a\n- b\n", "must hold settings"),
        ("a.yaml", "a: [", "a.yaml"),
        ("a.toml", "a = ", "a.toml"),
        ("a.ini", "", "must end in"),
        ("a.yaml", b"\xff\xfe\x00", "a.yaml"),
    ],
)
def test_files_that_hold_no_settings(environ, tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message in refusal("--config", str(path))


def test_a_file_that_is_not_there(environ, tmp_path):
    assert "No such file" in refusal("--config", str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--port", "70000"), "port=70000 must be at most 65535"),
        (("--port", "-1"), "port=-1 must be at least 0"),
        (("--port", "x"), "port"),
        (("--max-queue", "-1"), "max_queue=-1"),
        (("--log-format", "jsn"), "Did you mean 'json'?"),
        (("--ssl-certfile", "a.pem"), "belong together"),
        (("--request-timeout", "0"), "request_timeout=0"),
        (("--request-timeout", "nan"), "request_timeout=nan"),
        (("--max-n", "0"), "max_n=0"),
        (("--served-model-name", " "), "served_model_name"),
        (("--prot", "1"), "--prot"),
    ],
)
def test_b015_values_out_of_range_are_refused(environ, arguments, message):
    assert message in " ".join(refusal(*arguments).split())


def test_a_value_of_the_wrong_type_is_refused_with_its_name_and_source(environ, tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("port: eight\n")
    message = refusal("--config", str(path))
    assert "for port from" in message
    assert str(path) in message.replace("\n", "")
    environ["TOKENMILL_SERVE_PORT"] = "nine"
    assert "for port from TOKENMILL_SERVE_PORT" in refusal()


def test_a_socket_whose_path_is_too_long_is_refused_with_the_reason(tmp_path):
    with (
        pytest.raises(ConfigError, match="too long"),
        bind(ServeArgs(uds=str(tmp_path / ("x" * 200)))),
    ):
        pass


def test_a_socket_that_another_server_has_taken_is_told_and_left_to_it(tmp_path):
    args = ServeArgs(uds=str(tmp_path / "socket"))
    with bind(args) as first, bind(args) as second:
        second.listen()
        with pytest.raises(ConfigError, match="another server has taken it"):
            first.listen()
    with bind(args) as first:
        with bind(args) as second:
            second.listen()
        assert not (tmp_path / "socket").exists()
        with bind(args):
            pass
    assert not (tmp_path / "socket").exists()


def test_serve_args_take_what_their_types_say():
    assert ServeArgs(api_key=("a",)).api_key == ["a"]
    for wrong in ({"port": "80"}, {"api_key": "a"}, {"api_key": [1]}, {"max_n": True}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            ServeArgs(**wrong)


def test_a_port_in_use_is_found_before_a_model_is_loaded(environ):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        result = run_cli("serve", "/no/such/model", "--port", str(port))
    assert result.exit_code == 2
    assert f"port={port}: Address already in use" in result.stderr


def test_a_port_belongs_to_a_server_while_it_loads_its_model(environ):
    with bind(ServeArgs(port=0)) as first:
        port = first.socket.getsockname()[1]
        result = run_cli("serve", "/no/such/model", "--port", str(port))
        first.listen()
    assert result.exit_code == 2
    assert f"port={port}: Address already in use" in result.stderr


def test_a_port_with_lingering_connections_is_taken_and_told_if_another_server_is_faster():
    with bind(ServeArgs(port=0)) as before:
        before.listen()
        port = before.socket.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            before.socket.accept()[0].close()  # whoever closes first lingers
            assert client.recv(1) == b""
    with bind(ServeArgs(port=port)) as first, bind(ServeArgs(port=port)) as second:
        second.listen()
        with pytest.raises(ConfigError, match="Address already in use"):
            first.listen()


def test_a_chat_template_that_is_none_is_found_before_a_model_is_loaded(environ, tmp_path):
    path = tmp_path / "broken.jinja"
    path.write_text("{% for message in messages %}")
    for template in ("{% if %}", str(path)):
        result = run_cli("serve", "/no/such/model", "--port", "0", "--chat-template", template)
        assert result.exit_code == 2
        assert "chat_template" in result.stderr


def test_a_model_that_does_not_exist(environ):
    result = run_cli("serve", "/no/such/model", "--port", "0")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")


def test_open_doors_are_pointed_out(environ):
    result = run_cli("serve", "/no/such/model", "--host", "0.0.0.0", "--port", "0")
    assert "without an API key" in result.stderr
    for closed in (["--host", "127.0.0.1"], ["--host", "0.0.0.0", "--api-key", "k"]):
        result = run_cli("serve", "/no/such/model", "--port", "0", *closed)
        assert "without an API key" not in result.stderr


def test_the_banner_tells_memory_capacity_and_address():
    from helpers.fake_engine import engine_config

    config = engine_config()
    text = banner(config, ("a", "b"), "http://127.0.0.1:1", 1.25)
    for part in (
        "ready after 1.2 s",
        "a, b (float32, reference kernels, 1 thread)",
        "weights",
        f"{config.ledger.kv_tokens:,} tokens in blocks of {config.cache.block_size}",
        "8 sequences",
        "of the full context at once",
        "http://127.0.0.1:1",
    ):
        assert part in text


def test_json_logs_are_one_object_a_line():
    record = logging.LogRecord("tokenmill.x", logging.INFO, "f", 1, "a\nb %d", (5,), None)
    record.fields = {"status": 200}
    line = JsonFormatter().format(record)
    assert "\n" not in line
    values = json.loads(line)
    assert values["message"] == "a\nb 5"
    assert (values["level"], values["logger"], values["status"]) == ("info", "tokenmill.x", 200)
    assert values["time"].endswith("+00:00")
    try:
        raise ValueError("x")
    except ValueError:
        record.exc_info = sys.exc_info()
    assert "ValueError: x" in json.loads(JsonFormatter().format(record))["traceback"]


def test_the_http_process_needs_no_torch():
    code = (
        "import sys, tokenmill.entrypoints.http.server, tokenmill.engine.async_llm;"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_b122_help_and_settings_load_no_torch_and_no_server():
    code = (
        "import sys; from tokenmill.entrypoints.cli.main import run;"
        "run(['serve', '--print-config']); run(['serve', '--help']);"
        "print([m for m in ('torch', 'fastapi', 'uvicorn', 'zmq') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
