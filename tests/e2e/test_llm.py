"""`LLM` from outside, on a tiny model: what goes in, what comes out, what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.tiny import tiny_llama
from tokenmill import LLM, LLMEngine, RequestOutputKind, SamplingParams
from tokenmill.config.engine_args import EngineArgs
from tokenmill.errors import (
    ChatTemplateError,
    ConfigError,
    ContextLengthExceededError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    UnknownArgumentError,
)

README = Path(__file__).parents[2] / "README.md"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def make_llm(**settings: Any) -> LLM:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "num_kv_blocks": 64,
        "max_num_seqs": 16,
        "num_threads": 1,
    }
    return LLM(str(tiny_llama()), **(defaults | settings))


@pytest.fixture(scope="module")
def llm():
    with make_llm() as llm:
        yield llm


def texts(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(prompts, params)]


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["One two", "The", "quick brown fox jumps", "lazy dog"]
    params = [GREEDY.replace(max_tokens=n) for n in (20, 1, 9, 3)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [20, 1, 9, 3]
    assert all(output.finished for output in outputs)
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


def test_forms_of_prompts_are_equal(llm: LLM) -> None:
    assert llm.llm_engine.tokenizer is not None
    ids = llm.llm_engine.tokenizer.encode("The quick")
    (text,) = texts(llm, "The quick")
    assert texts(llm, ids) == [text]
    assert texts(llm, [ids, {"prompt": "The quick"}, {"prompt_token_ids": ids}]) == [text] * 3


def test_text_is_the_decoded_ids(llm: LLM) -> None:
    assert llm.llm_engine.tokenizer is not None
    for output in llm.generate(["The", "One"], GREEDY.replace(max_tokens=30)):
        sequence = output.outputs[0]
        whole = llm.llm_engine.tokenizer.decode(
            output.prompt_token_ids + sequence.token_ids, skip_special_tokens=True
        )
        assert whole == f"{output.prompt}{sequence.text}"


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["The", ""], {"prompt": ""}])
def test_b020_empty_prompts_are_refused_and_nothing_runs(llm: LLM, prompt: Any) -> None:
    with pytest.raises(ValueError, match="prompt"):
        llm.generate(prompt)
    assert not llm.llm_engine.has_unfinished_requests()
    assert len(texts(llm, "The")) == 1


def test_b019_ids_out_of_range_in_one_prompt_of_a_batch(llm: LLM) -> None:
    for bad in (-1, 400, 2**62):
        with pytest.raises(InvalidRequestError, match=str(bad)):
            llm.generate([[1, 2], [3, bad]])
        assert not llm.llm_engine.has_unfinished_requests()


def test_an_engine_shows_what_it_runs(llm: LLM) -> None:
    assert repr(llm) == f"<LLM {llm.llm_engine.summary}>"
    assert "float32" in repr(llm)


def test_counts_must_match(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="3 entries for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY] * 3)
    with pytest.raises(InvalidRequestError, match="priority has 1 entries"):
        llm.generate(["a", "b"], GREEDY, priority=[1])
    with pytest.raises(InvalidRequestError, match="must be SamplingParams"):
        llm.generate(["a"], [{"temperature": 1}])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompts": None}, "prompt has type NoneType"),
        ({"prompts": b"abc"}, "prompt has type bytes"),
        ({"prompts": "a", "sampling_params": 5}, "sampling_params has type int"),
        ({"prompts": "a", "sampling_params": {"temperature": 1}}, "sampling_params has type dict"),
        ({"prompts": "a", "priority": 5}, "priority has type int"),
        ({"prompts": {"prompt": "The quick" * 9, "cache_salt": "\ud800"}}, "cache_salt"),
    ],
    ids=["none", "bytes", "params", "params-dict", "priority", "salt"],
)
def test_arguments_of_another_kind_are_named(
    llm: LLM, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        llm.generate(**arguments)
    assert len(texts(llm, "The")) == 1


@pytest.mark.parametrize("messages", [None, 5, "hi", {"role": "user", "content": "x"}])
def test_messages_of_another_kind_are_named(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match="messages must be a list"):
        llm.chat(messages)


def test_a_chat_template_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("Say: {{ messages[0].content }}")
    with make_llm(chat_template=str(path)) as llm:
        prompt = llm.chat_prompt([{"role": "user", "content": "hi"}])
    assert prompt["prompt"] == "Say: hi"


@pytest.mark.parametrize("template", ["/etc/hostname", "chatml"])
def test_a_request_names_no_file_as_its_template(llm: LLM, template: str) -> None:
    with pytest.raises(ChatTemplateError, match="neither a template nor the name"):
        llm.chat([{"role": "user", "content": "hi"}], chat_template=template)


def test_an_array_of_ids_is_a_prompt(llm: LLM) -> None:
    assert texts(llm, np.array([5, 6, 7])) == texts(llm, [5, 6, 7])


def test_unknown_settings_are_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownArgumentError, match="Did you mean 'max_model_len'"):
        make_llm(max_modell_len=64)
    with pytest.raises(ModelNotFoundError):
        LLM("no-such-model-anywhere")
    with pytest.raises(ConfigError, match="attention_backend"):
        make_llm(attention_backend="flush")


def test_b010_seeded_requests_do_not_see_their_neighbours(llm: LLM) -> None:
    seeded = SamplingParams(temperature=1, seed=7, max_tokens=12, ignore_eos=True)
    alone = llm.generate("The quick", seeded)[0].outputs[0].token_ids
    unseeded = SamplingParams(temperature=1, max_tokens=9, ignore_eos=True)
    for neighbours in (1, 3, 8):
        prompts = ["One"] * neighbours
        first = llm.generate(["The quick", *prompts], [seeded, *[unseeded] * neighbours])
        last = llm.generate([*prompts, "The quick"], [*[unseeded] * neighbours, seeded])
        assert first[0].outputs[0].token_ids == alone
        assert last[-1].outputs[0].token_ids == alone


def test_b011_n_sequences_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1, seed=1, max_tokens=10, ignore_eos=True)
    first, second = (llm.generate("The", params)[0] for _ in range(2))
    ids = [sequence.token_ids for sequence in first.outputs]
    assert [sequence.index for sequence in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(sequence) for sequence in ids}) > 1
    assert ids == [sequence.token_ids for sequence in second.outputs]
    single = llm.generate(["The", "The"], params.replace(n=1))
    assert [output.outputs[0].token_ids for output in single] == [ids[0], ids[0]]


def test_b013_every_tiny_temperature_is_greedy(llm: LLM) -> None:
    expected = texts(llm, "The quick")
    for temperature in (1e-2, 1e-3, 1e-5, 1e-8):
        params = GREEDY.replace(temperature=temperature, top_p=1e-4)
        assert texts(llm, "The quick", params) == expected


@pytest.mark.parametrize(
    "params", [{"top_k": -1}, {"top_k": 10**9}, {"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-9}]
)
def test_b015_edge_values_give_a_result(llm: LLM, params: dict[str, Any]) -> None:
    full = {"temperature": 1.0, "seed": 3, "max_tokens": 5, "ignore_eos": True, **params}
    ids = llm.generate("The", SamplingParams(**full))[0].outputs[0].token_ids
    assert len(ids) == 5
    if params in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-9}):
        assert ids == llm.generate("The", GREEDY.replace(max_tokens=5))[0].outputs[0].token_ids


@pytest.mark.parametrize("length", [510, 511, 512, 513])
@pytest.mark.parametrize("max_tokens", [1, 2, None])
@pytest.mark.parametrize("prompt_logprobs", [None, 1])
def test_b023_at_the_end_of_the_context(
    llm: LLM, length: int, max_tokens: int | None, prompt_logprobs: int | None
) -> None:
    params = GREEDY.replace(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
    if length >= 512:
        with pytest.raises(ContextLengthExceededError, match=f"{length} tokens.*max_model_len=512"):
            llm.generate([[5] * length], params)
        return
    (output,) = llm.generate([[5] * length], params)
    sequence = output.outputs[0]
    assert len(sequence.token_ids) == min(max_tokens or 512, 512 - length)
    assert sequence.finish_reason == "length"


def test_b027_logprobs(llm: LLM) -> None:
    for count in (0, 1, 5):
        params = SamplingParams(
            temperature=1, seed=2, max_tokens=6, ignore_eos=True, logprobs=count
        )
        sequence = llm.generate("The", params)[0].outputs[0]
        assert sequence.logprobs is not None
        for token_id, position in zip(sequence.token_ids, sequence.logprobs, strict=True):
            assert next(iter(position)) == token_id
            assert max(count, 1) <= len(position) <= count + 1
            best = [entry for entry in position.values() if entry.rank <= count]
            assert [e.logprob for e in best] == sorted((e.logprob for e in best), reverse=True) or (
                position[token_id].rank <= count
            )
        total = sum(
            p[t].logprob for t, p in zip(sequence.token_ids, sequence.logprobs, strict=True)
        )
        assert sequence.cumulative_logprob == pytest.approx(total)
    everything = make_llm(max_logprobs=-1)
    params = GREEDY.replace(max_tokens=1, logprobs=-1, prompt_logprobs=-1)
    (output,) = everything.generate("The quick", params)
    everything.close()
    for position in [*(output.outputs[0].logprobs or []), *(output.prompt_logprobs or [])[1:]]:
        assert position is not None
        assert sorted(position) == list(range(400))
        assert sum(2.718281828**e.logprob for e in position.values()) == pytest.approx(1, abs=1e-4)


def test_b026_prompt_logprobs_do_not_read_the_cache() -> None:
    with make_llm(block_size=16, max_num_batched_tokens=24) as llm:
        for length in (15, 16, 17, 40):
            prompt = [(7 * i) % 390 + 3 for i in range(length)]
            asked = GREEDY.replace(prompt_logprobs=2)
            cold = llm.generate([prompt], asked)[0]
            plain = llm.generate([prompt], GREEDY)[0]
            warm = llm.generate([prompt], asked)[0]
            assert cold.prompt_logprobs == warm.prompt_logprobs
            assert cold.outputs[0].token_ids == warm.outputs[0].token_ids
            assert plain.outputs[0].token_ids == warm.outputs[0].token_ids
            assert warm.num_cached_tokens == cold.num_cached_tokens == 0
            assert plain.num_cached_tokens == (length - 1) // 16 * 16


def test_b073_a_prompt_twice_at_every_length() -> None:
    with make_llm(block_size=8, max_num_batched_tokens=16) as llm:
        for length in range(1, 3 * 8 + 2):
            prompt = [(length * 31 + 7 * i) % 390 + 3 for i in range(length)]
            first, second = (llm.generate([prompt], GREEDY)[0] for _ in range(2))
            assert first.outputs[0].token_ids == second.outputs[0].token_ids
            assert second.num_cached_tokens == (length - 1) // 8 * 8


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_b075_preempted_runs_equal_undisturbed_ones(kind: str) -> None:
    sampling = {"temperature": 0.0} if kind == "greedy" else {"temperature": 1.0, "top_p": 0.9}
    prompts = [f"The quick brown fox {i}" for i in range(6)]
    params = [
        SamplingParams(
            **sampling, seed=i, max_tokens=60, ignore_eos=True, logprobs=2, stop=["never there"]
        )
        for i in range(6)
    ]
    with make_llm(enable_prefix_caching=False) as roomy:
        expected = roomy.generate(prompts, params)
    with make_llm(num_kv_blocks=18, block_size=8, max_model_len=128) as tight:
        outputs = tight.generate(prompts, params)
    assert sum(output.metrics.num_preemptions for output in outputs) > 3
    for output, undisturbed in zip(outputs, expected, strict=True):
        assert output.outputs == undisturbed.outputs


def test_b080_a_request_that_outgrows_the_pool_ends_and_the_next_is_served() -> None:
    with make_llm(num_kv_blocks=4, block_size=8, max_model_len=32) as llm:
        long, tiny = llm.generate([[5] * 30, [6]], GREEDY.replace(max_tokens=None))
        assert long.outputs[0].finish_reason == "length"
        assert len(long.outputs[0].token_ids) == 2
        assert len(tiny.outputs[0].token_ids) == 31


def test_b030_min_tokens_masks_every_end(llm: LLM) -> None:
    free = llm.generate("The", GREEDY.replace(max_tokens=10))[0].outputs[0].token_ids
    ending = GREEDY.replace(
        max_tokens=30, ignore_eos=False, stop_token_ids=[free[1]], stop=["e", " ", "a"]
    )
    assert len(llm.generate("The", ending)[0].outputs[0].token_ids) <= 2
    held = llm.generate("The", ending.replace(min_tokens=20))[0].outputs[0].token_ids
    assert len(held) >= 20
    assert free[1] not in held[:20]
    assert 2 not in held[:20]


def test_b004_b006_stop_strings(llm: LLM) -> None:
    (text,) = texts(llm, "One two", GREEDY.replace(max_tokens=20))
    for start, length in ((2, 3), (5, 2), (8, 4)):
        stop = text[start : start + length]
        for stops in (stop, [stop], ["not in there", stop]):
            params = GREEDY.replace(max_tokens=20, stop=stops)
            sequence = llm.generate("One two", params)[0].outputs[0]
            assert sequence.text == text[: text.index(stop)]
            assert (sequence.finish_reason, sequence.stop_reason) == ("stop", stop)
        included = GREEDY.replace(max_tokens=20, stop=stop, include_stop_str_in_output=True)
        assert texts(llm, "One two", included) == [text[: text.index(stop) + length]]
    assert texts(llm, "One two", GREEDY.replace(max_tokens=20, stop=None)) == [text]


def test_chat_is_the_template_and_generate(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Name a colour."}]
    (answer,) = llm.chat(messages, GREEDY)
    prompt = "<|im_start|>user\nName a colour.<|im_end|>\n<|im_start|>assistant\n"
    assert answer.prompt == prompt
    assert [answer.outputs[0].text] == texts(llm, prompt)
    two = llm.chat([messages, messages], [GREEDY, GREEDY.replace(max_tokens=3)])
    assert [len(output.outputs[0].token_ids) for output in two] == [8, 3]


def test_streaming_deltas_through_the_engine(llm: LLM) -> None:
    engine = llm.llm_engine
    params = GREEDY.replace(max_tokens=12, output_kind=RequestOutputKind.DELTA)
    for name in ("a", "b"):
        engine.add_request(name, "The quick", params)
    parts: dict[str, list[str]] = {"a": [], "b": []}
    while engine.has_unfinished_requests():
        for output in engine.step():
            parts[output.request_id].append(output.outputs[0].text)
    (whole,) = texts(llm, "The quick", GREEDY.replace(max_tokens=12))
    assert ["".join(part) for part in parts.values()] == [whole, whole]
    assert len(parts["a"]) > 3


def test_abort_frees_a_request_at_any_point(llm: LLM) -> None:
    engine = llm.llm_engine
    long = GREEDY.replace(max_tokens=400)
    for steps in (0, 1, 5):
        engine.add_request("gone", "The quick", long)
        engine.add_request("stays", "The quick", GREEDY)
        for _ in range(steps):
            engine.step()
        (last,) = engine.abort_request(["gone"])
        assert last.outputs[0].finish_reason == "abort"
        finished = []
        while engine.has_unfinished_requests():
            finished += [output for output in engine.step() if output.finished]
        assert [output.request_id for output in finished] == ["stays"]
        stats = engine.step() or engine._client.core.scheduler.make_stats()
        assert stats.num_used_blocks == 0


def test_ctrl_c_leaves_the_engine_usable(llm: LLM) -> None:
    expected = texts(llm, "The quick")
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["The quick"] * 200, GREEDY.replace(max_tokens=400))
    timer.join()
    assert not llm.llm_engine.has_unfinished_requests()
    assert texts(llm, "The quick") == expected


def test_ctrl_c_in_the_step_that_ends_a_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    core = llm.llm_engine._client.core
    step = core.step

    def interrupted() -> Any:
        outputs = step()
        if any(output.finished for output in outputs.outputs):
            os.kill(os.getpid(), signal.SIGINT)
        return outputs

    params = [GREEDY.replace(max_tokens=2), GREEDY]
    expected = [texts(llm, "The quick", own)[0] for own in params]
    with monkeypatch.context() as patch:
        patch.setattr(core, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["One two", "lazy dog"], params)
    assert not llm.llm_engine.has_unfinished_requests()
    assert texts(llm, ["The quick"] * 2, params) == expected


def test_generate_leaves_the_requests_of_others_alone() -> None:
    with make_llm() as llm:
        prompts, params = ["The quick", "One"], [GREEDY.replace(max_tokens=2), GREEDY]
        expected = texts(llm, prompts, params)
        llm.llm_engine.add_request("other", "lazy dog", GREEDY.replace(max_tokens=2))
        assert texts(llm, prompts, params) == expected


def test_close_is_final_and_may_be_repeated() -> None:
    llm = make_llm()
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("The")


def test_threads_take_turns(llm: LLM) -> None:
    expected = texts(llm, ["The quick", "One two"])
    found: dict[int, list[str]] = {}

    def work(index: int) -> None:
        found[index] = texts(llm, ["The quick", "One two"])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(4), expected)


def test_ids_only_mode() -> None:
    with make_llm(skip_tokenizer_init=True) as llm:
        sequence = llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0]
        assert len(sequence.token_ids) == 8
        assert sequence.text == ""
        with pytest.raises(InvalidRequestError, match="no tokenizer"):
            llm.generate("The")
        with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
            llm.chat([{"role": "user", "content": "x"}])


def test_b032_b033_the_models_defaults(caplog: pytest.LogCaptureFixture) -> None:
    overrides = {"repetition_penalty": 1.1, "temperature": 0.6, "top_k": 1, "eos_token_id": [5, 6]}
    with caplog.at_level("INFO"), make_llm(override_generation_config=overrides) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_k) == (0.6, 1)
        assert params.repetition_penalty == 1.1
        assert "temperature=0.6" in caplog.text
        assert llm.llm_engine.end_token_ids == (2, 5, 6)
    with make_llm(generation_config="none") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    with pytest.raises(ConfigError, match="generation_config"):
        make_llm(override_generation_config={"temperature": -1})
    with pytest.raises(ConfigError, match="Did you mean 'auto'"):
        make_llm(generation_config="auto_")


def test_priority_order() -> None:
    with make_llm(scheduling_policy="priority", max_num_seqs=1) as llm:
        outputs = llm.generate(["a", "b", "c"], GREEDY, priority=[2, 0, 1])
        started = [output.metrics.first_scheduled_time for output in outputs]
        assert sorted(range(3), key=lambda i: started[i] or 0.0) == [1, 2, 0]


def test_engine_from_args() -> None:
    args = EngineArgs(model=str(tiny_llama()), dtype="float32", num_kv_blocks=64)
    engine = LLMEngine.from_args(args)
    engine.add_request("x", "The quick", GREEDY)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].finished
    engine.close()


def run_script(*argv: str, stdin: str = "") -> str:
    done = subprocess.run(
        [sys.executable, *argv], input=stdin, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.model
def test_b123_the_readmes_example_word_for_word(tmp_path: Path) -> None:
    example = README.read_text().split("```python\n")[1].split("```")[0]
    script = tmp_path / "example.py"
    script.write_text(example)
    as_file = run_script(str(script))
    assert "Paris" in as_file
    assert run_script("-c", example) == as_file
    assert run_script("-", stdin=f"exec({example!r}, {{}})") == as_file
    threaded = f"import threading\ndef work():\n{textwrap.indent(example, '    ')}"
    assert run_script("-c", f"{threaded}\nt = threading.Thread(target=work)\nt.start()\nt.join()")
