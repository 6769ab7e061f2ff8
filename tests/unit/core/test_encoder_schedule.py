"""When images are encoded, and how long they are kept."""

from __future__ import annotations

import pytest

from helpers.core import (
    add,
    check_idle,
    check_invariants,
    create_core,
    create_request,
    create_scheduler,
    planned,
    run_to_end,
    settle,
)
from helpers.fake_executor import endless, generate_alone
from helpers.images import Image, Piece, prompt_of
from tokenmill.contracts.plan import EncoderWork, SchedulerOutput
from tokenmill.contracts.request import EngineCoreRequest, MultiModalFeature
from tokenmill.core.encoder import EncoderSchedule
from tokenmill.core.encoder_cache import EncoderCache
from tokenmill.core.scheduler import Scheduler
from tokenmill.errors import InvalidRequestError

CAT, DOG = Image("cat", 6), Image("dog", 6)
ROWS = Image("rows", 8, ((0, 3), (4, 3)))
"""Its last token, and one in the middle, are no placeholders of embeddings."""


def create(
    *, budget: int = 100, cache: int = 100, is_bidirectional: bool = False, **kwargs: object
) -> Scheduler:
    encoder = EncoderSchedule(budget, cache, is_bidirectional=is_bidirectional)
    return create_scheduler(encoder=encoder, **kwargs)


def steps_of(scheduler: Scheduler, count: int) -> list[dict[str, int]]:
    """How many tokens each request computes, step by step."""
    steps = []
    for _ in range(count):
        plan = scheduler.schedule()
        steps.append(planned(plan))
        settle(scheduler, plan)
    return steps


def ask(name: str, pieces: list[Piece], **kwargs: object) -> EngineCoreRequest:
    token_ids, features = prompt_of(pieces)
    return create_request(token_ids, request_id=name, mm_features=features, **kwargs)


def text(count: int) -> list[Piece]:
    return list(range(20, 20 + count))


def work(plan: SchedulerOutput) -> tuple[list[tuple[int, int]], list[str]]:
    """What is encoded, and how many are freed."""
    encoder = plan.encoder or EncoderWork([], [])
    return encoder.items, encoder.freed_hashes


def hashes(*images: Image) -> list[str]:
    return [image.at(0).content_hash for image in images]


def test_a_feature_says_where_its_embeddings_go():
    plain = MultiModalFeature("h", "image", 10, 4)
    assert (plain.spans, plain.num_embeds, plain.embeds_end) == ([(0, 4)], 4, 14)
    rows = ROWS.at(5)
    assert (rows.num_embeds, rows.embeds_end) == (6, 12)


def test_an_item_is_encoded_in_the_step_that_reaches_it_and_only_there():
    scheduler = create(max_num_batched_tokens=5)
    add(scheduler, ask("a", [*text(5), *[CAT], *text(4)]))
    steps = []
    for _ in range(3):
        plan = scheduler.schedule()
        steps.append((planned(plan), work(plan)))
        settle(scheduler, plan)
    assert steps == [
        ({"a": 5}, ([], [])),
        ({"a": 5}, ([(0, 0)], [])),
        ({"a": 5}, ([], [])),
    ]


def test_a_chunk_ends_before_an_item_that_exceeds_the_budget_of_the_step():
    scheduler = create(budget=7)
    add(scheduler, ask("a", [*text(2), CAT, *text(3), DOG, *text(2)]))
    plan = scheduler.schedule()
    assert (planned(plan), work(plan)) == ({"a": 11}, ([(0, 0)], []))
    settle(scheduler, plan)
    plan = scheduler.schedule()
    assert (planned(plan), work(plan)) == ({"a": 8}, ([(0, 1)], []))


def test_the_cut_is_before_the_first_embedding_not_before_what_stands_around_it():
    scheduler = create(budget=7)
    marked = Image("marked", 8, ((2, 6),))
    add(scheduler, ask("a", [CAT, marked, *text(2)]))
    assert planned(scheduler.schedule()) == {"a": 8}


def test_an_item_larger_than_the_budget_has_a_step_of_its_own():
    scheduler = create(budget=2)
    add(scheduler, ask("a", [CAT, DOG, *text(1)]), ask("b", [*text(3), ROWS]))
    seen = []
    while len(seen) < 3:
        plan = scheduler.schedule()
        seen.append((planned(plan), work(plan)[0]))
        settle(scheduler, plan)
    assert seen == [
        ({"a": 6, "b": 3}, [(0, 0)]),
        ({"a": 7}, [(0, 1)]),
        ({"a": 1, "b": 8}, [(1, 0)]),
    ]


def test_without_room_in_the_cache_an_item_waits_until_another_has_settled():
    scheduler = create(cache=7, max_steps_in_flight=2)
    add(scheduler, ask("a", [CAT, *text(2)]), ask("b", [*text(1), DOG]))
    first = scheduler.schedule()
    assert (planned(first), work(first)[0]) == ({"a": 8, "b": 1}, [(0, 0)])
    second = scheduler.schedule()  # the first is in flight: the cat is still needed
    assert planned(second) == {"a": 1}
    settle(scheduler, first)
    third = scheduler.schedule()
    assert planned(third) == {"a": 1, "b": 6}
    assert work(third) == ([(1, 0)], hashes(CAT))


def test_requests_share_an_item_in_a_step_and_afterwards():
    scheduler = create()
    add(scheduler, ask("a", [CAT, *text(3)]), ask("b", [*text(2), CAT, 9, CAT]))
    plan = scheduler.schedule()
    assert (planned(plan), work(plan)) == ({"a": 9, "b": 15}, ([(0, 0)], []))
    settle(scheduler, plan)
    add(scheduler, ask("c", [*text(4), CAT]))
    plan = scheduler.schedule()
    assert (planned(plan)["c"], work(plan)) == (10, ([], []))
    stats = scheduler.make_stats()
    assert (stats.encoder_cache_queries, stats.encoder_cache_hits) == (4, 3)


def test_the_oldest_that_nobody_needs_is_evicted():
    scheduler = create(cache=13, max_num_seqs=1)
    freed = []
    for name, image in [("a", CAT), ("b", DOG), ("c", CAT), ("d", ROWS), ("e", CAT), ("f", DOG)]:
        add(scheduler, ask(name, [*text(3), image, *text(1)], max_tokens=1))
        plan = scheduler.schedule()
        freed.append(work(plan)[1])
        settle(scheduler, plan)
    # Whoever was asked for again is no longer the oldest.
    assert freed == [[], [], [], hashes(DOG), [], hashes(ROWS)]


def test_b077_an_item_of_a_request_that_gives_way_in_the_same_step_is_not_encoded():
    scheduler = create(policy="priority", num_blocks=5, long_prefill_token_threshold=4)
    add(scheduler, ask("low", [*text(8), CAT, 9], priority=5))
    settle(scheduler, scheduler.schedule())
    add(scheduler, create_request(4, request_id="high", priority=0, max_tokens=9))
    plan = scheduler.schedule()
    assert planned(plan) == {"low": 4, "high": 4}
    settle(scheduler, plan)
    taken = []
    take = scheduler.encoder.take

    def counted_take(request, num_tokens):
        take(request, num_tokens)
        taken.append((request.request_id, scheduler.encoder.cache.num_new))

    scheduler.encoder.take = counted_take
    plan = scheduler.schedule()
    assert taken == [("low", 6), ("high", 0)]
    assert (planned(plan), work(plan)) == ({"high": 1}, ([], []))
    assert scheduler.encoder.cache.num_available == 100


def test_preemption_keeps_what_is_encoded_for_who_resumes():
    core, executor = create_core(
        next_token=endless,
        num_blocks=11,
        max_num_seqs=3,
        enable_prefix_caching=False,
        encoder=EncoderSchedule(6, 12),
    )
    requests = [
        ask(str(number), [*text(number), [CAT, DOG][number % 2], *text(2)], max_tokens=14)
        for number in range(4)
    ]
    for request in requests:
        core.add_request(request)
    collected = run_to_end(core).requests
    for request in requests:
        expected = generate_alone(request, core.scheduler, endless)
        assert collected[request.request_id].token_ids == expected.token_ids
    assert core.scheduler.make_stats().num_preemptions > 0
    assert executor.num_encoded == 2


@pytest.mark.parametrize("end", ["abort", "fail"])
@pytest.mark.parametrize("depth", [1, 2])
def test_nothing_is_held_for_requests_that_ended_early(end, depth):
    scheduler = create(max_num_batched_tokens=4, max_steps_in_flight=depth)
    add(scheduler, ask("a", [CAT, *text(9)]))
    plans = [scheduler.schedule() for _ in range(depth)]
    assert scheduler.encoder.cache.num_available == 94
    if end == "abort":
        scheduler.abort_requests(["a"])
    for plan in plans:
        settle(scheduler, plan, errors={"a": "broken"} if end == "fail" else {})
    check_idle(scheduler)


def test_what_the_prefix_cache_has_of_an_item_is_not_encoded_again():
    scheduler = create(cache=8)
    long = Image("long", 8)
    pieces = [*text(2), long, *text(3)]  # blocks of 4: 2 + 2, 4, 2 + 2, ...
    add(scheduler, ask("a", pieces, max_tokens=1))
    settle(scheduler, scheduler.schedule())
    add(scheduler, ask("b", [*text(3), ROWS], max_tokens=1))  # evicts it
    settle(scheduler, scheduler.schedule())

    add(scheduler, ask("whole", pieces, max_tokens=1))
    plan = scheduler.schedule()
    assert (planned(plan), work(plan)) == ({"whole": 1}, ([], []))
    settle(scheduler, plan)
    # Two of the last block's tokens are the image's: for them it is encoded.
    add(scheduler, ask("part", [*pieces[:3], 99, 98, 97], max_tokens=1))
    plan = scheduler.schedule()
    assert (planned(plan), work(plan)[0]) == ({"part": 5}, [(0, 0)])
    settle(scheduler, plan)
    # Another image in its place has nothing but the block before it.
    add(scheduler, ask("other", [*text(2), Image("short", 8), *text(3)], max_tokens=1))
    assert planned(scheduler.schedule()) == {"other": 13}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_may_end_with_an_item_of_one_token(depth):
    core, executor = create_core(
        max_num_batched_tokens=8, max_steps_in_flight=depth, encoder=EncoderSchedule(1, 1)
    )
    request = ask("a", [*text(8), Image("dot", 1)], max_tokens=6)
    core.add_request(request)
    assert (
        run_to_end(core).requests["a"].token_ids
        == generate_alone(request, core.scheduler).token_ids
    )
    assert executor.num_encoded == 1


def test_items_are_encoded_in_turn_even_if_prompts_may_not_be_cut():
    core, executor = create_core(
        enable_chunked_prefill=False,
        max_num_batched_tokens=64,
        max_model_len=64,
        encoder=EncoderSchedule(6, 6),
    )
    core.add_request(ask("a", [CAT, *text(2), DOG, *text(2)], max_tokens=2))
    run_to_end(core)
    assert [planned(plan)["a"] for plan in executor.plans] == [8, 8, 1]


def test_when_all_is_computed_a_request_decodes_in_the_short_way():
    scheduler = create()
    add(scheduler, ask("a", [CAT, *text(2)], max_tokens=9))
    for _ in range(3):
        settle(scheduler, scheduler.schedule())
    assert scheduler.schedule().is_repeated


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (0, r"modality 'image', but this model takes text only"),
        (5, r"6 embeddings, but encoder_cache_size=5\. Send a smaller one, or raise"),
    ],
)
def test_items_that_can_never_be_encoded_are_refused(size, message):
    scheduler = create(cache=size)
    with pytest.raises(InvalidRequestError, match=message) as caught:
        add(scheduler, ask("a", [CAT, *text(2)]))
    assert caught.value.parameter == "multi_modal_data"
    check_idle(scheduler)


def test_the_cache_knows_when_its_counts_are_wrong():
    cache = EncoderCache(10)
    assert not cache.add("x", 4, ("a", 0))
    assert cache.audit() == []
    cache._items["x"].references.clear()
    assert len(cache.audit()) == 2


def test_reset_with_images_under_way_starts_over():
    scheduler = create(max_num_batched_tokens=4)
    add(scheduler, ask("a", [CAT, *text(4)]))
    settle(scheduler, scheduler.schedule())
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    check_invariants(scheduler)
    assert planned(scheduler.schedule()) == {"a": 4}


# ---- items whose tokens see each other in both directions ---------------------------------------


def test_a_run_that_sees_itself_is_computed_in_one_step():
    scheduler = create(is_bidirectional=True, max_num_batched_tokens=8)
    add(scheduler, ask("a", [*text(3), CAT, *text(4), ROWS], max_tokens=1))
    assert steps_of(scheduler, 4) == [
        {"a": 3},
        {"a": 8},  # the run of 6, and 2 of the text behind it
        {"a": 2 + 4},  # up to the second run of the rows
        {"a": 4},
    ]


def test_a_run_waits_for_a_step_with_room_and_others_do_not_wait_for_it():
    scheduler = create(is_bidirectional=True, max_num_batched_tokens=8)
    add(scheduler, ask("first", text(12), max_tokens=3))
    add(scheduler, ask("image", [CAT, *text(2)], max_tokens=1))
    assert steps_of(scheduler, 3) == [{"first": 8}, {"first": 4}, {"first": 1, "image": 7}]
    scheduler = create(is_bidirectional=True, max_num_batched_tokens=8)
    add(scheduler, ask("image", [*text(1), CAT, *text(9)], max_tokens=1))
    add(scheduler, ask("behind", text(3), max_tokens=2))
    assert steps_of(scheduler, 3) == [{"image": 8}, {"image": 8}, {"behind": 3}]


def test_a_run_is_taken_whole_where_a_prompt_s_share_of_the_step_is_less():
    scheduler = create(is_bidirectional=True, attention_cost=0.001, shared_tokens=10)
    add(scheduler, ask("decodes", text(2), max_tokens=9))
    settle(scheduler, scheduler.schedule())
    add(scheduler, ask("a", [*text(2), Image("wide", 50), *text(40)], max_tokens=1))
    first, run, rest = (step["a"] for step in steps_of(scheduler, 3))
    assert (first, run) == (2, 50)
    assert rest < 40  # cut as text is
    scheduler = create(is_bidirectional=True, long_prefill_token_threshold=4)
    add(scheduler, ask("a", [*text(2), CAT, *text(5)], max_tokens=1))
    assert steps_of(scheduler, 4) == [{"a": 2}, {"a": 6}, {"a": 4}, {"a": 1}]


def test_the_rest_of_a_cached_run_is_a_run_as_well():
    scheduler = create(is_bidirectional=True, max_num_batched_tokens=12, max_num_seqs=2)
    pieces = [*text(2), Image("long", 8), *text(2)]  # blocks of 4: 2 + 2, 4, 2 + 2
    add(scheduler, ask("a", pieces, max_tokens=1))
    settle(scheduler, scheduler.schedule())
    add(scheduler, ask("busy", text(11), max_tokens=3))
    add(scheduler, ask("part", [*pieces[:3], 99, 98], max_tokens=1))
    # 8 tokens are cached, 2 more are the image's: one token of the step is too few.
    assert steps_of(scheduler, 2) == [{"busy": 11}, {"busy": 1, "part": 4}]


def test_all_that_nobody_needs_is_forgotten_at_once():
    cache = EncoderCache(10)
    for number in range(3):
        cache.add(f"image {number}", 3, (str(number), 0))
    cache.take_news()
    cache.remove("image 0", ("0", 0))
    cache.remove("image 2", ("2", 0))
    cache.clear()
    assert [cache.is_kept(f"image {number}") for number in range(3)] == [False, True, False]
    assert cache.audit() == []
    assert cache.take_news() == ([], ["image 0", "image 2"])
