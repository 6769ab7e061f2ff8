"""States of real requests: a small pool of them, turns of a conversation, steps in flight."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.family_models import prompt, saved
from tokenmill import LLM, RequestOutput, SamplingParams
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.config import memory
from tokenmill.config.parameters import read_parameters
from tokenmill.errors import ConfigError, MemoryBudgetError
from tokenmill.models.mamba2 import Mamba2ForCausalLM

PROMPTS = [prompt(length, length) for length in (30, 100, 7, 64, 33)]
BLOCK_SIZE = 32


def open_model(name: str, **settings: Any) -> LLM:
    defaults = {
        "dtype": "bfloat16",
        "num_kv_blocks": 40,
        "max_model_len": 256,
        "skip_tokenizer_init": True,
        "max_num_seqs": 5,
    }
    return LLM(str(saved(name)), device="cpu", **(defaults | settings))


def generate(llm: LLM, prompts: list[list[int]], max_tokens: int = 40) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module", params=["bamba", "mamba2"])
def name(request: pytest.FixtureRequest) -> str:
    """States beside attention, and nothing else."""
    return str(request.param)


@pytest.fixture(scope="module")
def expected(name: str) -> list[list[int]]:
    """One request after another, without a cache."""
    with open_model(name, max_num_seqs=1, enable_prefix_caching=False) as llm:
        return tokens(generate(llm, PROMPTS))


def few_states(name: str, num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Settings of an engine with so many blocks of states, the null block among them."""
    monkeypatch.setattr(memory, "num_state_blocks", lambda *sizes: num_blocks)
    return {} if name == "bamba" else {"num_kv_blocks": num_blocks - 1}


@pytest.mark.parametrize("num_blocks", [4, 6, 9])
def test_few_states_are_shared_by_taking_turns(
    name: str, num_blocks: int, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = few_states(name, num_blocks, monkeypatch)
    with open_model(name, max_num_batched_tokens=48, **settings) as llm:
        assert tokens(generate(llm, PROMPTS)) == expected
        assert tokens(generate(llm, PROMPTS)) == expected


def test_a_preempted_request_goes_on_from_a_state(
    name: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two start with one state each; crossing a block takes another one."""
    order = [0, 4, 2]
    with open_model(name, **few_states(name, 5, monkeypatch)) as llm:
        outputs = generate(llm, [PROMPTS[i] for i in order])
    assert tokens(outputs) == [expected[i] for i in order]
    assert sum(output.metrics.num_preemptions for output in outputs) > 0


def test_the_next_turn_of_a_conversation_reads_the_last_one(name: str) -> None:
    with open_model(name) as llm:
        (first,) = generate(llm, [PROMPTS[1]])
        text = [*PROMPTS[1], *first.outputs[0].token_ids]
        second = [*text, *prompt(20, 9)]
        (found,) = generate(llm, [second])
    # The last token is never computed, and the one before the last block may end it.
    assert found.num_cached_tokens == (len(text) - 1) // BLOCK_SIZE * BLOCK_SIZE == 128
    with open_model(name, enable_prefix_caching=False) as llm:
        assert tokens(generate(llm, [second])) == tokens([found])


def test_prompts_share_their_beginning_up_to_a_chunks_end(name: str) -> None:
    shared = prompt(96, 77)
    texts = [[*shared, *prompt(n, n)] for n in (5, 40)]
    with open_model(name, max_num_batched_tokens=64) as llm:
        generate(llm, [texts[0]], max_tokens=1)
        found = generate(llm, [texts[1]])
    assert found[0].num_cached_tokens == 96
    with open_model(name, enable_prefix_caching=False) as llm:
        assert tokens(generate(llm, [texts[1]])) == tokens(found)


def test_two_steps_in_flight(name: str, expected: list[list[int]]) -> None:
    with open_model(name, async_scheduling=True, max_num_batched_tokens=32) as llm:
        assert tokens(generate(llm, PROMPTS)) == expected
        assert tokens(generate(llm, PROMPTS)) == expected


def test_blocks_of_the_cache_are_those_of_states() -> None:
    """Where nothing else is kept. Their number is asked for, and three are the least."""
    with open_model("mamba2", num_kv_blocks=9) as llm:
        manager = llm.llm_engine._client.core.scheduler.kv
        assert manager.pool is manager.state_pool
        assert manager.pool.num_usable_blocks == 9
        assert manager.num_usable_tokens == 256
    with pytest.raises(MemoryBudgetError, match="largest max_model_len that fits is 64"):
        open_model("mamba2", num_kv_blocks=2)


def test_the_context_of_a_model_without_positions() -> None:
    sizes = read_parameters(open_checkpoint(saved("mamba2")).config)
    assert (sizes.num_kv_layers, sizes.max_context) == (0, 32_768)
    config = {**open_checkpoint(saved("mamba2")).config, "max_position_embeddings": 100}
    assert read_parameters(config).max_context == 100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 33}, "num_heads=8 heads of head_dim=33"),
        ({"n_groups": 3}, "num_heads=8 is not a multiple of n_groups=3"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_what_a_mamba2_cannot_be(changes: dict[str, Any], message: str) -> None:
    config = {**open_checkpoint(saved("mamba2")).config, **changes}
    with pytest.raises(ConfigError, match=message):
        Mamba2ForCausalLM(config, dtype=torch.float32, max_model_len=8)
