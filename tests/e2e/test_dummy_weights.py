"""An engine on random weights, from nothing but a config.json."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

from tokenmill import LLM, SamplingParams
from tokenmill.engine.dummy_shapes import shapes_elsewhere
from tokenmill.errors import ConfigError

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def generated(directory, **engine_args):
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "num_kv_blocks": 8}
    with LLM(directory, **(settings | engine_args)) as llm:
        params = SamplingParams(temperature=0, max_tokens=16)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_seed_gives_the_same_tokens(directory, dtype):
    first = generated(directory, dtype=dtype)
    assert [len(ids) for ids in first] == [16, 16]
    assert generated(directory, dtype=dtype) == first
    assert generated(directory, dtype=dtype, seed=1) != first


def test_overrides_shape_the_weights(directory):
    with LLM(
        directory,
        load_format="dummy",
        skip_tokenizer_init=True,
        num_kv_blocks=8,
        hf_overrides={"num_hidden_layers": 5, "vocab_size": 77},
    ) as llm:
        assert llm.llm_engine.config.model.vocab_size == 77
        outputs = llm.generate([PROMPTS[0]], SamplingParams(temperature=0), use_tqdm=False)
    assert max(outputs[0].outputs[0].token_ids) < 77


def test_an_unknown_format_is_refused(directory):
    with pytest.raises(
        ConfigError, match=r"load_format='dumy' is not one of: auto, dummy\..*'dummy'"
    ):
        generated(directory, load_format="dumy")


def test_the_front_end_of_a_served_dummy_model_needs_no_torch(directory):
    code = f"""
        import asyncio, sys
        from tokenmill.config.engine_args import EngineArgs
        from tokenmill.engine.async_llm import AsyncLLM
        from tokenmill.sampling_params import SamplingParams

        async def main():
            args = EngineArgs(
                model={str(directory)!r}, load_format="dummy", skip_tokenizer_init=True,
                num_kv_blocks=8,
            )
            engine = await AsyncLLM.start(args)
            params = SamplingParams(temperature=0, max_tokens=16)
            async for output in engine.generate([1, 2, 3], params, request_id="a"):
                ids = output.outputs[0].token_ids
            print(list(ids), "torch" in sys.modules)
            await engine.shutdown()

        asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [f"{list(generated(directory)[0])} False"], done.stderr


def test_shapes_found_out_elsewhere_are_those_of_the_families(directory):
    from tokenmill.models.loader import tensor_shapes

    assert shapes_elsewhere(CONFIG, "tokenmill") == tensor_shapes(CONFIG)
    broken = {**CONFIG, "num_key_value_heads": 3}
    with pytest.raises(ConfigError, match="num_attention_heads=4 is not a multiple"):
        shapes_elsewhere(broken, "tokenmill")
