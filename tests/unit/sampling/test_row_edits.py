"""Edits of logits by what rows ask for: against float64, in their order, and row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers.asked import CHOICES, EDITS, OTHER_MARKS, wishes
from helpers.sampling import edited, metadata_of, new_request, run_sampler
from tokenmill.contracts.logits_processor import LogitsProcessor, ProcessorContext
from tokenmill.contracts.request import TokenRules
from tokenmill.sampling.choosers import TorchChooser
from tokenmill.sampling.grammar_mask import GrammarMask
from tokenmill.sampling.row_params import RowSamplingParams
from tokenmill.sampling.sampler import Sampler

INF = float("inf")
VOCAB_SIZE = 40


def random_tokens(rng, low=1, high=30):
    """Few different ones, so that patterns come about; marks and stop ids among them."""
    return rng.integers(0, 10, int(rng.integers(low, high))).tolist()


def logits_of(rng, count, vocab_size=VOCAB_SIZE):
    return torch.from_numpy(rng.normal(0, 3, (count, vocab_size)).astype(np.float32))


def apply_edits(logits, metadata):
    for edit in metadata.edits:
        edit.apply(logits, metadata.token_ids)
    return logits


@pytest.mark.parametrize("edits", EDITS + OTHER_MARKS, ids=lambda edits: "+".join(edits))
def test_an_edit_does_what_float64_arithmetic_does(edits):
    """Rows with other tokens, some of them without any output."""
    rng = np.random.default_rng(1)
    requests = []
    for row in range(60):
        tokens = random_tokens(rng, 2)
        num_prompt = int(rng.integers(1, len(tokens) + 1)) if row % 5 else len(tokens)
        requests.append(new_request(row, token_ids=tokens, num_prompt_tokens=num_prompt, **edits))
    logits = logits_of(rng, len(requests))
    logits[::7, 3] = -INF
    found = apply_edits(logits.clone(), metadata_of(requests, VOCAB_SIZE)).numpy()
    want = [
        edited(row.tolist(), request, request.token_ids)
        for row, request in zip(logits, requests, strict=True)
    ]
    np.testing.assert_allclose(found, np.array(want), rtol=1e-5, atol=1e-5)
    assert not np.array_equal(found, logits.numpy())


def test_rows_that_ask_for_nothing_cost_nothing():
    requests = [new_request(row, temperature=row % 2, logprobs=row) for row in range(4)]
    assert metadata_of(requests, VOCAB_SIZE).edits == ()
    asks = [new_request(0), new_request(1, logit_bias={3: 1.0}), new_request(2)]
    (edit,) = metadata_of(asks, VOCAB_SIZE).edits
    logits = torch.zeros(3, VOCAB_SIZE)
    edit.apply(logits, torch.empty(0, 0))
    assert logits.nonzero().tolist() == [[1, 3]]


def test_the_order_of_the_pipeline():
    """Grammar, raw snapshot, allowed ids, bad words, min_tokens, biases, custom, penalties."""

    class Fives(LogitsProcessor):
        def for_request(self, params):
            def edit(prompt_ids, output_ids, logits):
                seen.append(logits.clone())
                logits.clamp_(max=5.0)

            return edit

    seen = []
    processor = Fives(ProcessorContext(8, 1, "cpu"))
    table = RowSamplingParams(1, 8, [processor])
    request = new_request(
        token_ids=[1, 2, 5],
        num_prompt_tokens=1,
        temperature=0.0,
        logprobs=0,
        allowed_token_ids=[2, 3, 4, 5, 6],
        token_rules=TokenRules(bad_words=[[5, 6]]),
        min_tokens=9,
        stop_token_ids=(4,),
        logit_bias={3: 50.0, 4: 50.0, 6: 50.0},
        repetition_penalty=2.0,
        presence_penalty=0.5,
    )
    table.set_row(0, request)
    metadata = table.gather(
        np.array([0]),
        np.array([3]),
        np.array([1]),
        torch.tensor([[1, 2, 5]], dtype=torch.int32),
        GrammarMask(np.array([0]), np.array([[0b11111101]], np.int32)),
    )
    logits = torch.tensor([[9.0, 9.0, 4.0, 1.0, 1.0, 3.0, 1.0, 1.0]])
    output = Sampler(chooser=TorchChooser()).forward(logits, metadata)
    # The processor sees bans and biases, but no penalties yet.
    assert seen[0].tolist() == [-INF, -INF, 4.0, 51.0, -INF, 3.0, -INF, -INF]
    assert logits[0].tolist() == [-INF, -INF, 1.5, 5.0, -INF, 1.0, -INF, -INF]
    assert output.token_ids.tolist() == [3]
    # Raw: behind the grammar only, which bans id 1.
    raw = np.array([9.0, 4.0, 1.0, 1.0, 3.0, 1.0, 1.0])
    assert output.logprobs[0].logprobs[0] == pytest.approx(1 - np.log(np.exp(raw).sum()), abs=1e-5)


def test_b028_repetition_counts_the_prompt_and_the_others_do_not():
    tokens = {"token_ids": [4, 4, 5], "num_prompt_tokens": 2}
    logits = torch.full((1, 8), 2.0)
    for params, want in (
        ({"repetition_penalty": 2.0}, {4: 1.0, 5: 1.0}),
        ({"presence_penalty": 0.5}, {5: 1.5}),
        ({"frequency_penalty": 0.5}, {5: 1.5}),
    ):
        metadata = metadata_of([new_request(**tokens, **params)], 8)
        found = apply_edits(logits.clone(), metadata)[0]
        assert found.tolist() == [want.get(i, 2.0) for i in range(8)]


def test_b016_a_good_bias_forces_its_token():
    logits = logits_of(np.random.default_rng(0), 6)
    requests = [
        new_request(row, seed=row, temperature=row % 2, logit_bias={row: 100.0}) for row in range(6)
    ]
    assert run_sampler(logits, requests).token_ids.tolist() == list(range(6))


def test_a_bad_word_is_stopped_at_its_last_token_and_only_in_the_output():
    rules = TokenRules(bad_words=[[7, 8, 9], [5]])
    logits = torch.zeros(1, 12)

    def banned(tokens, num_prompt):
        request = new_request(token_ids=tokens, num_prompt_tokens=num_prompt, token_rules=rules)
        found = apply_edits(logits.clone(), metadata_of([request], 12))[0]
        return (found == -INF).nonzero().flatten().tolist()

    assert banned([1, 7, 8], 1) == [5, 9]
    assert banned([1, 7], 1) == [5]
    assert banned([7, 8], 1) == [5]  # it began in the prompt
    assert banned([7, 8], 2) == [5]
    assert banned([1, 9, 8, 7], 1) == [5]


def test_allowed_ids_beside_an_end_that_is_not_due_leave_nothing():
    request = new_request(allowed_token_ids=[3], min_tokens=2, stop_token_ids=(3,))
    assert run_sampler(torch.zeros(1, 8), [request]).is_valid.tolist() == [False]


def test_extreme_penalties_stay_finite():
    logits = torch.tensor([[3e30, -3e30, 1e-30, 0.0, -INF, 7.0]])
    for repetition in (1e-6, 1e6):
        request = new_request(
            token_ids=[0, 1, 2, 3, 4],
            num_prompt_tokens=2,
            repetition_penalty=repetition,
            frequency_penalty=2.0,
            presence_penalty=-2.0,
            temperature=0.01,
        )
        output = run_sampler(logits, [request])
        assert output.is_valid.all()
        assert output.token_ids[0] != 4


# ---- rows come and go ----------------------------------------------------------------------------


class Shy(LogitsProcessor):
    """A custom processor: what prompt and output have in common becomes less likely."""

    def for_request(self, params):
        if params.extra_args is None:
            return None

        def edit(prompt_ids, output_ids, logits):
            common = sorted(set(prompt_ids.tolist()) & set(output_ids.tolist()))
            logits[common] -= params.extra_args["by"]

        return edit


def table_of(num_rows):
    return RowSamplingParams(num_rows, VOCAB_SIZE, [Shy(ProcessorContext(VOCAB_SIZE, 8, "cpu"))])


def single(request, logits, position):
    """What the request gets with nobody beside it."""
    alone = table_of(1)
    alone.set_row(0, request)
    tokens = torch.tensor([request.token_ids[:position]], dtype=torch.int32)
    metadata = alone.gather(
        np.array([0]),
        np.array([position]),
        np.array([request.num_prompt_tokens]),
        tokens,
        GrammarMask(),
    )
    row = logits.clone().unsqueeze(0)
    return Sampler().forward(row, metadata), row[0]


@pytest.mark.parametrize("seed", range(6))
def test_any_company_gives_the_bits_of_each_alone(seed):
    """Requests enter and leave rows at random; steps sample some of them, in any order."""
    rng = np.random.default_rng(seed)
    num_rows, max_len = 8, 64
    table = table_of(num_rows)
    token_ids = np.zeros((num_rows, max_len), np.int32)
    num_prompt = np.zeros(num_rows, np.int64)
    requests = {}
    num_edited = 0
    for step in range(60):
        for row in range(num_rows):
            if row in requests and rng.random() < 0.15:
                del requests[row]
            if row not in requests and rng.random() < 0.5:
                tokens = random_tokens(rng)
                requests[row] = new_request(
                    row,
                    seed=int(rng.integers(2**63)),
                    token_ids=tokens,
                    num_prompt_tokens=int(rng.integers(1, len(tokens) + 1)),
                    logprobs=int(rng.integers(4)) if rng.random() < 0.5 else None,
                    extra_args={"by": 2.5} if rng.random() < 0.3 else None,
                    **wishes(rng),
                )
                table.set_row(row, requests[row])
                token_ids[row, : len(tokens)] = tokens
                num_prompt[row] = requests[row].num_prompt_tokens
        rows = rng.permutation(list(requests))[: int(rng.integers(1, num_rows + 1))]
        if not len(rows):
            continue
        positions = np.array([len(requests[row].token_ids) for row in rows])
        logits = logits_of(rng, len(rows))
        metadata = table.gather(
            rows, positions, num_prompt, torch.from_numpy(token_ids), GrammarMask()
        )
        together = logits.clone()
        output = Sampler().forward(together, metadata)
        for i, row in enumerate(rows.tolist()):
            request = requests[row]
            alone, row_logits = single(request, logits[i], int(positions[i]))
            assert together[i].numpy().tobytes() == row_logits.numpy().tobytes(), (step, request)
            assert output.token_ids[i] == alone.token_ids[0]
            assert output.is_valid[i] == alone.is_valid[0]
            assert output.logprobs.get(i) == alone.logprobs.get(0)
            num_edited += not torch.equal(together[i], logits[i])
            request.token_ids.append(int(output.token_ids[i]))
            token_ids[row, positions[i]] = output.token_ids[i]
            if len(request.token_ids) == max_len:
                del requests[row]
    assert num_edited > 60


def test_every_edit_and_choice_was_among_them():
    rng = np.random.default_rng(0)
    drawn = [wishes(rng) for _ in range(500)]
    for choice in CHOICES:
        assert any(choice.items() <= each.items() for each in drawn)
    for edits in EDITS:
        assert any(all(each.get(name) == value for name, value in edits.items()) for each in drawn)


def test_a_processor_that_cannot_take_a_request_fails_in_its_step_only():
    class Broken(LogitsProcessor):
        def for_request(self, params):
            if params.extra_args:
                raise ValueError("what is this?")

    table = RowSamplingParams(2, 8, [Broken(ProcessorContext(8, 2, "cpu"))])
    table.set_row(0, new_request(0, extra_args={"a": 1}))
    table.set_row(1, new_request(1))
    tokens = torch.ones(2, 1, dtype=torch.int32)
    ones = np.ones(2, np.int64)
    good = table.gather(np.array([1]), ones[:1], ones, tokens, GrammarMask())
    assert good.edits == ()
    bad = table.gather(np.array([0]), ones[:1], ones, tokens, GrammarMask())
    with pytest.raises(RuntimeError, match=r"Broken.for_request: ValueError: what is this\?"):
        apply_edits(torch.zeros(1, 8), bad)


def test_processors_cannot_write_the_rows_tokens():
    class Scribbler(LogitsProcessor):
        def for_request(self, params):
            def edit(prompt_ids, output_ids, logits):
                prompt_ids.zero_()
                output_ids.zero_()

            return edit

    table = RowSamplingParams(1, 8, [Scribbler(ProcessorContext(8, 1, "cpu"))])
    table.set_row(0, new_request())
    tokens = torch.tensor([[1, 2, 3]], dtype=torch.int32)
    metadata = table.gather(np.array([0]), np.array([3]), np.array([2]), tokens, GrammarMask())
    apply_edits(torch.zeros(1, 8), metadata)
    assert tokens.tolist() == [[1, 2, 3]]
