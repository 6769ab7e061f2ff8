"""Memory given back and taken again, and weights replaced, by a real engine."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from helpers.adapters import write_adapter
from helpers.tiny import write_tiny_llama, write_wide_llama
from helpers.vision_models import picture, processor_of, saved
from tokenmill import LLM, LoRARequest, SamplingParams
from tokenmill.errors import CheckpointError, ConfigError, InvalidRequestError, ModelNotFoundError

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[3 + number] * 40 for number in range(6)]
SMALL = {"device": "cpu", "num_kv_blocks": 40, "block_size": 32, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two sets of weights of one config."""
    root = tmp_path_factory.mktemp("models")
    return [write_wide_llama(root / str(seed), seed=seed) for seed in range(2)]


def open_llm(model, **settings):
    return LLM(str(model), **(SMALL | {"enable_sleep_mode": True} | settings))


def texts(llm, **more):
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, **more)
    return [output.outputs[0].token_ids for output in outputs]


def resident_bytes():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("Rss:"))


def test_memory_goes_back_to_the_system_and_results_stay(tmp_path):
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = write_tiny_llama(
        tmp_path, **sizes, head_dim=128, vocab_size=20_000, max_position_embeddings=2048
    )
    weights = sum(each.nbytes for each in load_file(model / "model.safetensors").values()) // 2
    prompts = [[3 + number] * 1000 for number in range(2)]
    kv = 2 * 1000 * 2 * 2 * 4 * 128 * 4
    with open_llm(model, kv_cache_dtype="float32", num_kv_blocks=100) as llm:

        def run():
            return [each.outputs[0].token_ids for each in llm.generate(prompts, GREEDY)]

        expected = run()
        for level, taken in ((1, kv), (2, kv + weights)):
            before = resident_bytes()
            llm.sleep(level)
            assert llm.is_sleeping
            assert before - resident_bytes() > 0.9 * taken
            llm.wake_up()
            assert not llm.is_sleeping
            assert run() == expected


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"quantization": "int8"},
        {"quantization": "int4", "check_graphs": True},
        {"dtype": "float32"},
        {"dtype": "float16"},
        {"kv_cache_dtype": "int8"},
        {"spec_method": "ngram", "spec_tokens": 3},
    ],
    ids=str,
)
def test_other_weights_give_what_a_fresh_engine_gives(models, settings):
    expected = []
    for model in models:
        with open_llm(model, **settings) as llm:
            expected.append(texts(llm))
    assert expected[0] != expected[1]
    with open_llm(models[0], **settings) as llm:
        assert texts(llm) == expected[0]
        llm.update_weights(models[1])
        assert (texts(llm), llm.weight_version) == (expected[1], "1")
        llm.sleep(level=2)
        llm.wake_up()
        assert texts(llm) == expected[1]
        tensors = load_file(models[0] / "model.safetensors")
        llm.update_weights(tensors.items(), version="step-7")
        assert (texts(llm), llm.weight_version) == (expected[0], "step-7")


def test_weights_that_came_as_tensors_cannot_be_dropped_and_taken_again(models):
    tensors = load_file(models[1] / "model.safetensors")
    with open_llm(models[1]) as llm:
        expected = texts(llm)
    with open_llm(models[0]) as llm:
        llm.update_weights(tensors.items())
        llm.sleep(level=2)
        with pytest.raises(InvalidRequestError, match="update_weights"):
            llm.wake_up()
        llm.update_weights(tensors.items())  # as a training loop does, before the KV cache is back
        assert llm.is_sleeping
        llm.wake_up(["kv_cache"])
        assert texts(llm) == expected


def test_weights_that_do_not_fit_change_nothing(models, tmp_path):
    other = write_tiny_llama(tmp_path / "other", hidden_size=32)
    packed = load_file(models[0] / "model.safetensors")
    with open_llm(models[0]) as llm:
        expected = texts(llm)
        with pytest.raises(CheckpointError, match="of a wrong shape"):
            llm.update_weights(other)
        with pytest.raises(ModelNotFoundError):
            llm.update_weights(tmp_path / "nowhere")
        assert (texts(llm), llm.weight_version) == (expected, "default")
        name, tensor = packed.popitem()
        for wrong, message in [
            ([("model.nothing", tensor)], "is none of LlamaForCausalLM's"),
            ([(name, tensor[:1])], "has shape"),
            ([(name, tensor.to(torch.int8))], "dtype torch.int8"),
            ([(name, tensor), (name, tensor)], "comes twice"),
            (packed.items(), "1 tensors did not come"),
        ]:
            with pytest.raises(CheckpointError, match=message):
                llm.update_weights(wrong)
            # Some may have been replaced.
            assert llm.llm_engine.state.asleep == ("scheduling", "weights")
            with pytest.raises(InvalidRequestError, match="asleep"):
                texts(llm)
        llm.update_weights(models[0])
        assert texts(llm) == expected


def test_a_config_that_says_something_else_is_told_of(models, tmp_path, caplog):
    other = tmp_path / "other"
    shutil.copytree(models[1], other)
    config = json.loads((other / "config.json").read_text())
    config |= {"rms_norm_eps": 1e-3, "use_cache": False}
    (other / "config.json").write_text(json.dumps(config))
    with open_llm(models[0]) as llm, caplog.at_level("WARNING", logger="tokenmill"):
        llm.update_weights(models[1])
        assert "another config" not in caplog.text
        llm.update_weights(other)
    assert "another config (rms_norm_eps), of which" in caplog.text


def test_requests_go_on_behind_a_sleep(models):
    with open_llm(models[0]) as llm:
        expected = texts(llm)
        engine = llm.llm_engine
        for number, prompt in enumerate(PROMPTS):
            engine.add_request(str(number), prompt, GREEDY)
        brought = {output.request_id: output for output in engine.step()}
        for level in (0, 1, 2):
            llm.sleep(level, mode="keep")
            with pytest.raises(InvalidRequestError, match="wake_up"):
                engine.step()
            llm.wake_up()
            brought |= {output.request_id: output for output in engine.step()}
        while engine.has_unfinished_requests():
            brought |= {output.request_id: output for output in engine.step()}
        assert [brought[str(n)].outputs[0].token_ids for n in range(6)] == expected


def test_embeddings_of_images_are_forgotten(tmp_path):
    mark = processor_of("smolvlm").mark_text
    image = {"multi_modal_data": {"image": [picture(64, 48, 1)]}}
    prompts = [{"prompt": f"The {mark} {word}", **image} for word in ("brown", "fox")]
    other = tmp_path / "other"
    shutil.copytree(saved("smolvlm"), other)
    tensors = load_file(other / "model.safetensors")
    torch.manual_seed(1)
    tensors = {name: each + 0.05 * torch.rand_like(each) for name, each in tensors.items()}
    save_file(tensors, other / "model.safetensors", {"format": "pt"})

    def logprobs(llm):
        outputs = llm.generate(prompts, GREEDY.replace(logprobs=0))
        return [each.outputs[0].cumulative_logprob for each in outputs]

    settings = {"num_kv_blocks": 64, "max_model_len": 512}
    with open_llm(other, **settings) as llm:
        expected = logprobs(llm)
    with open_llm(saved("smolvlm"), **settings) as llm:
        before = logprobs(llm)
        llm.update_weights(other)
        assert logprobs(llm) == expected != before
        llm.sleep(level=1)
        llm.wake_up()
        assert logprobs(llm) == expected


@pytest.mark.parametrize(("mode", "reason"), [("abort", "abort"), ("wait", "length")])
def test_requests_end_before_a_sleep(models, mode, reason):
    with open_llm(models[0]) as llm:
        engine = llm.llm_engine
        engine.add_request("0", PROMPTS[0], GREEDY)
        engine.step()
        llm.sleep(mode=mode)
        ends = [each.outputs[0].finish_reason for each in engine.step() if each.finished]
        assert ends == [reason]
        assert not engine.has_unfinished_requests()
        llm.wake_up()
        assert len(texts(llm)) == 6


def test_adapters_stay_when_weights_are_replaced(models, tmp_path):
    reference = AutoModelForCausalLM.from_pretrained(models[0])
    adapter = LoRARequest("a", str(write_adapter(tmp_path, reference)))
    settings = {"enable_lora": True, "max_lora_rank": 8}

    def both(llm):
        return [texts(llm), texts(llm, lora_request=adapter)]

    with open_llm(models[1], **settings) as llm:
        expected = both(llm)
    with open_llm(models[0], **settings) as llm:
        assert expected[0] != expected[1] != both(llm)[1]
        llm.update_weights(models[1])
        assert both(llm) == expected
        llm.sleep(level=2)
        llm.wake_up()
        assert both(llm) == expected


def test_kv_that_is_kept_elsewhere_is_of_the_weights_that_there_are(models, tmp_path):
    with open_llm(models[0], kv_offload_dir=str(tmp_path)) as llm:
        expected = texts(llm)
        with pytest.raises(InvalidRequestError, match="or kv_offload_dir"):
            llm.update_weights(models[1])
        llm.sleep(level=2)
        llm.wake_up()
        assert texts(llm) == expected


def test_what_there_is_not_is_refused(models):
    with LLM(str(models[0]), **SMALL) as llm:
        for call, message in [
            (lambda: llm.sleep(1), "enable_sleep_mode=True"),
            (lambda: llm.sleep(3), "level=3"),
            (lambda: llm.sleep(0, mode="later"), "mode: 'later'"),
            (lambda: llm.wake_up(["weight"]), "Did you mean 'weights'"),
            (lambda: llm.update_weights(models[1], version=7), "version=7 must be a line"),
            (lambda: llm.update_weights(models[1], version="1\n2"), "must be a line"),
            (lambda: llm.update_weights(models[1], version="v" * 257), "at most 256"),
        ]:
            with pytest.raises(InvalidRequestError, match=message):
                call()
        llm.sleep(0)
        llm.wake_up(["scheduling"])
        assert len(texts(llm)) == 6
    with pytest.raises(ConfigError, match=r"enable_sleep_mode is not there with tensor_parallel"):
        open_llm(models[0], tensor_parallel_size=2)
