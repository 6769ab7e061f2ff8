"""The runner's steps on a model whose logits follow by hand from the prefix."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.asked import EDITS
from helpers.worker import (
    VOCAB_SIZE,
    Host,
    generate_alone,
    make_worker,
    toy_logits,
)
from tokenmill.contracts.plan import GrammarOutput, SchedulerOutput
from tokenmill.worker.drafts import NullDrafter
from tokenmill.worker.limits import LOGITS_SLAB

SAMPLING = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "top_k": 10, "top_p": 0.9, "seed": 2**64 - 1},
    {"temperature": 1.5, "min_p": 0.05, "seed": -3},
]


def log_softmax(logits):
    logits = logits.astype(np.float64)
    return logits - np.log(np.exp(logits).sum())


def make_host(**kwargs):
    worker, model = make_worker(**kwargs)
    return Host(worker), model


class LookBack(NullDrafter):
    """Drafts what followed the last token's earlier occurrence; often wrong, sometimes right."""

    def propose(self, req_ids, rows, num_tokens, token_ids):
        drafts = {}
        for req_id, row, count in zip(req_ids, rows, num_tokens, strict=True):
            known = token_ids[row, :count].tolist()
            if known[-1] in known[:-1]:
                start = known.index(known[-1]) + 1
                drafts[req_id] = known[start : start + 3]
        return drafts


# ---- steps --------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", SAMPLING)
def test_a_request_gets_what_the_reference_generates(params):
    host, _ = make_host()
    host.add("a", [3, 1, 4, 1, 5], **params)
    for _ in range(12):
        host.step()
    assert host.requests["a"].output == generate_alone([3, 1, 4, 1, 5], 12, **params)


def test_one_batch_of_ten_tokens_reaches_the_model():
    host, model = make_host()
    for req_id, length in (("a", 5), ("b", 1), ("c", 3), ("d", 1)):
        host.add(req_id, [length] * length)
    output = host.step()
    input_ids, common = model.seen[-1]
    assert input_ids == [5] * 5 + [1] + [3] * 3 + [1]
    assert common.query_start_loc.tolist() == [0, 5, 6, 9, 10]
    assert (common.num_reqs, common.num_tokens, common.max_query_len) == (4, 10, 5)
    assert [len(tokens) for tokens in output.sampled_token_ids] == [1, 1, 1, 1]


def test_a_long_prompt_computes_one_row_of_logits():
    host, model = make_host(max_model_len=1100, num_blocks=300)
    host.add("a", [7] * 1024)
    host.step()
    assert model.num_logits_rows == [1]


def test_the_middle_of_a_prompt_computes_no_logits_and_no_token():
    host, model = make_host()
    host.add("a", list(range(10)), temperature=0.0)
    assert host.step({"a": 6}).sampled_token_ids == [[]]
    assert model.num_logits_rows == []
    assert host.step({"a": 4}).sampled_token_ids == [generate_alone(range(10), 1, temperature=0.0)]


def test_rows_without_work_in_a_step_keep_their_place():
    host, _ = make_host()
    for req_id in "abc":
        host.add(req_id, [ord(req_id) % 50, 2], temperature=0.0)
    host.step()
    for _ in range(4):
        host.step({"c": 1, "a": 1})
    host.step({"b": 1})
    for req_id, count in (("a", 5), ("b", 2), ("c", 5)):
        prompt = [ord(req_id) % 50, 2]
        assert host.requests[req_id].output == generate_alone(prompt, count, temperature=0.0)


def test_a_row_freed_and_taken_in_one_plan():
    host, _ = make_host()
    host.add("a", [1, 2, 3], temperature=0.0)
    host.step()
    row = host.requests["a"].row
    host.leave_row("a")
    host.add("b", [4, 5], temperature=1.0, seed=9)
    host.step({"b": 2})
    assert host.requests["b"].row == row
    assert host.requests["b"].output == generate_alone([4, 5], 1, temperature=1.0, seed=9)


def test_an_empty_plan_only_frees_rows():
    worker, _ = make_worker()
    worker.execute_model(SchedulerOutput(7, finished_rows=[0, 3]))
    output = worker.sample_tokens(None).result()
    assert (output.step_id, output.req_ids, output.sampled_token_ids) == (7, [], [])


# ---- any schedule, same tokens ------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("with_drafts", [False, True])
def test_any_mix_of_chunks_neighbours_and_preemption_gives_the_same(seed, with_drafts):
    rng = np.random.default_rng(seed)
    worker, _ = make_worker(drafter=LookBack() if with_drafts else None)
    host = Host(worker, rng)
    wanted, asked, proposals = {}, {}, {}
    while len(wanted) < 10 or any(len(host.requests[r].output) < n for r, n in wanted.items()):
        if len(wanted) < 10 and rng.random() < 0.4:
            req_id = f"r{len(wanted)}"
            prompt = rng.integers(0, 4, rng.integers(1, 30)).tolist()
            edits = EDITS[int(rng.integers(len(EDITS)))] if rng.random() < 0.6 else {}
            asked[req_id] = SAMPLING[int(rng.integers(len(SAMPLING)))] | edits
            host.add(req_id, prompt, **asked[req_id])
            wanted[req_id] = int(rng.integers(1, 15))
        open_ids = [r for r, n in wanted.items() if len(host.requests[r].output) < n]
        for req_id in host.requests:
            if req_id not in open_ids or rng.random() < 0.1:
                host.leave_row(req_id)
                proposals.pop(req_id, None)
        chosen = [r for r in open_ids if rng.random() < 0.7][:8]
        in_rows = [r for r in open_ids if host.requests[r].row is not None and r not in chosen]
        chosen = chosen[: 8 - len(in_rows)]
        counts = {r: int(rng.integers(1, host.num_pending(r) + 1)) for r in chosen}
        drafts = {
            r: proposals[r]
            for r in chosen
            if counts[r] == host.num_pending(r) == 1 and proposals.get(r)
        }
        if counts:
            output = host.step(counts, drafts=drafts)
            for req_id in counts:
                proposals.pop(req_id, None)
            proposals |= output.draft_token_ids
    for req_id, count in wanted.items():
        request = host.requests[req_id]
        prompt = request.tokens[: request.data.num_prompt_tokens]
        want = generate_alone(prompt, len(request.output), **asked[req_id])
        assert len(want) >= count
        assert request.output == want


# ---- drafts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", SAMPLING)
@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_drafts_are_taken_as_far_as_they_hold(params, num_right):
    host, model = make_host()
    prompt = [8, 6, 7]
    want = generate_alone(prompt, 10, **params)
    host.add("a", prompt, **params)
    host.add("b", [1, 1], **params)
    host.step()
    drafts = [token if i < num_right else (token + 1) % 90 for i, token in enumerate(want[1:4])]
    output = host.step({"a": 1, "b": 1}, drafts={"a": drafts})
    assert output.sampled_token_ids[0] == want[1 : 2 + num_right]
    assert model.num_logits_rows[-1] == 5
    for _ in range(3):
        host.step()
    assert host.requests["a"].output == want[: 5 + num_right]
    assert host.requests["b"].output == generate_alone([1, 1], 5, **params)


def test_logprobs_and_min_tokens_with_drafts_are_those_without():
    params = {"temperature": 0.0, "logprobs": 2, "min_tokens": 3}
    stop = int(toy_logits([8, 6, 7, *generate_alone([8, 6, 7], 2, temperature=0.0)]).argmax())
    plain, _ = make_host()
    plain.add("a", [8, 6, 7], stop_token_ids=(stop,), **params)
    entries = [plain.step().logprobs["a"][0] for _ in range(4)]
    tokens = plain.requests["a"].output
    assert tokens[2] != stop

    drafted, _ = make_host()
    drafted.add("a", [8, 6, 7], stop_token_ids=(stop,), **params)
    drafted.step()
    output = drafted.step({"a": 1}, drafts={"a": tokens[1:3]})
    assert output.sampled_token_ids == [tokens[1:4]]
    assert output.logprobs["a"] == entries[1:]


def test_the_drafter_sees_the_tokens_just_sampled():
    seen = []

    class Spy(NullDrafter):
        def propose(self, req_ids, rows, num_tokens, token_ids):
            for req_id, row, count in zip(req_ids, rows, num_tokens, strict=True):
                seen.append((req_id, token_ids[row, :count].tolist()))
            return {"a": [1, 2]}

    host, _ = make_host(drafter=Spy())
    host.add("a", [3, 4], temperature=0.0)
    host.add("b", [3, 4, 5], temperature=0.0)
    output = host.step({"a": 2, "b": 2})
    assert output.draft_token_ids == {"a": [1, 2]}
    assert seen == [("a", [3, 4, *generate_alone([3, 4], 1, temperature=0.0)])]


# ---- logprobs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_best", [0, 3, -1])
def test_logprobs_of_generated_tokens(num_best):
    host, _ = make_host()
    host.add("a", [3, 4], temperature=1.0, seed=1, logprobs=num_best)
    host.add("b", [3, 4], temperature=1.0, seed=1)
    output = host.step()
    assert list(output.logprobs) == ["a"]
    (entry,) = output.logprobs["a"]
    (token,) = output.sampled_token_ids[0]
    exact = log_softmax(toy_logits([3, 4]))
    best = np.argsort(-exact)[: VOCAB_SIZE if num_best == -1 else num_best].tolist()
    # The seven tokens that are never likely tie, in order of their ids.
    best = sorted(best, key=lambda i: (-exact[i], i))
    assert entry.token_ids == [token, *best]
    assert entry.logprobs == pytest.approx(exact[entry.token_ids].tolist(), abs=1e-4)
    assert entry.rank == int((exact >= exact[token]).sum())


@pytest.mark.parametrize("chunks", [[150], [1, 149], [64, 65, 21], [50, 50, 49, 1]])
def test_prompt_logprobs_come_chunk_by_chunk(chunks):
    prompt = np.random.default_rng(1).integers(0, 80, 150).tolist()
    host, model = make_host()
    host.add("a", prompt, temperature=0.0, prompt_logprobs=2)
    host.add("b", [1, 2, 3], temperature=0.0)
    host.step({"b": 3})
    entries = []
    for count in chunks:
        output = host.step({"a": count, "b": 1}, all_logits=["a"])
        entries += output.prompt_logprobs.get("a", [])
        assert set(output.prompt_logprobs) <= {"a"}
    assert max(model.num_logits_rows) <= LOGITS_SLAB
    assert len(entries) == len(prompt) - 1
    for place, entry in enumerate(entries, start=1):
        exact = log_softmax(toy_logits(prompt[:place]))
        assert entry.token_ids == [prompt[place], *np.argsort(-exact)[:2].tolist()]
        assert entry.logprobs == pytest.approx(exact[entry.token_ids].tolist(), abs=1e-4)
    assert host.requests["a"].output == generate_alone(prompt, 1, temperature=0.0)


def test_known_output_is_no_prompt_after_a_preemption():
    host, _ = make_host()
    host.add("a", [3, 4, 5], temperature=0.0, prompt_logprobs=0)
    host.step(all_logits=["a"])
    host.step()
    host.leave_row("a")
    output = host.step(all_logits=["a"])
    assert len(output.prompt_logprobs["a"]) == 2
    assert host.requests["a"].output == generate_alone([3, 4, 5], 3, temperature=0.0)


# ---- grammar ------------------------------------------------------------------------------------


def bitmask(*rows):
    bits = np.zeros((len(rows), -(-VOCAB_SIZE // 32)), np.uint32)
    for row, tokens in enumerate(rows):
        for token in tokens:
            bits[row, token // 32] |= np.uint32(1 << token % 32)
    return bits.astype("<u4").tobytes()


def test_masks_meet_the_logits_of_their_requests():
    """Drafts have a mask each, and so has the token after them."""
    host, _ = make_host()
    for req_id in "abc":
        host.add(req_id, [ord(req_id) % 50], temperature=0.0)
    host.step()
    plan = host.plan({"a": 1, "b": 1, "c": 1}, drafts={"a": [11, 12]})
    host.worker.execute_model(plan)
    masks = bitmask([33], [11], [12], [13])
    output = host.worker.sample_tokens(GrammarOutput(["c", "a"], masks)).result()
    want_b = generate_alone([ord("b") % 50], 2, temperature=0.0)[1:]
    assert output.sampled_token_ids == [[11, 12, 13], want_b, [33]]
