"""Adapters of models that pool: transformers' vectors with merged weights, beside those without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.adapters import ATTENTION, MLP, merged, write_adapter
from helpers.pooling import decoder, encoder, hidden_states, open_pooling, prompts
from tokenmill import LLM, LoRARequest
from tokenmill.errors import AdapterError

PROMPTS = prompts(30, 7, 30, 1)


def vectors(llm: LLM, given: list[Any], adapters: Any) -> list[np.ndarray]:
    outputs = llm.embed(given, use_tqdm=False, lora_request=adapters)
    return [np.array(output.outputs.embedding) for output in outputs]


def expected(model: Any, ids: list[int], place: int) -> np.ndarray:
    pooled = hidden_states(model, ids)[place]
    return (pooled / pooled.norm()).numpy()


@pytest.mark.parametrize("is_decoder", [True, False], ids=["decoder", "encoder"])
def test_embeddings(is_decoder: bool, tmp_path: Path) -> None:
    model, path = decoder("LlamaModel") if is_decoder else encoder("BertModel")
    targets = ATTENTION + MLP if is_decoder else ("query", "key", "value")
    adapter = LoRARequest("a", str(write_adapter(tmp_path / "a", model, targets=targets, rank=5)))
    changed = merged(model, tmp_path / "a")
    settings = {} if is_decoder else {"pooler_config": {"pooling_type": "cls"}}
    place = -1 if is_decoder else 0
    requests = [adapter, None, None, adapter]
    with open_pooling(path, enable_lora=True, **settings) as llm:
        found = vectors(llm, PROMPTS, requests)
        for prompt, vector, request in zip(PROMPTS, found, requests, strict=True):
            wanted = expected(
                model if request is None else changed, prompt["prompt_token_ids"], place
            )
            assert np.abs(vector - wanted).max() < 2e-3
        for index, request in enumerate(requests):
            (alone,) = vectors(llm, PROMPTS[index : index + 1], request)
            assert np.array_equal(alone, found[index])
        with pytest.raises(AdapterError, match="nowhere"):
            vectors(llm, PROMPTS, LoRARequest("n", "/nowhere"))
    effect = expected(changed, PROMPTS[0]["prompt_token_ids"], place) - expected(
        model, PROMPTS[0]["prompt_token_ids"], place
    )
    assert np.abs(effect).max() > 0.05
