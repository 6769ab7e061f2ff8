"""Adapters in an engine: the same bits however a request is run, caches that never mix, slots that
run out, and adapters that cannot be had.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.adapters import logprobs_of, merged, write_adapter
from helpers.family_models import prompt, reference, saved
from tokenmill import LLM, BeamSearchParams, LoRARequest, RequestOutput, SamplingParams
from tokenmill.errors import AdapterError, ConfigError, InvalidRequestError
from tokenmill.kernels import native

PROMPTS = [prompt(length, seed) for seed, length in enumerate((40, 7, 55, 23, 1, 33, 12))]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Five of them, of odd ranks."""
    root, model = tmp_path_factory.mktemp("adapters"), reference("llama")
    ranks = {"a": 1, "b": 3, "c": 8, "d": 16, "e": 5}
    return {
        name: write_adapter(root / name, model, rank=rank, seed=index, strength=2.0)
        for index, (name, rank) in enumerate(ranks.items())
    }


def engine(**settings: Any) -> LLM:
    defaults: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": 128,
        "max_num_seqs": 8,
        "num_kv_blocks": 100,
        "skip_tokenizer_init": True,
        "enable_lora": True,
        "max_loras": 5,
        "device": "cpu",
    }
    return LLM(str(saved("llama")), **(defaults | settings))


@pytest.fixture(scope="module")
def shared() -> Iterator[LLM]:
    with engine(max_loras=2, max_cpu_loras=2) as llm:
        yield llm


def params(max_tokens: int = 8, temperature: float = 0.9) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, seed=3, max_tokens=max_tokens, logprobs=1, ignore_eos=True,
        detokenize=False,
    )  # fmt: skip


def generate(
    llm: LLM,
    prompts: Sequence[list[int]],
    adapters: Sequence[LoRARequest | None],
    salt: str | None = None,
    **kwargs: Any,
) -> list[RequestOutput]:
    given: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
    if salt is not None:
        given = [each | {"cache_salt": salt} for each in given]
    return llm.generate(given, params(**kwargs), lora_request=adapters)


def bits(outputs: Sequence[RequestOutput]) -> list[Any]:
    found = []
    for output in outputs:
        (sequence,) = output.outputs
        assert sequence.finish_reason == "length", sequence
        assert sequence.logprobs is not None
        entries = [sorted((k, v.logprob) for k, v in each.items()) for each in sequence.logprobs]
        found.append((sequence.token_ids, entries))
    return found


def named(adapters: dict[str, Path], names: str) -> list[LoRARequest | None]:
    return [None if n == "-" else LoRARequest(n, str(adapters[n])) for n in names]


def test_the_same_bits_however_it_is_run(adapters: dict[str, Path]) -> None:
    chosen = named(adapters, "ab-cade")
    with engine(enable_prefix_caching=False) as llm:
        alone = [
            bits(generate(llm, [ids], [each], max_tokens=24))[0]
            for ids, each in zip(PROMPTS, chosen, strict=True)
        ]
        outputs = generate(llm, PROMPTS, chosen, max_tokens=24)
        assert bits(outputs) == alone
        assert [output.lora_request for output in outputs] == chosen
    ways: list[dict[str, Any]] = [
        {"max_num_batched_tokens": 24},
        {"num_kv_blocks": 6, "max_num_seqs": 5},  # preempted
        {"enforce_eager": True},
        {"num_threads": 1, "max_loras": 2, "max_cpu_loras": 3},
        {"async_scheduling": True},
        {"spec_method": "ngram", "spec_tokens": 3},
    ]
    if native.is_available():
        ways.append({"check_graphs": True})
    for way in ways:
        with engine(**way) as llm:
            outputs = generate(llm, PROMPTS, chosen, max_tokens=24)
            assert bits(outputs) == alone, way
            assert bits(generate(llm, PROMPTS, chosen, max_tokens=24)) == alone, (
                way
            )  # from the cache
            if "num_kv_blocks" in way:
                assert any(output.metrics.num_preemptions for output in outputs)
    with engine(enable_lora=False, max_loras=1) as llm:
        assert bits(generate(llm, [PROMPTS[2]], [None], max_tokens=24)) == [alone[2]]


def test_beams_have_the_adapter(shared: LLM, adapters: dict[str, Path]) -> None:
    (adapter,) = named(adapters, "c")
    (greedy,) = generate(shared, PROMPTS[:1], [adapter], temperature=0.0)
    beams = BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True)
    (plain,) = shared.beam_search([{"prompt_token_ids": PROMPTS[0]}], beams)
    (found,) = shared.beam_search([{"prompt_token_ids": PROMPTS[0]}], beams, lora_request=adapter)
    assert found.outputs[0].token_ids == greedy.outputs[0].token_ids
    assert found.outputs[0].token_ids != plain.outputs[0].token_ids
    assert (found.lora_request, plain.lora_request) == (adapter, None)


@pytest.mark.skipif(not native.is_available(), reason="steps of one native call")
def test_decoding_steps_stay_native(adapters: dict[str, Path]) -> None:
    with engine() as llm:
        runner = llm.llm_engine._client.core._executor._worker.runner  # type: ignore[attr-defined]
        before = runner.graph_stats.num_direct
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in PROMPTS[:3]],
            SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False),
            lora_request=named(adapters, "ab-"),
        )
        assert runner.graph_stats.num_direct == before
        assert type(runner._decode_steps).__name__ == "NativeDecodeSteps"
        assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)


def test_b101_b117_cached_prefixes_never_mix(adapters: dict[str, Path], tmp_path: Path) -> None:
    ids, model = PROMPTS[0], reference("llama")
    moving = tmp_path / "moving"
    shutil.copytree(adapters["a"], moving)
    name = LoRARequest("x", str(moving))
    others = named(adapters, "-b")
    with engine(enable_prefix_caching=False) as llm:
        cold = [bits(generate(llm, [ids], [each]))[0] for each in (*named(adapters, "a"), *others)]
        write_adapter(tmp_path / "new", model, rank=8, seed=77, strength=2.0)
        cold.append(bits(generate(llm, [ids], [LoRARequest("n", str(tmp_path / "new"))]))[0])
    assert len({str(each) for each in cold}) == 4
    with engine() as llm:
        for _ in range(2):
            for adapter, wanted in zip((name, *others), cold[:3], strict=True):
                assert bits(generate(llm, [ids], [adapter]))[0] == wanted
        # The same weights under another name share what is cached.
        (again,) = generate(llm, [ids], [LoRARequest("y", str(adapters["a"]))])
        assert bits([again])[0] == cold[0]
        assert again.num_cached_tokens == 32
        # A salt of the adapter's name, or of its key, is none of them.
        load_id = llm.llm_engine.load_adapter(name).load_id
        for salt in ("x", load_id):
            (salted,) = generate(llm, [ids], [None], salt=salt)
            assert salted.num_cached_tokens == 0
            assert bits([salted])[0] == cold[1]
        # Other weights in the same place, under the same name.
        for file in (tmp_path / "new").iterdir():
            shutil.copy(file, moving / file.name)
        (fresh,) = generate(llm, [ids], [name])
        assert fresh.num_cached_tokens == 0
        assert bits([fresh])[0] == cold[3]


def test_more_adapters_than_slots(shared: LLM, adapters: dict[str, Path]) -> None:
    chosen = named(adapters, "abcdeabcde-")
    prompts = [PROMPTS[index % 3] for index in range(len(chosen))]
    with engine(enable_prefix_caching=False) as llm:
        wanted = bits(generate(llm, prompts, chosen))
    assert bits(generate(shared, prompts, chosen)) == wanted


def test_several_sequences_and_chats_run_with_it(adapters: dict[str, Path], shared: LLM) -> None:
    (adapter,) = named(adapters, "b")
    many = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=4, detokenize=False)
    (output,) = shared.generate([{"prompt_token_ids": PROMPTS[1]}], many, lora_request=adapter)
    (base,) = shared.generate([{"prompt_token_ids": PROMPTS[1]}], many)
    assert len(output.outputs) == 3
    assert [each.token_ids for each in output.outputs] != [each.token_ids for each in base.outputs]


@pytest.mark.parametrize("settings", [{"quantization": "int8"}, {"quantization": "int4"}])
def test_beside_quantised_weights(adapters: dict[str, Path], settings: dict[str, Any]) -> None:
    """An adapter adds no more error than the quantised model has without it."""
    model, ids = reference("llama"), PROMPTS[0]
    greedy = SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False, ignore_eos=True
    )

    def error(llm: LLM, adapter: LoRARequest | None, of: Any) -> float:
        (output,) = llm.generate([{"prompt_token_ids": ids}], greedy, lora_request=adapter)
        assert output.prompt_logprobs is not None
        wanted = logprobs_of(of, ids)
        differences = [
            abs(entry[token].logprob - float(wanted[place, token]))
            for place, (token, entry) in enumerate(
                zip(ids[1:], output.prompt_logprobs[1:], strict=True)
            )
            if entry is not None
        ]
        return sum(differences) / len(differences)

    with engine(**settings) as llm:
        base = error(llm, None, model)
        for adapter in named(adapters, "ad"):
            assert adapter is not None
            changed = merged(model, Path(adapter.path))
            effect = (logprobs_of(changed, ids) - logprobs_of(model, ids)).abs().mean()
            found = error(llm, adapter, changed)
            assert found < 2 * base + 0.03, (found, base)
            assert effect > 2 * found, (effect, found)


# ---- what is refused ----------------------------------------------------------------------------


def check_refused(llm: LLM, path: Path, message: str, adapters: dict[str, Path]) -> None:
    wanted = bits(generate(llm, PROMPTS[:1], named(adapters, "a")))
    with pytest.raises(AdapterError, match=message):
        generate(llm, PROMPTS[:2], [None, LoRARequest("bad", str(path))])
    assert bits(generate(llm, PROMPTS[:1], named(adapters, "a"))) == wanted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 17}, "rank 17, more than max_lora_rank=16"),
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "whole modules"),
        ({"bias": "lora_only"}, "trained biases"),
        ({"peft_type": "IA3"}, "not LORA"),
        ({"init_lora_weights": "pissa_niter_4"}, "not the model's own"),
        ({"targets": ("q_proj", "lm_head")}, "modules that cannot be adapted: lm_head"),
        ({"lora_alpha": "much"}, "lora_alpha"),
        ({"rank_pattern": {"q_proj": 200}}, "rank 200"),
    ],
)
def test_adapters_that_do_not_fit(
    shared: LLM, adapters: dict[str, Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = write_adapter(tmp_path / "bad", reference("llama"), **changes)
    check_refused(shared, path, message, adapters)


def test_files_that_cannot_be_read(shared: LLM, adapters: dict[str, Path], tmp_path: Path) -> None:
    check_refused(shared, tmp_path / "nowhere", "nowhere", adapters)
    other_model = write_adapter(tmp_path / "other", reference("gpt2"), targets=("c_attn",))
    tensors = other_model / "adapter_model.safetensors"
    check_refused(shared, other_model, "does not fit", adapters)
    (other_model / "adapter_config.json").write_text("{}")
    tensors.write_bytes(tensors.read_bytes()[:200])
    check_refused(shared, other_model, "damaged", adapters)
    (other_model / "adapter_config.json").write_text("[]")
    check_refused(shared, other_model, "no JSON object", adapters)
    tensors.rename(other_model / "adapter_model.bin")
    check_refused(shared, other_model, "no adapter that can be read", adapters)


def test_an_adapter_that_has_gone_fails_alone(adapters: dict[str, Path], tmp_path: Path) -> None:
    """With room for one on the host, the others are read again; files may be gone by then."""
    going = {name: tmp_path / name for name in "ab"}
    for name, path in going.items():
        shutil.copytree(adapters[name], path)
    with engine(max_loras=1, enable_prefix_caching=False) as llm:
        wanted = bits(generate(llm, PROMPTS[:3], named(adapters, "a-b")))
        chosen = named(going, "a-b")
        engine_ = llm.llm_engine
        for name, adapter in zip("a-b", chosen, strict=True):
            ids = PROMPTS["a-b".index(name)]
            engine_.add_request(name, {"prompt_token_ids": ids}, params(), lora_request=adapter)
        settings = going["b"] / "adapter_config.json"
        settings.write_text(settings.read_text().replace('"lora_alpha": 16', '"lora_alpha": 17'))
        (going["a"] / "adapter_model.safetensors").unlink()
        done: dict[str, RequestOutput] = {}
        while engine_.has_unfinished_requests():
            done |= {output.request_id: output for output in engine_.step() if output.finished}
        assert bits([done["-"]]) == wanted[1:2]
        gone, changed = done["a"].outputs[0], done["b"].outputs[0]
        # One of the two was still there in memory; it may have been neither.
        reasons = {gone.finish_reason: gone.error, changed.finish_reason: changed.error}
        assert "error" in reasons
        assert bits(generate(llm, PROMPTS[:1], named(adapters, "a"))) == wanted[:1]


def test_what_an_engine_without_adapters_says() -> None:
    with (
        engine(enable_lora=False) as llm,
        pytest.raises(InvalidRequestError, match="enable_lora=True"),
    ):
        generate(llm, PROMPTS[:1], [LoRARequest("a", "/nowhere")])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_loras": 0}, "max_loras"),
        ({"max_lora_rank": 1000}, "max_lora_rank"),
        ({"max_loras": 3, "max_cpu_loras": 2}, "raise it to 3"),
        ({"lora_dtype": "float16"}, "lora_dtype"),
        ({"lora_target_modules": ["q_prj"]}, "q_proj"),
        ({"model_impl": "transformers"}, "transformers"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine(**settings)


def test_only_named_modules_may_be_changed(adapters: dict[str, Path], tmp_path: Path) -> None:
    model = reference("llama")
    path = write_adapter(tmp_path / "qv", model, targets=("q_proj", "v_proj"), seed=5)
    with engine(lora_target_modules=["q_proj", "v_proj"], dtype="float32") as llm:
        (output,) = generate(llm, PROMPTS[:1], [LoRARequest("qv", str(path))], temperature=0.0)
        ids = [*PROMPTS[0], *output.outputs[0].token_ids]
        wanted = logprobs_of(merged(model, path), ids)[len(PROMPTS[0]) - 1 : -1].argmax(-1)
        assert output.outputs[0].token_ids == wanted.tolist()
        with pytest.raises(AdapterError, match=r"cannot be adapted: .*mlp"):
            generate(llm, PROMPTS[:1], named(adapters, "a"))


def test_arguments_of_generate(shared: LLM, adapters: dict[str, Path]) -> None:
    wrong: list[Any] = [named(adapters, "ab"), ["a"], 3]
    for given in wrong:
        with pytest.raises(InvalidRequestError, match="lora_request"):
            shared.generate([{"prompt_token_ids": [1]}], params(), lora_request=given)
    for name, path in (("", "x"), (" ", "x"), ("a", ""), (3, "x"), ("a", 3)):
        with pytest.raises(InvalidRequestError, match="lora_request"):
            LoRARequest(name, path)  # type: ignore[arg-type]


def test_patterns_of_ranks_and_scales(tmp_path: Path) -> None:
    model = reference("llama")
    path = write_adapter(
        tmp_path / "p",
        model,
        rank_pattern={"q_proj": 2, "layers.1.mlp.up_proj": 7},
        alpha_pattern={"o_proj": 40, r"layers\.0\..*down_proj": 3},
        use_rslora=True,
        prefix="base_model.model.",
    )
    written = json.loads((path / "adapter_config.json").read_text())
    assert written["use_rslora"]
    with engine(dtype="float32") as llm:
        (output,) = generate(llm, PROMPTS[:1], [LoRARequest("p", str(path))], temperature=0.0)
    ids = [*PROMPTS[0], *output.outputs[0].token_ids]
    wanted = logprobs_of(merged(model, path), ids)[len(PROMPTS[0]) - 1 : -1]
    assert output.outputs[0].token_ids == wanted.argmax(-1).tolist()
    for place, (token, entry) in enumerate(
        zip(output.outputs[0].token_ids, output.outputs[0].logprobs or (), strict=True)
    ):
        assert abs(entry[token].logprob - float(wanted[place, token])) < 2e-3
