"""The files in `deploy/`: what they name exists, and their health check tells the truth."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from helpers.cli import run_cli
from helpers.live_server import LiveServer
from tokenmill.config.serve_args import ServeArgs
from tokenmill.entrypoints.cli import serve
from tokenmill.entrypoints.http.server import EXIT_ENGINE_DEAD
from tokenmill.observe.environment import VARIABLES

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def instructions():
    """(Name, rest) of each instruction of the container file, and its text."""
    text = (DEPLOY / "Containerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(" ", 1)) for line in joined.splitlines()], text


def of(name, *, last_stage=True):
    found, _ = instructions()
    if last_stage:
        start = max(i for i, (each, _) in enumerate(found) if each == "FROM")
        found = found[start:]
    return [rest for each, rest in found if each == name]


def environment():
    """What the image sets."""
    pairs = [word for rest in of("ENV") for word in shlex.split(rest)]
    return dict(pair.split("=", 1) for pair in pairs)


def settings(environ, monkeypatch, *arguments):
    """Values of `serve --print-config`, and where each is from."""
    monkeypatch.setattr(serve.sources, "_environ", environ)
    result = run_cli("serve", *arguments, "--print-config")
    assert result.exit_code == 0, result.stderr
    sources = {
        line.removeprefix("# ").partition(":")[0]: line.rpartition("  # ")[2]
        for line in result.stdout.splitlines()
    }
    return yaml.safe_load(result.stdout), sources


def ignored(path):
    """Whether `.dockerignore` keeps a path of the repository out; its last matching line counts."""
    out = False
    for line in (ROOT / ".dockerignore").read_text().split():
        pattern = line.removeprefix("!").removeprefix("**/")
        parts = path.split("/")
        if line.startswith("**/"):
            matches = any(fnmatch(part, pattern) for part in parts)
        else:
            matches = fnmatch(parts[0], pattern)
        if matches:
            out = not line.startswith("!")
    return out


def test_the_image_is_built_from_files_that_are_there():
    copied = [
        source
        for rest in of("COPY", last_stage=False)
        if not rest.startswith("--from")
        for source in rest.split()[:-1]
    ]
    assert {"src", "csrc", "CMakeLists.txt", "pyproject.toml"} <= set(copied)
    for source in copied:
        assert (ROOT / source).exists()
        assert not ignored(source)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["readme"] in copied
    assert {name for name in ("LICENSE",) if (ROOT / name).exists()} <= set(copied)
    for path in ("tests/conftest.py", ".git/config", ".venv/bin/python", "build/x"):
        assert ignored(path)
    assert ignored("src/tokenmill/_native.cpython-311-x86_64-linux-gnu.so")
    assert not ignored("src/tokenmill/__init__.py")
    # Without a compiler the package installs all the same, so that is looked at.
    assert any("import tokenmill._native" in rest for rest in of("RUN", last_stage=False))


def test_the_image_runs_the_command_and_gets_its_signals():
    (entrypoint,) = of("ENTRYPOINT")
    command, subcommand = json.loads(entrypoint)  # a list: no shell takes SIGTERM in its place
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert command in scripts
    assert subcommand == "serve"
    assert of("STOPSIGNAL") == ["SIGTERM"]
    assert environment()["PATH"].split(":")[0] == "/opt/tokenmill/bin"
    assert any(rest.endswith(" /opt/tokenmill /opt/tokenmill") for rest in of("COPY"))


def test_the_image_sets_what_exists(monkeypatch):
    values, sources = settings(environment(), monkeypatch)
    _, text = instructions()
    named = set(re.findall(r"TOKENMILL_SERVE_([A-Z_]+)", text))
    assert {"HOST", "PORT", "MODEL", "API_KEY"} <= named
    assert {name.lower() for name in named} <= set(sources)
    given = {name: value for name, value in sources.items() if value.startswith("TOKENMILL_SERVE")}
    assert {"host", "port", "model"} <= set(given)
    assert values["host"] == "0.0.0.0"
    assert of("EXPOSE") == [str(values["port"])]
    assert 0 < values["drain_timeout"] < 10  # docker and podman kill after 10 seconds
    assert {name for name in environment() if name.startswith("TOKENMILL_")} - {
        f"TOKENMILL_SERVE_{name.upper()}" for name in given
    } <= set(VARIABLES)


def test_the_images_user_owns_the_volume():
    (volume,) = of("VOLUME")
    (user,) = of("USER")
    assert int(user) > 0  # by number: Kubernetes' runAsNonRoot looks for that
    assert any(f"-o {user} -g 0 -m 0775 {volume}" in rest for rest in of("RUN"))
    set_to = environment()
    assert set_to["TOKENMILL_CACHE"] == set_to["HOME"] == volume
    assert set_to["HF_HOME"].startswith(f"{volume}/")


@pytest.mark.parametrize("healthy", [True, False])
def test_the_images_health_check(healthy):
    (rest,) = of("HEALTHCHECK")
    command = json.loads(rest.partition("CMD ")[2])
    assert command[0] == "python"
    with LiveServer() as server:
        server.engine.is_healthy = healthy
        done = subprocess.run(
            [sys.executable, *command[1:]],
            env={
                "TOKENMILL_SERVE_PORT": str(server.port),
                "http_proxy": "http://127.0.0.1:9",
            },
            timeout=120,
            check=False,
        )
        assert done.returncode == (0 if healthy else 1)


def test_the_settings_file(monkeypatch):
    _, sources = settings({}, monkeypatch, "--config", str(DEPLOY / "serve.yaml"))
    given = [name for name, source in sources.items() if source.endswith("serve.yaml")]
    assert {"model", "port", "log_format"} <= set(given)


def unit():
    """Settings of the systemd unit, by section."""
    sections, current = {}, None
    for line in (DEPLOY / "tokenmill.service").read_text().splitlines():
        if line.startswith("["):
            current = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            name, value = line.split("=", 1)
            current[name] = value
    return sections


def test_the_unit_uses_flags_and_exit_codes_that_exist():
    service = unit()["Service"]
    flags = [word for word in service["ExecStart"].split() if word.startswith("--")]
    known = run_cli("serve", "--help").stdout
    assert {"--config", "--api-key-file"} == set(flags)
    for flag in flags:
        assert f"{flag} " in known
    assert service["Type"] == "notify"
    assert int(service["TimeoutStopSec"]) > ServeArgs().drain_timeout
    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"] == "2" != str(EXIT_ENGINE_DEAD)
    variables = dict(pair.split("=", 1) for pair in service["Environment"].split())
    cache = f"/var/cache/{service['CacheDirectory']}"
    assert variables["TOKENMILL_CACHE"] == cache
    assert variables["HF_HOME"].startswith(cache)  # there is no home to write to


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_understands_the_unit(tmp_path):
    text = (DEPLOY / "tokenmill.service").read_text()
    path = tmp_path / "tokenmill.service"
    path.write_text(text.replace("/opt/tokenmill/bin/tokenmill", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Unknown" not in done.stderr
