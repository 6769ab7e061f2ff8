"""Adapters on other parts than the native kernels of a CPU, and beside weights of a GGUF file."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from helpers import gguf as gguf_files
from helpers.adapters import logprobs_of, merged, write_adapter
from helpers.gpu_engine import generate, gpu_engine
from helpers.tiny import tiny_llama
from tokenmill import LLM, LoRARequest, RequestOutput, SamplingParams
from tokenmill.worker.graphs.cuda import GraphSizes

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered", "ignore:invalid value encountered"
)
"""Integers of a hash wrap, and padding is computed from whatever memory held before."""

PROMPTS = [[5, 9, 20], [(7 * i) % 300 + 3 for i in range(9)], [33], [5, 9, 5]]
PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=0, detokenize=False)


@functools.cache
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny_llama()).eval()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        "a": write_adapter(root / "a", model(), rank=3, seed=1),
        "b": write_adapter(root / "b", model(), targets=("k_proj", "up_proj"), rank=8, seed=2),
    }


def chosen(adapters: dict[str, Path], names: str) -> list[LoRARequest | None]:
    return [None if name == "-" else LoRARequest(name, str(adapters[name])) for name in names]


def check(
    outputs: Sequence[RequestOutput],
    adapters: Sequence[LoRARequest | None],
    base: Any,
    tolerance: float,
) -> None:
    """Every token has the log-probability that transformers has, and is its best one."""
    for output, adapter in zip(outputs, adapters, strict=True):
        (sequence,) = output.outputs
        assert sequence.finish_reason == "length", sequence.error
        changed = base if adapter is None else merged(base, Path(adapter.path))
        ids, start = [*output.prompt_token_ids, *sequence.token_ids], len(output.prompt_token_ids)
        wanted = logprobs_of(changed, ids)[start - 1 : -1]
        assert sequence.logprobs is not None
        for place, entry in zip(wanted, sequence.logprobs, strict=True):
            ((token_id, found),) = entry.items()
            assert abs(found.logprob - float(place[token_id])) < tolerance
            assert float(place.max()) - float(place[token_id]) < tolerance


def bits(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [
        [[(k, v.logprob) for k, v in each.items()] for each in output.outputs[0].logprobs or ()]
        for output in outputs
    ]


def test_the_parts_of_a_gpu(adapters: dict[str, Path]) -> None:
    requests = chosen(adapters, "ab-a")
    settings: dict[str, Any] = {
        "dtype": "bfloat16", "num_kv_blocks": 16, "max_model_len": 20, "enable_lora": True,
        "max_lora_rank": 8, "enable_prefix_caching": False,
    }  # fmt: skip
    params = [PARAMS] * len(PROMPTS)
    padded = gpu_engine(tiny_llama(), max_loras=2, sizes=GraphSizes.default(4, 32, 20), **settings)
    outputs = generate(padded, PROMPTS, params, requests)
    check(outputs, requests, model(), 0.15)
    # One after another in one slot, without padding: the same bits.
    single = gpu_engine(tiny_llama(), max_loras=1, **settings)
    for index, request in enumerate(requests[:2]):
        alone = generate(single, PROMPTS[index : index + 1], [PARAMS], [request])
        assert bits(alone) == bits(outputs[index : index + 1])


def test_beside_weights_in_float8(adapters: dict[str, Path]) -> None:
    requests = chosen(adapters, "a-")
    settings: dict[str, Any] = {
        "dtype": "bfloat16", "num_kv_blocks": 16, "max_model_len": 20, "enable_lora": True,
        "quantization": "fp8",
    }  # fmt: skip
    asked = PARAMS.replace(max_tokens=1)
    outputs = generate(gpu_engine(tiny_llama(), **settings), PROMPTS[:2], [asked] * 2, requests)
    check(outputs, requests, model(), 0.4)
    alone = generate(gpu_engine(tiny_llama(), **settings), PROMPTS[1:2], [asked], [None])
    assert bits(alone) == bits(outputs[1:])


def test_torch_where_there_are_no_kernels(adapters: dict[str, Path]) -> None:
    requests = chosen(adapters, "ab-a")
    prompts: list[Any] = [{"prompt_token_ids": ids} for ids in PROMPTS]
    with LLM(
        str(tiny_llama()), dtype="float16", device="cpu", num_kv_blocks=16, max_model_len=32,
        enable_lora=True, max_loras=2, enable_prefix_caching=False, max_num_batched_tokens=16,
    ) as llm:  # fmt: skip
        outputs = llm.generate(prompts, PARAMS, lora_request=requests)
        check(outputs, requests, model(), 0.05)
        for index, request in enumerate(requests):
            alone = llm.generate(prompts[index], PARAMS, lora_request=request)
            assert bits(alone) == bits(outputs[index : index + 1])


@pytest.mark.parametrize(("tensor_type", "tolerance"), [("F16", 0.3), ("Q8_0", 0.7)])
def test_beside_a_gguf_file(tensor_type: str, tolerance: float, tmp_path: Path) -> None:
    """Whose rows of queries and keys lie in another order in the file."""
    base = gguf_files.tiny_llama(num_attention_heads=2, hidden_size=128, num_key_value_heads=1)
    file = gguf_files.write_llama_gguf(tmp_path / "model.gguf", base, tensor_type)
    adapter = LoRARequest("a", str(write_adapter(tmp_path / "a", base, rank=5, seed=4)))
    with LLM(
        str(file), dtype="bfloat16", device="cpu", num_kv_blocks=16, max_model_len=64,
        enable_lora=True, kv_cache_dtype="bfloat16",
    ) as llm:  # fmt: skip
        prompts: list[Any] = [{"prompt_token_ids": ids} for ids in PROMPTS]
        requests = [adapter, None, adapter, None]
        outputs = llm.generate(prompts, PARAMS, lora_request=requests)
        check(outputs, requests, base, tolerance)
    effect = logprobs_of(merged(base, Path(adapter.path)), PROMPTS[1]) - logprobs_of(
        base, PROMPTS[1]
    )
    assert effect.abs().mean() > 1.0
