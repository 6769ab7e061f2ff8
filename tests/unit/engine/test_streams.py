"""What a slow reader gets: several outputs as one, and nothing lost."""

from __future__ import annotations

import asyncio

import pytest

from tokenmill.engine.streams import OutputStream, merge
from tokenmill.errors import EngineDeadError
from tokenmill.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput


def output(index=0, text="", ids=(), *, finished=False, metrics=None, **more):
    sequence = CompletionOutput(index=index, text=text, token_ids=list(ids), **more)
    return RequestOutput(
        "id", None, [1], [sequence], finished, metrics=metrics or RequestMetrics(0.0)
    )


def logprobs(*ids):
    return [{token_id: Logprob(-1.0, 1)} for token_id in ids]


def test_deltas_are_joined():
    first = output(text="a", ids=[1], logprobs=logprobs(1), cumulative_logprob=-1.0)
    first.prompt_logprobs = [None]
    then = output(
        text="bc",
        ids=[2, 3],
        logprobs=logprobs(2, 3),
        cumulative_logprob=-3.0,
        finished=True,
        finish_reason="stop",
        stop_reason="c",
    )
    merge(first, then, delta=True)
    (sequence,) = first.outputs
    assert (sequence.text, sequence.token_ids) == ("abc", [1, 2, 3])
    assert sequence.logprobs == logprobs(1, 2, 3)
    assert sequence.cumulative_logprob == -3.0
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", "c")
    assert first.finished
    assert first.prompt_logprobs == [None]


def test_of_whole_texts_the_later_counts():
    first = output(text="a", ids=[1])
    merge(first, output(text="ab", ids=[1, 2]), delta=False)
    assert [(s.text, s.token_ids) for s in first.outputs] == [("ab", [1, 2])]


@pytest.mark.parametrize("delta", [False, True])
def test_sequences_stay_apart(delta):
    first = output(0, "a", [1])
    merge(first, output(1, "x", [7]), delta=delta)
    merge(first, output(0, "b", [2], finish_reason="length"), delta=delta)
    merge(first, output(1, "y", [8]), delta=delta)
    expected = [("ab", [1, 2]), ("xy", [7, 8])] if delta else [("b", [2]), ("y", [8])]
    assert [(s.text, s.token_ids) for s in first.outputs] == expected
    assert [s.finish_reason for s in first.outputs] == ["length", None]
    assert not first.finished


def test_times_cover_all_sequences():
    first = output(0, metrics=RequestMetrics(1.0, 2.0, 3.0, 3.0, 1))
    merge(first, output(0, metrics=RequestMetrics(1.0, 2.0, 3.0, 4.0, 1)), delta=True)
    assert first.metrics == RequestMetrics(1.0, 2.0, 3.0, 4.0, 1)
    merge(first, output(1, metrics=RequestMetrics(1.0, 2.5, 4.0, 9.0, 0)), delta=True)
    assert first.metrics == RequestMetrics(1.0, 2.0, 3.0, 9.0, 1)
    merge(first, output(1, metrics=RequestMetrics(1.0)), delta=True)
    assert first.metrics == RequestMetrics(1.0, 2.0, 3.0, 9.0, 1)


def test_a_reader_waits_and_is_woken_once_for_all_that_came():
    async def main():
        stream = OutputStream(delta=True)
        reading = asyncio.create_task(stream.get())
        await asyncio.sleep(0)
        assert not reading.done()
        stream.put(output(text="a", ids=[1]))
        stream.put(output(text="b", ids=[2]))
        assert (await reading).outputs[0].text == "ab"
        stream.put(output(text="c", ids=[3]))
        assert (await stream.get()).outputs[0].text == "c"

    asyncio.run(main())


def test_an_error_comes_after_what_was_there():
    async def main():
        stream = OutputStream(delta=True)
        stream.put(output(text="a", ids=[1]))
        stream.fail(EngineDeadError("dead"))
        assert (await stream.get()).outputs[0].text == "a"
        for _ in range(2):
            with pytest.raises(EngineDeadError):
                await stream.get()
        waiting = OutputStream(delta=False)
        reading = asyncio.create_task(waiting.get())
        await asyncio.sleep(0)
        waiting.fail(EngineDeadError("dead"))
        with pytest.raises(EngineDeadError):
            await reading

    asyncio.run(main())


def test_a_cancelled_reader_does_no_harm():
    async def main():
        stream = OutputStream(delta=True)
        reading = asyncio.create_task(stream.get())
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.sleep(0)
        stream.put(output(text="a", ids=[1]))
        assert (await stream.get()).outputs[0].text == "a"

    asyncio.run(main())
