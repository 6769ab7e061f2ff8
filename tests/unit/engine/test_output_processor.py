"""Core outputs to what the user sees: text, stop strings, deltas, `n`, aborts, logprobs."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.tiny import tiny_llama
from tokenmill.checkpoint.checkpoint import TokenizerData
from tokenmill.contracts.request import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    TokenLogprobs,
)
from tokenmill.engine.input_processor import ProcessedInput
from tokenmill.engine.output_processor import OutputProcessor
from tokenmill.outputs import RequestOutput
from tokenmill.sampling_params import RequestOutputKind, SamplingParams
from tokenmill.tokenizer.tokenizer import Tokenizer, load_tokenizer

DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
PROMPT = [5, 6, 7]
EOS = 2


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(TokenizerData(directory=tiny_llama()))


def source(user_id: str = "user", prefix: str = "core", **params: Any) -> ProcessedInput:
    sampling_params = SamplingParams(**params)
    return ProcessedInput(
        request_id=user_id,
        prompt=None,
        prompt_token_ids=PROMPT,
        params=sampling_params,
        children=[
            EngineCoreRequest(
                request_id=f"{prefix}-{i}",
                prompt_token_ids=PROMPT,
                sampling_params=sampling_params,
                seed=i,
                max_tokens=16,
                arrival_time=0.0,
            )
            for i in range(sampling_params.n)
        ],
    )


def core_output(
    token_ids: list[int], core_id: str = "core-0", finish: FinishReason | None = None, **more: Any
) -> EngineCoreOutputs:
    output = EngineCoreOutput(core_id, new_token_ids=token_ids, finish_reason=finish, **more)
    return EngineCoreOutputs(outputs=[output])


def run(
    processor: OutputProcessor, token_ids: list[int], finish: FinishReason, per_step: int = 1
) -> tuple[list[RequestOutput], list[str]]:
    """Feed tokens step by step until the request has finished or a stop string has ended it."""
    outputs: list[RequestOutput] = []
    for start in range(0, len(token_ids), per_step):
        last = start + per_step >= len(token_ids)
        step = core_output(token_ids[start : start + per_step], finish=finish if last else None)
        new, stopped = processor.process_outputs(step)
        outputs += new
        if stopped or last:
            return outputs, stopped
    raise AssertionError("no tokens")


@pytest.mark.parametrize("per_step", [1, 3])
def test_cumulative_and_delta_tell_the_same(tokenizer: Tokenizer, per_step: int) -> None:
    text = " jumps over the lazy dog 😀 你好"
    ids = tokenizer.encode(text)
    seen: dict[RequestOutputKind, list[RequestOutput]] = {}
    for kind in RequestOutputKind:
        processor = OutputProcessor(tokenizer)
        processor.add_request(source(output_kind=kind))
        seen[kind], stopped = run(processor, ids, FinishReason.LENGTH, per_step)
        assert stopped == []
        assert processor.num_unfinished == 0
    cumulative, deltas, final = seen.values()
    assert "".join(output.outputs[0].text for output in deltas) == text
    assert [i for output in deltas for i in output.outputs[0].token_ids] == ids
    assert cumulative[-1].outputs[0].text == text
    assert [len(o.outputs[0].token_ids) for o in cumulative][-1] == len(ids)
    assert len(final) == 1
    assert final[0].outputs[0] == cumulative[-1].outputs[0]
    assert [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]
    assert final[0].outputs[0].finish_reason == "length"


def test_a_stop_string_ends_the_request_and_tells_the_core(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add_request(source(stop=["lazy"], output_kind=DELTA))
    ids = tokenizer.encode(" jumps over the lazy dog")
    outputs, stopped = run(processor, ids, FinishReason.LENGTH)
    assert stopped == ["core-0"]
    sequence = outputs[-1].outputs[0]
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", "lazy")
    assert "".join(output.outputs[0].text for output in outputs) == " jumps over the "
    late, again = processor.process_outputs(core_output([9]))
    assert (late, again) == ([], [])


def test_a_stop_string_on_the_last_token_needs_no_abort(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add_request(source(stop=["dog"]))
    outputs, stopped = run(processor, tokenizer.encode(" lazy dog"), FinishReason.LENGTH)
    assert stopped == []
    assert outputs[-1].outputs[0].stop_reason == "dog"


@pytest.mark.parametrize("include", [True, False])
def test_b004_the_text_of_a_stop_token(tokenizer: Tokenizer, include: bool) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add_request(source(include_stop_str_in_output=include, skip_special_tokens=False))
    ids = [*tokenizer.encode("dog"), EOS]
    outputs, _ = run(processor, ids, FinishReason.STOP)
    sequence = outputs[-1].outputs[0]
    assert sequence.token_ids == ids
    assert sequence.text == ("dog<|im_end|>" if include else "dog")


def test_n_sequences_final_only_come_together_in_order(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add_request(source(n=3, output_kind=FINAL))
    for core_id in ("core-2", "core-0"):
        step = core_output(tokenizer.encode("dog"), core_id, FinishReason.LENGTH)
        assert processor.process_outputs(step) == ([], [])
    (output,), _ = processor.process_outputs(core_output([9], "core-1", FinishReason.LENGTH))
    assert [sequence.index for sequence in output.outputs] == [0, 1, 2]
    assert output.finished


def test_n_sequences_streamed_come_apart(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add_request(source(n=2, output_kind=DELTA))
    (first,), _ = processor.process_outputs(core_output([9], "core-1", FinishReason.LENGTH))
    assert [sequence.index for sequence in first.outputs] == [1]
    assert first.outputs[0].finished
    assert not first.finished
    (second,), _ = processor.process_outputs(core_output([9], "core-0", FinishReason.LENGTH))
    assert second.finished


def test_abort_gives_last_outputs_and_core_ids(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add_request(source("a", "first"))
    processor.add_request(source("a", "second"))
    processor.add_request(source("b", "third"))
    processor.process_outputs(core_output(tokenizer.encode("dog"), "first-0"))
    outputs, core_ids = processor.abort(["a", "unknown"])
    assert core_ids == ["first-0", "second-0"]
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort", "abort"]
    assert outputs[0].outputs[0].text == "dog"
    assert processor.num_unfinished == 1
    assert processor.abort(["a"]) == ([], [])


def test_abort_of_the_rest_of_n(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add_request(source(n=2, output_kind=FINAL))
    processor.process_outputs(core_output([9], "core-0", FinishReason.LENGTH))
    (output,), core_ids = processor.abort(["user"])
    assert core_ids == ["core-1"]
    assert [sequence.finish_reason for sequence in output.outputs] == ["length", "abort"]


def test_errors_reach_the_user(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add_request(source())
    (output,), _ = processor.process_outputs(
        core_output([], finish=FinishReason.ERROR, error="it broke")
    )
    assert (output.outputs[0].finish_reason, output.outputs[0].error) == ("error", "it broke")
    assert output.finished


def logprobs(*token_ids: int) -> TokenLogprobs:
    return TokenLogprobs(list(token_ids), [-float(i + 1) for i in range(len(token_ids))], 2)


def test_b027_the_chosen_token_comes_first(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add_request(source(logprobs=2))
    step = core_output([9], new_logprobs=[logprobs(9, 11, 12)])
    (output,), _ = processor.process_outputs(step)
    (position,) = output.outputs[0].logprobs or []
    assert list(position) == [9, 11, 12]
    assert [entry.rank for entry in position.values()] == [2, 1, 2]
    assert output.outputs[0].cumulative_logprob == -1.0
    step = core_output([11], new_logprobs=[logprobs(11, 11, 12)])
    (output,), _ = processor.process_outputs(step)
    assert list((output.outputs[0].logprobs or [])[1]) == [11, 12]
    assert output.outputs[0].cumulative_logprob == -2.0


def test_logprobs_in_deltas(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add_request(source(logprobs=0, prompt_logprobs=0, output_kind=DELTA))
    steps = [
        core_output([9], new_logprobs=[logprobs(9)], prompt_logprobs=[logprobs(6), logprobs(7)]),
        core_output([10], new_logprobs=[logprobs(10)], finish=FinishReason.LENGTH),
    ]
    first, second = (processor.process_outputs(step)[0][0] for step in steps)
    assert [list(p) for p in first.outputs[0].logprobs or []] == [[9]]
    assert [list(p) for p in second.outputs[0].logprobs or []] == [[10]]
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert [list(p) for p in first.prompt_logprobs[1:] if p] == [[6], [7]]
    assert second.prompt_logprobs is None


def test_token_texts_of_a_split_character_join_to_it(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add_request(source(logprobs=0))
    ids = tokenizer.encode("a🦥b")
    assert len(ids) > 4
    texts = []
    for token_id in ids:
        (output,), _ = processor.process_outputs(
            core_output([token_id], new_logprobs=[logprobs(token_id)])
        )
        texts.append((output.outputs[0].logprobs or [])[-1][token_id].decoded_token)
    assert "".join(text or "" for text in texts) == "a🦥b"
    assert texts[-2] == "🦥"


def test_logprobs_behind_a_stop_string_are_dropped_with_their_tokens(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add_request(source(logprobs=0, stop="dog"))
    ids = [*tokenizer.encode("dog"), 9, 9]
    (output,), stopped = processor.process_outputs(
        core_output(ids, new_logprobs=[logprobs(i) for i in ids])
    )
    sequence = output.outputs[0]
    assert stopped == ["core-0"]
    assert sequence.token_ids == ids[:-2]
    assert len(sequence.logprobs or []) == len(sequence.token_ids)


def test_ids_only(tokenizer: Tokenizer) -> None:
    for by, params in ((None, {}), (tokenizer, {"detokenize": False})):
        processor = OutputProcessor(by)
        processor.add_request(source(logprobs=0, **params))
        (output,), _ = processor.process_outputs(
            core_output([9, EOS], new_logprobs=[logprobs(9), logprobs(EOS)])
        )
        assert output.outputs[0].text == ""
        assert output.outputs[0].token_ids == [9, EOS]


def test_times_are_told(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add_request(source())
    (output,), _ = processor.process_outputs(
        core_output([9], first_scheduled_time=1.0, num_preemptions=2, num_cached_tokens=3)
    )
    metrics = output.metrics
    assert (metrics.first_scheduled_time, metrics.num_preemptions) == (1.0, 2)
    assert output.num_cached_tokens == 3
    assert metrics.time_to_first_token == metrics.first_token_time


def test_times_of_n_sequences_span_all_of_them(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    processor.add_request(source(n=2, output_kind=FINAL))
    steps = [
        core_output([9], "core-0", FinishReason.LENGTH, first_scheduled_time=1.0),
        core_output([9], "core-1", first_scheduled_time=2.0, num_preemptions=1),
        core_output([9], "core-1", FinishReason.LENGTH, first_scheduled_time=2.0),
    ]
    *_, ((output,), _) = (processor.process_outputs(step) for step in steps)
    metrics = output.metrics
    assert metrics.first_scheduled_time == 1.0
    assert metrics.first_token_time is not None
    assert metrics.last_token_time is not None
    assert metrics.first_token_time < metrics.last_token_time


@pytest.mark.parametrize("ends_by_token", [False, True])
def test_a_text_that_is_complete_keeps_its_last_token(
    tokenizer: Tokenizer, ends_by_token: bool
) -> None:
    """It ended since nothing could follow; an end token, if there is one, has no text as ever."""
    processor = OutputProcessor(tokenizer)
    asked = source(structured_outputs={"choice": ["dog"]}, skip_special_tokens=False)
    for child in asked.children:
        child.eos_token_id = EOS
    processor.add_request(asked)
    ids = [*tokenizer.encode("dog"), *([EOS] if ends_by_token else [])]
    outputs, _ = run(processor, ids, FinishReason.STOP)
    assert outputs[-1].outputs[0].text == "dog"
    assert outputs[-1].outputs[0].token_ids == ids
