"""KV in a directory: the same tokens and log-probabilities, evicted, restarted and shared."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from helpers.kv_engines import LENGTHS, engine, prompts
from helpers.tiny import write_wide_llama
from tokenmill import LLM, SamplingParams


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE", str(tmp_path / "cache"))


def run(llm: LLM, given: list[dict[str, Any]] | None = None) -> list[Any]:
    """Token ids and log-probabilities; one by one, so that each finds what was before."""
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=12, ignore_eos=True, logprobs=1)
    outputs = [llm.generate([each], params, use_tqdm=False)[0] for each in given or prompts()]
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]


def hits(llm: LLM) -> int:
    """Tokens that were loaded."""
    return llm.llm_engine._client.core.scheduler.make_stats().external_prefix_cache_hits


def blocks_in(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.kv"))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("wide", {}),
        ("wide", {"kv_cache_dtype": "int8"}),
        ("wide", {"dtype": "float32"}),
        pytest.param(
            "wide", {"dtype": "float32", "attention_backend": "reference"}, marks=pytest.mark.slow
        ),
        pytest.param("wide", {"spec_method": "ngram", "spec_tokens": 3}, marks=pytest.mark.slow),
        pytest.param("wide", {"model_impl": "transformers"}, marks=pytest.mark.slow),
        pytest.param("windows", {}, marks=pytest.mark.slow),
        ("windows", {"kv_cache_dtype": "int8"}),
        ("bamba", {}),
        pytest.param("mamba2", {}, marks=pytest.mark.slow),
        pytest.param("deepseek-v2", {}, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(map(str, value.values())),
)
def test_the_bits_are_the_same_evicted_and_after_a_restart(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    with engine(name, enable_prefix_caching=False, **settings) as llm:
        expected = run(llm)
    offload = {"kv_offload_dir": str(tmp_path / "kv")}
    with engine(name, **offload, **settings) as llm:
        assert run(llm) == expected
        assert llm.reset_prefix_cache()
        assert run(llm) == expected
        assert hits(llm) > 0.5 * sum(LENGTHS)
    with engine(name, **offload, **settings) as llm:
        assert run(llm) == expected
        assert hits(llm) > 0.5 * sum(LENGTHS)


def test_what_a_small_pool_evicts_is_found_again(tmp_path: Path) -> None:
    with engine(enable_prefix_caching=False) as llm:
        expected = run(llm)
    with engine(num_kv_blocks=7, kv_offload_dir=str(tmp_path)) as llm:
        assert run(llm) == expected
        assert run(llm) == expected
        assert hits(llm) > 0.5 * sum(LENGTHS)


@pytest.mark.parametrize(
    "ahead",
    [pytest.param(False, id="one step", marks=pytest.mark.slow), pytest.param(True, id="two")],
)
def test_blocks_come_and_go_beside_the_steps(ahead: bool, tmp_path: Path) -> None:
    """Many requests at once, a pool that evicts and preempts, copies while steps compute."""
    many = prompts() * 3
    params = [
        SamplingParams(temperature=0.9, seed=n, max_tokens=30, ignore_eos=True, logprobs=1)
        for n in range(len(many))
    ]

    def together(llm: LLM) -> list[Any]:
        outputs = llm.generate(many, params, use_tqdm=False)
        return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]

    settings = {"num_kv_blocks": 13, "max_num_seqs": 5, "async_scheduling": ahead}
    with engine(enable_prefix_caching=False, max_num_seqs=1) as llm:
        expected = together(llm)
    with engine(kv_offload_dir=str(tmp_path / "kv"), **settings) as llm:
        assert together(llm) == expected
        assert together(llm) == expected
        assert hits(llm) > sum(LENGTHS)


def test_two_engines_share_a_directory_at_the_same_time(tmp_path: Path) -> None:
    offload = {"kv_offload_dir": str(tmp_path)}
    with engine(enable_prefix_caching=False) as llm:
        expected = run(llm)
    with engine(**offload) as one, engine(**offload, max_num_batched_tokens=32) as two:
        assert run(one) == expected
        one.llm_engine._client.core._transfers.flush(60)
        assert run(two) == expected
        assert hits(two) > 0.5 * sum(LENGTHS)


@pytest.mark.parametrize(
    "damage",
    ["bit", "swapped", *(pytest.param(d, marks=pytest.mark.slow) for d in ("short", "long", ""))],
)
def test_damaged_files_are_computed_again(damage: str, tmp_path: Path) -> None:
    offload = {"kv_offload_dir": str(tmp_path)}
    with engine(**offload) as llm:
        expected = run(llm)
    files = blocks_in(tmp_path)
    first = files[0].read_bytes()
    for number, path in enumerate(files):
        whole = path.read_bytes()
        if damage == "bit":
            at = len(whole) - 1 - number % 40
            whole = whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :]
        path.write_bytes(
            {
                "bit": whole,
                "short": whole[:-7],
                "long": whole + b"x",
                "": b"",
                "swapped": first if number else files[1].read_bytes(),
            }[damage]
        )
    with engine(**offload) as llm:
        assert run(llm) == expected
        assert hits(llm) == 0
    with engine(**offload) as llm:  # written anew
        assert run(llm) == expected
        assert hits(llm) > 0.5 * sum(LENGTHS)


def test_a_load_that_fails_may_end_the_request(tmp_path: Path) -> None:
    with engine(kv_offload_dir=str(tmp_path)) as llm:
        run(llm)
    for path in blocks_in(tmp_path):
        path.write_bytes(b"")
    config = {"kv_load_failure_policy": "fail"}
    with engine(kv_offload_dir=str(tmp_path), kv_transfer_config=config) as llm:
        params = SamplingParams(max_tokens=1)
        (output,) = llm.generate([prompts()[0]], params, use_tqdm=False)
        assert output.outputs[0].finish_reason == "error"
        assert "could not be loaded" in str(output.outputs[0].error)
        (output,) = llm.generate([prompts()[0]], params, use_tqdm=False)
        assert output.outputs[0].finish_reason == "length"


def test_engines_that_differ_find_nothing_of_each_other(tmp_path: Path) -> None:
    offload: dict[str, Any] = {"kv_offload_dir": str(tmp_path / "kv")}
    secret = tmp_path / "secret"
    secret.write_text("a secret of engines")
    with engine(**offload) as llm:
        run(llm)
    with_secret = {"kv_connector_extra_config": {"secret_file": str(secret)}}
    for settings in (
        {"kv_cache_dtype": "int8"},
        {"dtype": "float32"},
        {"block_size": 64, "num_kv_blocks": 20},
        {"hf_overrides": {"rope_theta": 20_000.0}},
        {"kv_transfer_config": with_secret},
    ):
        with engine(**offload, **settings) as llm:
            run(llm, prompts()[:1])
            assert hits(llm) == 0, settings
    with engine(**offload, kv_transfer_config=with_secret) as llm:
        run(llm, prompts()[:1])
        assert hits(llm) > 0


def test_other_weights_under_the_same_name_are_another_model(tmp_path: Path) -> None:
    path = write_wide_llama(tmp_path / "model")
    settings = {"kv_offload_dir": str(tmp_path / "kv"), "num_kv_blocks": 12}

    def once() -> int:
        with LLM(str(path), device="cpu", max_model_len=192, num_threads=1, **settings) as llm:
            run(llm, prompts()[:1])
            return hits(llm)

    assert once() == 0
    assert once() > 0
    write_wide_llama(path, seed=1)
    assert once() == 0


def test_the_directory_keeps_to_its_size_and_to_its_owner(tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    gigabytes = 200_000 / (1 << 30)
    with engine(kv_offload_dir=str(kv), kv_offload_gb=gigabytes) as llm:
        run(llm)
        last = run(llm, prompts()[-1:])
        llm.llm_engine._client.core._transfers.flush(60)
        assert 100_000 < sum(path.stat().st_size for path in blocks_in(kv)) <= 200_000
        assert llm.reset_prefix_cache()
        before = hits(llm)
        assert run(llm, prompts()[-1:]) == last
        assert hits(llm) > before, "what was used last is there"
    for path in kv.rglob("*"):
        assert not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO), path
    assert not list(kv.rglob("*.tmp"))
