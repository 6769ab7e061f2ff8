"""B045: one bad request ends alone, with a reason; the others do not notice."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from helpers.worker import (
    ERROR_TOKEN,
    INTERRUPT_TOKEN,
    MEMORY_TOKEN,
    NAN_TOKEN,
    VOCAB_SIZE,
    Host,
    generate_alone,
    make_worker,
)
from tokenmill.contracts.plan import GrammarOutput
from tokenmill.worker.drafts import NullDrafter

GOOD = {
    "greedy": {"temperature": 0.0, "logprobs": 1},
    "random": {"temperature": 1.0, "seed": 4, "prompt_logprobs": 1},
}
PROMPT = [5, 6, 7]


def make_host(**kwargs):
    worker, model = make_worker(**kwargs)
    return Host(worker), model


def add_good(host):
    for req_id, params in GOOD.items():
        host.add(req_id, PROMPT, **params)


def check_good(host, num_tokens):
    for req_id, params in GOOD.items():
        assert host.requests[req_id].error is None
        assert host.requests[req_id].output == generate_alone(PROMPT, num_tokens, **params)


@pytest.mark.parametrize(
    ("bad_token", "reason"),
    [
        (NAN_TOKEN, "no usable logits"),
        (ERROR_TOKEN, "RuntimeError: a kernel broke"),
        (MEMORY_TOKEN, "MemoryError"),
    ],
)
@pytest.mark.parametrize("first", [False, True])
def test_a_bad_request_among_three_ends_alone(bad_token, reason, first):
    host, _ = make_host()
    if first:
        host.add("bad", [1, bad_token], temperature=0.0)
    add_good(host)
    if not first:
        host.add("bad", [1, bad_token], temperature=0.0)
    output = host.step(all_logits=["random"])
    assert list(output.errors) == ["bad"]
    assert reason in output.errors["bad"]
    assert output.sampled_token_ids[output.req_ids.index("bad")] == []
    assert len(output.logprobs["greedy"]) == 1
    assert len(output.prompt_logprobs["random"]) == len(PROMPT) - 1
    host.leave_row("bad")
    for _ in range(5):
        host.step(dict.fromkeys(GOOD, 1))
    check_good(host, 6)


def test_a_request_that_turns_bad_while_it_decodes():
    """Its draft brings the token in, as corrupt memory would."""
    host, _ = make_host()
    add_good(host)
    host.add("bad", [2, 2], temperature=0.0)
    host.step()
    output = host.step(drafts={"bad": [ERROR_TOKEN]})
    assert list(output.errors) == ["bad"]
    host.leave_row("bad")
    host.step(dict.fromkeys(GOOD, 1))
    check_good(host, 3)


def test_bad_requests_are_counted():
    host, _ = make_host()
    add_good(host)
    host.add("bad", [NAN_TOKEN], temperature=1.0)
    host.add("worse", [NAN_TOKEN, 3], temperature=0.0)
    host.step()
    assert host.worker.runner.num_bad_logits == 2


def test_bad_prompt_logits_are_an_error_and_no_nan_value():
    host, _ = make_host()
    host.add("bad", [NAN_TOKEN, 1, 2], prompt_logprobs=1)
    output = host.step({"bad": 2}, all_logits=["bad"])
    assert list(output.errors) == ["bad"]
    assert output.prompt_logprobs == {}


def test_a_failure_that_does_not_come_again_harms_nobody(caplog):
    """Such as memory that was short for the whole batch."""
    host, model = make_host()
    add_good(host)
    healthy, failures = model.compute_logits, iter([MemoryError("too large a batch")])

    def compute_logits(hidden_states):
        for failure in failures:
            raise failure
        return healthy(hidden_states)

    model.compute_logits = compute_logits
    with caplog.at_level(logging.WARNING):
        assert host.step().errors == {}
    assert "too large a batch" in caplog.text
    host.step()
    check_good(host, 2)


def test_a_failure_while_sampling_runs_the_step_again_with_each_requests_masks():
    class FailsOnce(NullDrafter):
        failures = 1

        def propose(self, req_ids, rows, num_tokens, token_ids):
            if self.failures:
                self.failures -= 1
                raise ValueError("drafter")
            return {req_id: [1] for req_id in req_ids}

    host, _ = make_host(drafter=FailsOnce())
    for req_id in "abc":
        host.add(req_id, [8], temperature=0.0)
    plan = host.plan(dict.fromkeys("abc", 1))
    host.worker.execute_model(plan)
    bits = np.zeros((2, -(-VOCAB_SIZE // 32)), "<u4")
    bits[0, 0], bits[1, 1] = 1 << 3, 1 << 8
    output = host.worker.sample_tokens(GrammarOutput(["c", "a"], bits.tobytes())).result()
    host.settle(output)
    free = generate_alone([8], 1, temperature=0.0)
    assert output.sampled_token_ids == [[40], free, [3]]
    assert output.draft_token_ids == {"a": [1], "b": [1], "c": [1]}
    host.step({"b": 1})
    assert host.requests["b"].output == generate_alone([8], 2, temperature=0.0)


def test_an_interrupt_passes_through_and_leaves_the_step_uncommitted():
    host, model = make_host()
    add_good(host)
    host.step()
    host.add("slow", [INTERRUPT_TOKEN, 1], temperature=0.0)
    model.num_interrupts = 1
    plan = host.plan({"greedy": 1, "random": 1, "slow": 2})
    with pytest.raises(KeyboardInterrupt):
        host.worker.execute_model(plan)
    # What an engine does after Ctrl-C: everything is dropped, and new requests are served.
    for req_id in list(host.requests):
        host.leave_row(req_id)
        del host.requests[req_id]
    add_good(host)
    for _ in range(3):
        host.step()
    check_good(host, 3)


def test_an_interrupted_step_can_be_run_again():
    host, model = make_host()
    add_good(host)
    host.add("slow", [INTERRUPT_TOKEN, 1], temperature=0.0)
    model.num_interrupts = 1
    plan = host.plan({"greedy": 3, "random": 3, "slow": 2})
    with pytest.raises(KeyboardInterrupt):
        host.worker.execute_model(plan)
    host.worker.runner.execute_model(plan)
    host.settle(host.worker.runner.sample_tokens(None).result())
    host.step()
    check_good(host, 2)
    assert host.requests["slow"].output == generate_alone([INTERRUPT_TOKEN, 1], 2, temperature=0.0)
