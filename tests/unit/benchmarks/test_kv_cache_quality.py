"""Prompts with a fact in them, texts of full length, and what is asked about both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.tiny import write_wide_llama
from tokenmill import LLM, SamplingParams

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.syspath_prepend(FOLDER / "peers")


class Letters:
    """A tokenizer with a token a character, and one in front."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [*([1] if add_special_tokens else []), *map(ord, text)]


@pytest.fixture
def sharegpt(tmp_path):
    turns = [[{"from": "human", "value": f"{i}: " + "abc " * 40}] for i in range(60)]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"id": str(i), "conversations": t} for i, t in enumerate(turns)]))
    return path


def test_a_needle_is_where_it_should_be_and_its_answer_nowhere_else(sharegpt):
    from needle import SENTENCE, needles

    batch = needles(Letters(), sharegpt, [200, 400], num_depths=4, num_keys=2)
    assert [needle.length for needle in batch] == [200] * 8 + [400] * 8
    assert len({tuple(needle.answer) for needle in batch}) > 12
    for i, needle in enumerate(batch):
        text = "".join(map(chr, needle.prompt[1:]))
        answer = "".join(map(chr, needle.answer))
        assert len(needle.prompt) == needle.length
        assert needle.prompt[0] == 1
        assert text.endswith(f"\n\n{SENTENCE}")
        assert text.count(SENTENCE) == 2
        assert text.count(f"{SENTENCE}{answer}.") == 1
        depth = text.index(SENTENCE) / (needle.length - 2 * len(SENTENCE) - 15)
        assert depth == pytest.approx((2 * (i % 8 // 2) + 1) / 8, abs=0.05)


def test_too_little_text_is_said(sharegpt):
    from needle import needles
    from quality import joined_sequences

    with pytest.raises(SystemExit, match="too little text"):
        needles(Letters(), sharegpt, [20_000], num_depths=1, num_keys=1)
    with pytest.raises(SystemExit, match="has only"):
        joined_sequences("smollm2-135m", sharegpt, 10**6, 4096)


def test_joined_texts_predict_as_many_tokens_as_asked_for(sharegpt, monkeypatch):
    import quality

    monkeypatch.setattr(quality, "load_tokenizer", lambda data: Letters())
    pieces = quality.joined_sequences("smollm2-135m", sharegpt, 1_000, 300)
    assert [len(piece) for piece in pieces] == [300, 300, 300, 1_000 - 3 * 299 + 1]
    assert all(piece[0] == 1 for piece in pieces)
    text = "".join(chr(token) for piece in pieces for token in piece[1:])
    assert text.startswith("0: abc abc")
    assert "\n\n1: abc" in text


def test_an_answer_is_scored_token_by_token_behind_the_right_ones(tmp_path):
    from needle import Answer, Needle, ask, rows

    prompt = [(11 * i) % 390 + 3 for i in range(90)]
    with LLM(str(write_wide_llama(tmp_path / "model")), num_kv_blocks=64, device="cpu") as llm:
        greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        likely = llm.generate([prompt], greedy)[0].outputs[0].token_ids
        unlikely = [likely[0], (likely[1] + 1) % 390]
        found = [ask(llm, Needle(90, prompt, list(answer))) for answer in (likely, unlikely)]
        scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate([[*prompt, *unlikely]], scored)
    assert [answer.is_found for answer in found] == [True, False]
    places = zip(unlikely, output.prompt_logprobs[-2:], strict=True)
    assert found[1].logprob == pytest.approx(sum(place[t].logprob for t, place in places))
    batch = [Needle(90, prompt, []), Needle(50, prompt, [])]
    moved = {
        (length, kv): distance
        for length, kv, _, distance in rows(
            batch, {"a": [Answer(-1.0, True)] * 2, "b": [Answer(-1.5, True), Answer(-0.5, True)]}
        )
    }
    assert moved == {(90, "a"): 0, (90, "b"): 0.5, (50, "a"): 0, (50, "b"): 0.5}
