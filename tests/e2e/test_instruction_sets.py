"""B110: every instruction set of this machine runs, and each is exact in itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.tiny import write_wide_llama
from tokenmill import _native
from tokenmill.config.device import FLOAT32_KERNELS
from tokenmill.kernels.native import isas

SCRIPT = """
import json, sys
from tokenmill import LLM, SamplingParams
prompts = [[(i * 37 + 11 * j) % 390 + 3 for j in range(3 + 30 * i)] for i in range(4)]
params = SamplingParams(temperature=0.8, seed=3, max_tokens=10, ignore_eos=True, logprobs=1)
def run(batches, **settings):
    settings |= {"dtype": sys.argv[2], "quantization": sys.argv[3] or None}
    with LLM(sys.argv[1], num_kv_blocks=64, max_num_seqs=8, **settings) as llm:
        kernels = llm.llm_engine.config.kernels
        outputs = [o.outputs[0] for batch in batches for o in llm.generate(batch, params)]
    return kernels, [(o.token_ids, [p[t].logprob for t, p in zip(o.token_ids, o.logprobs)])
                     for o in outputs]
kernels, together = run([prompts])
_, alone = run([[p] for p in prompts], num_threads=1, enforce_eager=True)
_, chunked = run([prompts], max_num_batched_tokens=16)
print(json.dumps({"kernels": kernels, "together": together, "alone": alone, "chunked": chunked}))
"""
LEVELS = _native.isas()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wide_llama(tmp_path_factory.mktemp("wide"))


def run(
    model: Path, dtype: str, isa: str, quantization: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), dtype, quantization],
        env={**os.environ, "TOKENMILL_ISA": isa},
        capture_output=True,
        text=True,
        timeout=120,
    )


def levels_here() -> list[str]:
    return ["reference", *isas()]


@pytest.mark.parametrize("isa", LEVELS)
def test_each_level_is_exact_in_itself_or_refused(model: Path, isa: str) -> None:
    done = run(model, "bfloat16", isa)
    if isa not in levels_here():
        assert done.returncode != 0
        assert "TOKENMILL_ISA" in done.stderr
        return
    found = json.loads(done.stdout)
    assert found["kernels"] == isa
    assert found["together"] == found["alone"] == found["chunked"]


def test_four_bits_are_exact_on_each_level_that_has_kernels(model: Path) -> None:
    for isa in levels_here()[1:]:
        found = json.loads(run(model, "bfloat16", isa, "int4").stdout)
        assert found["kernels"] == isa
        assert found["together"] == found["alone"] == found["chunked"]


def test_float32_runs_without_tiles_and_gives_the_tokens_of_the_reference(model: Path) -> None:
    results = {isa: json.loads(run(model, "float32", isa).stdout) for isa in levels_here()}
    tokens = [[ids for ids, _ in result["together"]] for result in results.values()]
    for isa, result in results.items():
        assert result["kernels"] == FLOAT32_KERNELS.get(isa, isa)
        assert result["together"] == result["alone"] == result["chunked"]
    assert all(ids == tokens[0] for ids in tokens)


def test_float16_runs_on_the_reference_whatever_the_processor(model: Path) -> None:
    results = [json.loads(run(model, "float16", isa).stdout) for isa in levels_here()]
    for result in results:
        assert result["kernels"] == "reference"
        assert result["together"] == result["alone"] == result["chunked"]
        # The same logits; the log-probabilities are summed on the processor's own instructions.
        for (ids, logprobs), (first_ids, first_logprobs) in zip(
            result["together"], results[0]["together"], strict=True
        ):
            assert ids == first_ids
            assert logprobs == pytest.approx(first_logprobs, abs=1e-5)


def test_a_level_that_does_not_exist_is_refused(model: Path) -> None:
    done = run(model, "bfloat16", "sse9")
    assert done.returncode != 0
    assert "sse9" in done.stderr
