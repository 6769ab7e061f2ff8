"""Native decoding steps beside requests whose text must have a form."""

from __future__ import annotations

import re

import pytest

from helpers.default_model import default_model_path
from tokenmill import LLM, SamplingParams
from tokenmill.kernels import native
from tokenmill.structured_outputs import StructuredOutputsParams
from tokenmill.worker.graphs.decode import NativeDecodeSteps

pytestmark = pytest.mark.model


def test_a_form_is_kept_beside_requests_that_decode_natively():
    form = SamplingParams(
        temperature=1.0,
        seed=1,
        max_tokens=12,
        structured_outputs=StructuredOutputsParams(regex="[0-9]{3}-[0-9]{3}"),
    )
    plain = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = ["The number is", "Once upon a time"]
    with LLM(str(default_model_path()), device="cpu", num_kv_blocks=64, max_model_len=512) as llm:
        steps = llm.llm_engine._client.core._executor._worker.runner._decode_steps
        assert isinstance(steps, NativeDecodeSteps) == native.is_available()
        formed, free = llm.generate(prompts, [form, plain], use_tqdm=False)
        (alone,) = llm.generate(prompts[1:], plain, use_tqdm=False)
    assert re.fullmatch("[0-9]{3}-[0-9]{3}", formed.outputs[0].text)
    assert free.outputs[0].token_ids == alone.outputs[0].token_ids
