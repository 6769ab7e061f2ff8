"""Several cores stepped as one, without a server: what `LLM(data_parallel_size=...)` is made of."""

from __future__ import annotations

import os
import resource
import signal
from contextlib import contextmanager

import pytest

from helpers.served import FACTORIES, process_exists, prompt_of, serve_args
from helpers.served_core import expected_ids
from helpers.tiny import tiny_llama
from tokenmill import LLM
from tokenmill.engine import build
from tokenmill.engine.llm_engine import LLMEngine
from tokenmill.engine.replica_client import ReplicasClient
from tokenmill.entrypoints.bench.recorder import EngineParts
from tokenmill.errors import ConfigError, EngineDeadError, InvalidRequestError
from tokenmill.sampling_params import RequestOutputKind, SamplingParams

FINAL = SamplingParams(max_tokens=12, output_kind=RequestOutputKind.FINAL_ONLY)


@contextmanager
def engine(factory="fake_core", **settings):
    args = serve_args(data_parallel_size=2, **settings)
    checkpoint = build.open_model(args, lambda *_: None)
    config = build.settle_config(args, checkpoint)
    client = ReplicasClient(args, config, factory=f"{FACTORIES}:{factory}")
    front_end = build.build_front_end(args, checkpoint, config, None)
    made = LLMEngine(front_end, client)
    try:
        client.wait_until_ready()
        yield made, [each.pid for each in client._clients]
    finally:
        made.close()
        checkpoint.close()


def run(made):
    finished = {}
    while made.has_unfinished_requests():
        finished |= {output.request_id: output for output in made.step() if output.finished}
    return {each: output.outputs[0].token_ids for each, output in finished.items()}


@contextmanager
def many_files():
    """What is opened in here has numbers that `select` does not take."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    with open(os.devnull) as file:
        numbers = [os.dup(file.fileno()) for _ in range(1024)]
    try:
        yield
    finally:
        for number in numbers:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_requests_are_divided_and_prefixes_found_again():
    with many_files(), engine() as (made, pids):
        for turn in range(2):
            for i in range(6):
                made.add_request(str(i), prompt_of(i, 40), FINAL)
            made.add_request("gone", prompt_of(9), FINAL)
            made.step()
            (gone,) = made.abort_request("gone")
            assert gone.outputs[0].finish_reason == "abort"
            expected = {str(i): expected_ids(prompt_of(i, 40), 12) for i in range(6)}
            assert run(made) == expected, turn
        for i in range(6):
            made.add_request(str(i), prompt_of(i, 40), FINAL)
        outputs = []
        while made.has_unfinished_requests():
            outputs += made.step()
        assert [output.num_cached_tokens for output in outputs] == [32] * 6
        assert made.reset_prefix_cache()
        made.add_request("0", prompt_of(0, 40), FINAL)
        outputs = []
        while made.has_unfinished_requests():
            outputs += made.step()
        assert outputs[-1].num_cached_tokens == 0
    assert not any(process_exists(pid) for pid in pids)


def test_a_core_that_dies_is_told_and_one_that_refuses():
    with engine() as (made, pids):
        made.add_request("0", prompt_of(0), SamplingParams(max_tokens=1000))
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
            run(made)
    with engine("small_core") as (made, _):
        made.add_request("0", prompt_of(0, 300), SamplingParams(max_tokens=4))
        with pytest.raises(InvalidRequestError):
            run(made)
    with pytest.raises(ConfigError, match="there is no such thing"), engine("bad_config"):
        pass


@pytest.mark.slow
def test_the_same_tokens_as_of_one_engine():
    settings = {"dtype": "float32", "num_kv_blocks": 64, "num_threads": 1}
    prompts = [f"A fox, {number} dogs" for number in range(6)]
    params = [SamplingParams(max_tokens=20, temperature=i % 2, seed=i) for i in range(6)]
    texts = []
    for size in (1, 2):
        llm = LLM(str(tiny_llama()), data_parallel_size=size, **settings)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        texts.append([(output.outputs[0].text, output.outputs[0].token_ids) for output in outputs])
        if size == 2:
            with pytest.raises(ConfigError, match="data_parallel_size=2 cannot be looked into"):
                EngineParts.of(llm)
        llm.llm_engine.close()
    assert texts[0] == texts[1]
