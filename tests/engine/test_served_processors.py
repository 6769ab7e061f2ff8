"""Custom logits processors where the core has a process of its own."""

from __future__ import annotations

import asyncio

import pytest

from helpers.processors import Only
from helpers.served import collect, serve_args
from tokenmill.engine.async_llm import AsyncLLM
from tokenmill.errors import ConfigError, InvalidRequestError
from tokenmill.sampling_params import SamplingParams


def params(**extra_args):
    return SamplingParams(
        temperature=1, seed=1, max_tokens=4, ignore_eos=True, extra_args=extra_args
    )


@pytest.mark.parametrize("given", ["helpers.processors:Only", Only], ids=["path", "class"])
def test_the_core_finds_them_by_name(given):
    async def main():
        llm = await AsyncLLM.start(serve_args(dtype="float32", logits_processors=[given]))
        try:
            plain, only = await asyncio.gather(
                collect(llm, [5, 6], params()), collect(llm, [5, 6], params(only=9))
            )
            assert only.token_ids == [9] * 4
            assert plain.token_ids != only.token_ids
            with pytest.raises(InvalidRequestError, match="only='x' must be a token id"):
                await collect(llm, [5, 6], params(only="x"))
        finally:
            await llm.shutdown()

    asyncio.run(main())


def test_what_cannot_be_loaded_is_known_at_the_start():
    async def main():
        with pytest.raises(ConfigError, match="no_such_module"):
            await AsyncLLM.start(serve_args(logits_processors=["no_such_module:X"]))

    asyncio.run(main())
