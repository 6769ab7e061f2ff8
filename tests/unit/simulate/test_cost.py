"""What steps take, against sums by hand, and costs that are found again from times."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.core import create_kv_cache_config
from tokenmill.config.memory import Weights
from tokenmill.errors import ConfigError
from tokenmill.simulate.cost import MachineFigures, RooflineCost, WeightSizes
from tokenmill.simulate.fitting import (
    FEATURES,
    FittedCost,
    features_of,
    fit,
    read_step_times,
    relative_errors,
    write_step_times,
)
from tokenmill.simulate.work import StepTime, StepWork, WorkCounter

SIZES = WeightSizes(layer_bytes=1000, layer_values=500, head_bytes=200, head_values=100)


def cost(bandwidth=1.0, flops=1e9, **more):
    machine = MachineFigures(bandwidth, flops, step_seconds=5.0, request_seconds=0.5)
    return RooflineCost(SIZES, machine, bytes_per_key=3, flops_per_score=7, **more)


def test_a_step_that_reads_longer_than_it_computes():
    work = StepWork(num_requests=2, num_tokens=2, num_logits=2, num_keys=40, num_scores=40)
    assert cost().seconds(work) == pytest.approx(5.0 + 2 * 0.5 + 1000 + 200 + 3 * 40)


def test_a_step_that_computes_longer_than_it_reads():
    work = StepWork(num_requests=1, num_tokens=30, num_logits=0, num_keys=30, num_scores=465)
    flops = 2 * 500 * 30 + 7 * 465
    assert cost(bandwidth=1e9, flops=1.0).seconds(work) == pytest.approx(5.5 + flops)


def test_of_experts_those_are_read_that_a_token_chooses():
    sizes = WeightSizes(0, 0, 0, 0, expert_bytes=1000, expert_values=400)
    machine = MachineFigures(bandwidth=1.0, flops=1e9)
    some = RooflineCost(sizes, machine, bytes_per_key=0, flops_per_score=0, chosen_share=0.25)
    one = StepWork(1, 1, 1, 0, 0)
    two = StepWork(1, 2, 1, 0, 0)
    assert some.seconds(one) == pytest.approx(250)
    assert some.seconds(two) == pytest.approx(1000 * (1 - 0.75**2), abs=1)


def test_sizes_of_a_models_weights():
    shapes = {
        "model.embed_tokens.weight": (100, 32),
        "model.layers.0.self_attn.q_proj.weight": (64, 32),
        "model.layers.0.mlp.experts.0.down_proj.weight": (32, 64),
        "model.norm.weight": (32,),
    }
    tied = Weights(shapes, dict.fromkeys(shapes, "BF16"), "bfloat16", keeps_blocks=True)
    sizes = WeightSizes.of(tied)
    assert sizes == WeightSizes(4096, 2048, 6400, 3200, expert_bytes=4096, expert_values=2048)
    assert not sizes.in_blocks
    shapes = {**shapes, "lm_head.weight": (100, 16)}
    untied = Weights(shapes, dict.fromkeys(shapes, "BF16"), "bfloat16", keeps_blocks=True)
    assert WeightSizes.of(untied).head_values == 1600


@given(
    windows=st.lists(st.sampled_from([None, 1, 3, 8]), min_size=1, max_size=3),
    start=st.integers(0, 20),
    num_tokens=st.integers(1, 20),
)
def test_keys_and_scores_against_loops(windows, start, num_tokens):
    counter = WorkCounter(create_kv_cache_config(windows=windows))
    seen = [
        {key for key in range(position + 1) if window is None or key > position - window}
        for window in windows
        for position in range(start, start + num_tokens)
    ]
    layers = [seen[i * num_tokens : (i + 1) * num_tokens] for i in range(len(windows))]
    assert counter.of_request(num_tokens, start + num_tokens) == (
        sum(len(set().union(*layer)) for layer in layers),
        sum(map(len, seen)),
    )


def test_decoding_adds_a_key_for_each_request_and_layer():
    counter = WorkCounter(create_kv_cache_config(windows=[None, None]))
    work = counter.of_decode([10, 20])
    assert work == StepWork(2, 2, 2, 60, 60)
    assert counter.next_decode(work) == counter.of_decode([11, 21])


def steps_of(model, count=200, noise=0.0):
    draw = random.Random(5)
    for _ in range(count):
        num_requests = draw.randrange(1, 40)
        num_tokens = num_requests + draw.choice([0, 0, draw.randrange(300)])
        num_keys = num_requests * draw.randrange(10, 500)
        work = StepWork(num_requests, num_tokens, num_requests, num_keys, num_keys * 3)
        seconds = model.seconds(work) * (1 + noise * draw.uniform(-1, 1))
        yield StepTime(*(getattr(work, name) for name in work.__struct_fields__), seconds)


def test_costs_are_found_again():
    true = FittedCost((1e-3, 1e-5, 2e-5, 0.0, 1e-5, 5e-5, 0.0, 1e-7, 0.0))
    steps = list(steps_of(true))
    assert max(map(abs, relative_errors(fit(steps), steps))) < 0.005


def test_half_of_noisy_steps_tell_what_the_others_take():
    machine = MachineFigures(1e6, 1e8, step_seconds=1e-4, request_seconds=1e-5)
    true = RooflineCost(SIZES, machine, bytes_per_key=3, flops_per_score=7)
    steps = list(steps_of(true, noise=0.05))
    errors = relative_errors(fit(steps[::2]), steps[1::2])
    assert sum(map(abs, errors)) / len(errors) < 0.12
    assert abs(sum(errors) / len(errors)) < 0.03


def test_steps_that_take_long_by_chance_count_as_well():
    """One in ten takes ten times as long, as on a machine that others use: the sum is right."""
    steps = [StepTime(1, 1, 1, 10, 10, 1.0)] * 90 + [StepTime(1, 1, 1, 10, 10, 10.0)] * 10
    assert fit(steps).seconds(steps[0]) == pytest.approx(1.9, rel=1e-3)


def test_no_cost_is_negative():
    """Fewer tokens take longer here, by chance: a line through them would fall."""
    steps = [StepTime(1, 1, 1, 10, 10, 2.0), StepTime(1, 5, 1, 10, 10, 1.0)] * 5
    fitted = fit(steps)
    assert all(each >= 0 for each in fitted.costs)
    assert len(fitted.costs) == len(FEATURES) == len(features_of(steps[0]))


def test_files_of_step_times(tmp_path):
    steps = list(steps_of(FittedCost((1e-3, *[1e-6] * 8)), count=5))
    path = tmp_path / "steps.jsonl"
    write_step_times(path, steps)
    assert read_step_times(path) == steps
    assert len(path.read_text().splitlines()) == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must hold steps"),
        ("{", "no step"),
        ('{"num_requests": 1}', "no step"),
        (
            '{"num_requests":1,"num_tokens":1,"num_logits":1,"num_keys":1,"num_scores":1}',
            "more than 0 seconds",
        ),
    ],
)
def test_files_that_are_no_step_times(tmp_path, text, words):
    path = tmp_path / "steps.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_step_times(path)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"step_times=.*cannot be read"):
        read_step_times(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"step_times=.*cannot be written"):
        write_step_times(tmp_path / "none" / "steps", [])


def test_more_work_never_takes_less():
    fitted = FittedCost(tuple(1e-6 * (i + 1) for i in range(len(FEATURES))))
    works = [StepWork(1, tokens, 1, 10, 10) for tokens in range(1, 300)]
    times = [fitted.seconds(work) for work in works]
    assert all(a < b for a, b in itertools.pairwise(times))
