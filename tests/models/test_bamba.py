"""States of real requests: a small pool of them, turns of a conversation, steps in flight."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.family_models import prompt, saved
from tokenmill import LLM, RequestOutput, SamplingParams
from tokenmill.config import memory

PROMPTS = [prompt(length, length) for length in (30, 100, 7, 64, 33)]
BLOCK_SIZE = 32


def open_bamba(**settings: Any) -> LLM:
    defaults = {
        "dtype": "bfloat16",
        "num_kv_blocks": 40,
        "max_model_len": 256,
        "skip_tokenizer_init": True,
        "max_num_seqs": 5,
    }
    return LLM(str(saved("bamba")), device="cpu", **(defaults | settings))


def generate(llm: LLM, prompts: list[list[int]], max_tokens: int = 40) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """One request after another, without a cache."""
    with open_bamba(max_num_seqs=1, enable_prefix_caching=False) as llm:
        return tokens(generate(llm, PROMPTS))


@pytest.mark.parametrize("num_blocks", [4, 6, 9])
def test_few_states_are_shared_by_taking_turns(
    num_blocks: int, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "num_state_blocks", lambda *sizes: num_blocks)
    with open_bamba(max_num_batched_tokens=48) as llm:
        assert tokens(generate(llm, PROMPTS)) == expected
        assert tokens(generate(llm, PROMPTS)) == expected


def test_a_preempted_request_goes_on_from_a_state(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two start with one state each; crossing a block takes another one."""
    monkeypatch.setattr(memory, "num_state_blocks", lambda *sizes: 5)
    order = [0, 4, 2]
    with open_bamba() as llm:
        outputs = generate(llm, [PROMPTS[i] for i in order])
    assert tokens(outputs) == [expected[i] for i in order]
    assert sum(output.metrics.num_preemptions for output in outputs) > 0


def test_the_next_turn_of_a_conversation_reads_the_last_one() -> None:
    with open_bamba() as llm:
        (first,) = generate(llm, [PROMPTS[1]])
        text = [*PROMPTS[1], *first.outputs[0].token_ids]
        second = [*text, *prompt(20, 9)]
        (found,) = generate(llm, [second])
    # The last token is never computed, and the one before the last block may end it.
    assert found.num_cached_tokens == (len(text) - 1) // BLOCK_SIZE * BLOCK_SIZE == 128
    with open_bamba(enable_prefix_caching=False) as llm:
        assert tokens(generate(llm, [second])) == tokens([found])


def test_prompts_share_their_beginning_up_to_a_chunks_end() -> None:
    shared = prompt(96, 77)
    texts = [[*shared, *prompt(n, n)] for n in (5, 40)]
    with open_bamba(max_num_batched_tokens=64) as llm:
        generate(llm, [texts[0]], max_tokens=1)
        found = generate(llm, [texts[1]])
    assert found[0].num_cached_tokens == 96
    with open_bamba(enable_prefix_caching=False) as llm:
        assert tokens(generate(llm, [texts[1]])) == tokens(found)


def test_two_steps_in_flight(expected: list[list[int]]) -> None:
    with open_bamba(async_scheduling=True, max_num_batched_tokens=32) as llm:
        assert tokens(generate(llm, PROMPTS)) == expected
        assert tokens(generate(llm, PROMPTS)) == expected
