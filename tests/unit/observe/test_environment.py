"""Environment variables: where the cache is, how much is logged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenmill.errors import ConfigError
from tokenmill.observe.environment import (
    cache_directory,
    log_level,
    wants_gpu_overlap,
    wants_tracebacks,
)


def test_the_cache_directory_follows_the_first_variable_that_is_set(tmp_path):
    assert cache_directory({"TOKENMILL_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_directory({"XDG_CACHE_HOME": "/b"}) == Path("/b/tokenmill")
    assert cache_directory({}) == Path.home() / ".cache/tokenmill"
    assert cache_directory({"TOKENMILL_CACHE": "", "XDG_CACHE_HOME": ""}) == cache_directory({})
    assert cache_directory({"XDG_CACHE_HOME": "relative"}) == cache_directory({})
    assert cache_directory({"TOKENMILL_CACHE": "~/models"}) == Path.home() / "models"


def test_a_cache_that_cannot_be_one_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="must be an absolute path"):
        cache_directory({"TOKENMILL_CACHE": "models"})
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a directory"):
        cache_directory({"TOKENMILL_CACHE": str(tmp_path / "file")})


def test_log_levels():
    assert log_level("warning", {}) == "warning"
    assert log_level("warning", {"TOKENMILL_LOG_LEVEL": "DEBUG"}) == "debug"
    with pytest.raises(ConfigError, match=r"'debg': must be one of .* Did you mean 'debug'\?"):
        log_level("warning", {"TOKENMILL_LOG_LEVEL": "debg"})


def test_tracebacks_are_for_debugging():
    assert wants_tracebacks({"TOKENMILL_LOG_LEVEL": "debug"})
    assert not wants_tracebacks({"TOKENMILL_LOG_LEVEL": "info"})
    assert not wants_tracebacks({})


def test_kernels_overlap_on_request():
    assert not wants_gpu_overlap({})
    assert not wants_gpu_overlap({"TOKENMILL_GPU_OVERLAP": "0"})
    assert wants_gpu_overlap({"TOKENMILL_GPU_OVERLAP": "1"})
    with pytest.raises(ConfigError, match="'yes': must be 0 or 1"):
        wants_gpu_overlap({"TOKENMILL_GPU_OVERLAP": "yes"})
