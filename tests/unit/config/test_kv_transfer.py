"""Settings of KV outside the pool, and what a request may say of it."""

from __future__ import annotations

import dataclasses

import pytest

from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.kv_transfer import KVTransferConfig, resolve_kv_transfer
from tokenmill.config.speculation import SpeculativeConfig
from tokenmill.contracts.kv_transfer import RemoteOrigin, remote_origin, wants_remote_decode
from tokenmill.engine.kv_params import take_kv_params
from tokenmill.errors import ConfigError, InvalidRequestError
from tokenmill.sampling_params import SamplingParams

TCP = {"kv_connector": "TCPConnector"}


def resolved(config=None, *, device="cpu", speculation=None, pools=False, **settings):
    args = EngineArgs(kv_transfer_config=config or {}, **settings)
    return resolve_kv_transfer(args, device, speculation, pools=pools)


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_text("a secret of many bytes\n")
    return {"secret_file": str(path)}


def test_nothing_asked_for_is_nothing():
    assert resolved() is None


def test_flags_are_short_for_a_directory(tmp_path):
    by_flags = resolved(kv_offload_dir=str(tmp_path), kv_offload_gb=2)
    extra = {"offload_dir": str(tmp_path), "offload_gb": 2}
    by_config = resolved(
        {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    )
    assert by_flags.disk_bytes == 2 << 30
    assert by_flags.directory == str(tmp_path)
    assert not by_flags.gives
    assert not by_flags.takes
    assert dataclasses.replace(by_flags, engine_id="") == dataclasses.replace(
        by_config, engine_id=""
    )
    assert resolved(kv_offload_dir="kv").directory.startswith("/")
    assert resolved(kv_offload_dir="kv").disk_bytes == 10 << 30


@pytest.mark.parametrize(
    ("role", "gives", "takes"),
    [("kv_producer", True, False), ("kv_consumer", False, True), ("kv_both", True, True)],
)
def test_roles(role, gives, takes):
    config = resolved({**TCP, "kv_role": role})
    assert (config.gives, config.takes) == (gives, takes)


def test_a_directory_beside_other_engines():
    config = resolved(TCP, kv_offload_dir="kv")
    assert config.connector == "MultiConnector"
    assert config.gives
    assert config.takes
    assert config.directory


def test_a_secret_opens_the_network(secret):
    config = resolved({**TCP, "kv_ip": "10.0.0.1", "kv_connector_extra_config": secret})
    assert config.secret == b"a secret of many bytes"
    assert "secret" not in repr(config).replace("secret_file", "")
    assert config.may_name("10.9.9.9")
    limited = {**secret, "allowed_hosts": ["10.0.0.2"]}
    config = resolved({**TCP, "kv_connector_extra_config": limited})
    assert config.may_name("10.0.0.2")
    assert not config.may_name("127.0.0.1")
    local = resolved(TCP)
    assert [local.may_name(host) for host in ("127.0.0.1", "::1", "localhost")] == [True] * 3
    assert not local.may_name("10.0.0.1")
    assert not local.may_name("example.org")


@pytest.mark.parametrize(
    ("config", "settings", "words"),
    [
        ({"kv_conector": "x"}, {}, "Did you mean 'kv_connector'"),
        ({"kv_connector": "NixlConnector"}, {}, "TCPConnector"),
        ({"kv_connector": "OffloadingConnector"}, {}, "kv_offload_dir"),
        ({"kv_connector": "MultiConnector"}, {}, "kv_offload_dir"),
        ({**TCP, "kv_role": "both"}, {}, "kv_producer"),
        ({**TCP, "kv_port": 70_000}, {}, "65535"),
        ({**TCP, "kv_port": 5000}, {"data_parallel_size": 2}, "one each"),
        ({**TCP, "kv_ip": "0.0.0.0"}, {}, "cannot reach it"),
        ({**TCP, "kv_ip": "10.0.0.1"}, {}, "secret_file"),
        ({**TCP, "kv_load_failure_policy": "retry"}, {}, "recompute, fail"),
        ({**TCP, "kv_connector_extra_config": {"lease_seconds": 0}}, {}, "lease_seconds"),
        ({**TCP, "kv_connector_extra_config": {"timeout_seconds": -1}}, {}, "timeout_seconds"),
        ({**TCP, "kv_connector_extra_config": {"secret_file": "/none"}}, {}, "cannot be read"),
        ({**TCP, "kv_connector_extra_config": {"allowed_hosts": [1]}}, {}, "allowed_hosts"),
        ({**TCP, "kv_connector_extra_config": {"allowed_hosts": ["10.0.0.2"]}}, {}, "secret_file"),
        ({**TCP, "kv_connector_extra_config": {"offload_gb": 1}}, {}, "kv_offload_dir"),
        ({**TCP, "kv_port": "x"}, {}, "must be an integer"),
        (TCP, {"enable_prefix_caching": False}, "enable_prefix_caching"),
        ({}, {"kv_offload_gb": 1}, "kv_offload_dir"),
        ({}, {"kv_offload_dir": "x", "kv_offload_gb": 0}, "more than 0"),
        ({}, {"kv_offload_dir": "x", "kv_offload_gb": float("nan")}, "more than 0"),
    ],
)
def test_what_cannot_work_is_refused(config, settings, words):
    with pytest.raises(ConfigError) as error:
        resolved(config, **settings)
    assert words in str(error.value)


def test_short_secrets_are_refused(tmp_path):
    (tmp_path / "secret").write_text("short")
    with pytest.raises(ConfigError, match="holds 5 bytes"):
        resolved({**TCP, "kv_connector_extra_config": {"secret_file": str(tmp_path / "secret")}})


def test_memory_is_for_a_gpus_pool():
    config = {"kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30}}
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        resolved(config)
    assert resolved(config, device="cuda").memory_bytes == 1 << 30


def test_models_whose_kv_is_not_all_there_is_are_refused():
    with pytest.raises(ConfigError, match="pooling"):
        resolved(TCP, pools=True)
    drafting = SpeculativeConfig(method="draft_model", num_speculative_tokens=2, model="m")
    object.__setattr__(drafting, "draft", object())
    with pytest.raises(ConfigError, match="draft_model"):
        resolved(TCP, speculation=drafting)
    lookup = SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    assert resolved(TCP, speculation=lookup) is not None


# ---- requests -----------------------------------------------------------------------------------

HELD = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "127.0.0.1",
    "remote_port": 5,
    "remote_block_ids": [4, 5, 6],
    "tp_size": 1,
}
ASK = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None, "new": None}


def test_an_answer_is_a_place():
    assert remote_origin(HELD) == RemoteOrigin("e", "r", "127.0.0.1", 5, 3)
    by_group = {**HELD, "remote_block_ids": [[1], [1, 2, 3, 4], []]}
    assert remote_origin(by_group).num_blocks == 4
    assert remote_origin({**HELD, "remote_block_ids": []}).num_blocks == 0
    assert remote_origin(ASK) is None
    assert wants_remote_decode(ASK)
    assert not wants_remote_decode(HELD)


@pytest.mark.parametrize(
    "wrong",
    [
        {"do_remote_decode": True},
        {"do_remote_prefill": "yes"},
        {"remote_engine_id": None},
        {"remote_request_id": ""},
        {"remote_host": 7},
        {"remote_host": "h" * 300},
        {"remote_port": 0},
        {"remote_port": True},
        {"remote_port": 70_000},
        {"remote_block_ids": None},
        {"remote_block_ids": ["a"]},
        {"remote_block_ids": [[1], "a"]},
        {"remote_block_ids": [[1], [None]]},
        {"another": 1},
    ],
)
def test_anything_else_is_refused(wrong):
    with pytest.raises(InvalidRequestError, match="kv_transfer_params"):
        remote_origin({**HELD, **wrong})


def test_parameters_are_taken_out_of_what_processors_see():
    both = KVTransferConfig(connector="TCPConnector")
    params = SamplingParams(extra_args={"kv_transfer_params": HELD, "mine": 1})
    taken, rest = take_kv_params(params, both)
    assert taken == HELD
    assert rest.extra_args == {"mine": 1}
    only = SamplingParams(extra_args={"kv_transfer_params": ASK})
    assert take_kv_params(only, both) == (ASK, SamplingParams())
    for nothing in ({}, None, {"do_remote_decode": False}):
        params = SamplingParams(extra_args={"kv_transfer_params": nothing})
        assert take_kv_params(params, None) == ({}, SamplingParams())


@pytest.mark.parametrize(
    ("given", "config", "words"),
    [
        (ASK, None, "gives KV"),
        (HELD, None, "takes KV"),
        (ASK, KVTransferConfig(connector="TCPConnector", role="kv_consumer"), "gives KV"),
        (HELD, KVTransferConfig(connector="TCPConnector", role="kv_producer"), "takes KV"),
        (HELD, KVTransferConfig(connector="OffloadingConnector"), "takes KV"),
        (
            {**HELD, "remote_host": "10.0.0.1"},
            KVTransferConfig(connector="TCPConnector"),
            "allowed_hosts",
        ),
        ([1], KVTransferConfig(connector="TCPConnector"), "must be an object"),
    ],
)
def test_engines_refuse_what_is_not_theirs(given, config, words):
    with pytest.raises(InvalidRequestError) as error:
        take_kv_params(SamplingParams(extra_args={"kv_transfer_params": given}), config)
    assert words in str(error.value)
