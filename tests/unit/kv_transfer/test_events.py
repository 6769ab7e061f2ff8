"""Events on the prefix cache: whoever follows them knows what is in it."""

from __future__ import annotations

import random
import threading
import time

import msgspec
import pytest
import zmq
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from helpers.core import create_core, create_request, run_to_end
from helpers.fake_executor import BLOCK_SIZE, endless
from helpers.kv_transfer import FakeTransfer
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.kv_events import KVEventsConfig, resolve_kv_events
from tokenmill.contracts.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from tokenmill.contracts.request import AdapterRef
from tokenmill.core.kv.block_pool import group_index_of, hash_of
from tokenmill.core.kv.hashing import hash_block
from tokenmill.errors import ConfigError
from tokenmill.features.kv_transfer.publisher import END, EventPublisher

PROMPT = list(range(10, 10 + 3 * BLOCK_SIZE + 1))


class Listener:
    """Follows events, and checks that each makes sense where it comes."""

    def __init__(self):
        self.hashes = set()
        self.events = []
        self.num_shutdowns = 0

    def publish(self, batch):
        for event in batch.events:
            self.events.append(event)
            match event:
                case BlockStored():
                    parent = event.parent_block_hash
                    assert len(event.token_ids) == event.block_size * len(event.block_hashes)
                    for number, block_hash in enumerate(event.block_hashes):
                        start = number * event.block_size
                        ids = event.token_ids[start : start + event.block_size]
                        if parent is not None and event.lora_name is None:
                            assert hash_block(parent, ids) == block_hash
                        parent = block_hash
                    self.hashes.update(event.block_hashes)
                case BlockRemoved():
                    assert set(event.block_hashes) <= self.hashes
                    self.hashes.difference_update(event.block_hashes)
                case AllBlocksCleared():
                    self.hashes.clear()

    def shutdown(self):
        self.num_shutdowns += 1


def following(**settings):
    transfer = FakeTransfer()
    core, executor = create_core(next_token=endless, kv_transfer=transfer, **settings)
    transfer.executor = executor
    listener = Listener()
    core.scheduler.kv.report_to(listener)
    core._events = core.scheduler.kv.events
    return core, listener


def cached(core):
    """Hashes of the group that speaks for all."""
    group = core.scheduler.kv.events._group
    keys = (block.key for block in group.pool.blocks if block.key is not None)
    return {hash_of(key) for key in keys if group_index_of(key) == group.index}


def test_blocks_are_told_with_their_tokens_in_the_order_of_events():
    core, listener = following(num_blocks=9)
    adapter = AdapterRef("mine", "load")
    core.add_request(create_request(PROMPT, max_tokens=1, adapter=adapter))
    run_to_end(core)
    (stored,) = listener.events
    assert stored.token_ids == PROMPT[: 3 * BLOCK_SIZE]
    assert stored.parent_block_hash is None
    assert stored.lora_name == "mine"
    core.add_request(create_request(6 * BLOCK_SIZE, max_tokens=1))
    run_to_end(core)
    kinds = [type(event) for event in listener.events]
    assert kinds.index(BlockRemoved) == 1, "before what has taken the place is told"
    assert listener.hashes == cached(core)
    assert core.scheduler.reset_prefix_cache()
    assert listener.events[-1] == AllBlocksCleared()
    core.shutdown()
    assert listener.num_shutdowns == 1


@settings(max_examples=25, deadline=None, phases=[Phase.generate])
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.sampled_from([14, 40]),
    windows=st.sampled_from([[None], [7, None], [7]]),
    depth=st.sampled_from([1, 2]),
)
def test_a_listener_knows_what_is_cached(seed, num_blocks, windows, depth):
    rng = random.Random(seed)
    core, listener = following(
        num_blocks=num_blocks, windows=windows, max_steps_in_flight=depth, max_model_len=40
    )
    for _ in range(60):
        if rng.random() < 0.4:
            prompt = [*PROMPT, *range(500, 512)][: rng.randint(1, 24)]
            prompt[0] += rng.randint(0, 2)
            core.add_request(create_request(prompt, max_tokens=rng.randint(1, 10)))
        if rng.random() < 0.05:
            core.scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.5)
        core.step()
        assert listener.hashes == cached(core)
    run_to_end(core)
    core.scheduler.kv.events.flush()
    assert listener.hashes == cached(core)


# ---- over ZMQ -----------------------------------------------------------------------------------


@pytest.fixture
def publisher():
    config = KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint="tcp://127.0.0.1:*",
        replay_endpoint="tcp://127.0.0.1:*",
        topic="kv",
        buffer_steps=3,
    )
    made = EventPublisher(config)
    yield made
    made.shutdown()


def batch(number):
    return EventBatch(float(number), [BlockStored([b"a"], None, [number], 1), BlockRemoved([b"b"])])


def test_batches_arrive_numbered_and_what_was_missed_is_sent_again(publisher):
    publish, replay = publisher.endpoints
    with (
        zmq.Context() as context,
        context.socket(zmq.SUB) as listener,
        context.socket(zmq.REQ) as asker,
    ):
        listener.connect(publish)
        listener.subscribe("kv")
        sent, received = 0, []
        end = time.monotonic() + 20
        while not received:  # until the subscription has arrived
            assert time.monotonic() < end
            publisher.publish(batch(sent))
            sent += 1
            if listener.poll(20):
                received.append(listener.recv_multipart())
        topic, number, payload = received[0]
        assert topic == b"kv"
        first = int.from_bytes(number, "big")
        assert msgspec.msgpack.decode(payload, type=EventBatch) == batch(first)
        stored, removed = msgspec.msgpack.decode(payload)[1]
        assert stored[:5] == ["BlockStored", [b"a"], None, [first], 1]
        assert removed[:2] == ["BlockRemoved", [b"b"]]
        for _ in range(5):
            publisher.publish(batch(sent))
            sent += 1
        while int.from_bytes(number, "big") < sent - 1:
            assert listener.poll(20_000)
            _, number, _ = listener.recv_multipart()
        asker.connect(replay)
        asker.send((sent - 2).to_bytes(8, "big"))
        again = []
        with context.socket(zmq.DEALER) as dealer:
            dealer.connect(replay)
            dealer.send_multipart([b"", (0).to_bytes(8, "big")])
            while True:
                assert dealer.poll(20_000)
                _, number, payload = dealer.recv_multipart()
                if number == END:
                    break
                again.append(int.from_bytes(number, "big"))
        assert again == [sent - 3, sent - 2, sent - 1], "as many as are kept"
        assert asker.poll(20_000)
        number, payload = asker.recv_multipart()
        assert int.from_bytes(number, "big") == sent - 2
        assert msgspec.msgpack.decode(payload, type=EventBatch) == batch(sent - 2)


def test_what_waits_is_sent_before_the_end(publisher):
    with zmq.Context() as context, context.socket(zmq.SUB) as listener:
        listener.connect(publisher.endpoints[0])
        listener.subscribe("")
        end = time.monotonic() + 20
        while not listener.poll(20):
            assert time.monotonic() < end
            publisher.publish(batch(0))
        for number in range(50):
            publisher.publish(batch(1000 + number))
        publisher.shutdown()
        last = None
        while listener.poll(500):
            last = listener.recv_multipart()
        assert msgspec.msgpack.decode(last[2], type=EventBatch).ts == 1049.0


def test_what_is_dropped_leaves_a_gap_in_its_place():
    taken, may_go_on = threading.Event(), threading.Event()
    sent = []

    class Slow(EventPublisher):
        def _send(self, number, batch):
            sent.append((number, batch.ts))
            taken.set()
            assert may_go_on.wait(20)

    config = KVEventsConfig(endpoint="tcp://127.0.0.1:*", max_queue_size=2)
    publisher = Slow(config)
    try:
        publisher.publish(batch(0))
        assert taken.wait(20)
        for number in range(1, 5):  # two of them find no room
            publisher.publish(batch(number))
    finally:
        may_go_on.set()
        publisher.shutdown()
    assert sent == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert next(publisher._numbers) == 5, "the next one shows that two are missing"


def test_an_address_that_is_taken_is_refused(publisher):
    config = KVEventsConfig(endpoint=publisher.endpoints[0])
    with pytest.raises(ConfigError, match="cannot be listened at"):
        EventPublisher(config)


@pytest.mark.parametrize(
    ("config", "settings", "words"),
    [
        ({"enable": True}, {}, "It takes"),
        ({"publisher": "kafka"}, {}, "zmq, null"),
        ({"hwm": 0}, {}, "at least 1"),
        ({"endpoint": 5}, {}, "a string"),
        ({"enable_kv_cache_events": True}, {"enable_prefix_caching": False}, "prefix cache"),
        ({"enable_kv_cache_events": True}, {"data_parallel_size": 2}, "one endpoint"),
    ],
)
def test_settings_that_cannot_work_are_refused(config, settings, words):
    with pytest.raises(ConfigError, match=words):
        resolve_kv_events(EngineArgs(kv_events_config=config, **settings))


def test_off_is_off():
    assert resolve_kv_events(EngineArgs()) is None
    assert resolve_kv_events(EngineArgs(kv_events_config={"topic": "x"})) is None
    null = {"enable_kv_cache_events": True, "publisher": "null"}
    assert resolve_kv_events(EngineArgs(kv_events_config=null)) is None
    on = resolve_kv_events(EngineArgs(kv_events_config={"enable_kv_cache_events": True}))
    assert on.endpoint == "tcp://127.0.0.1:5557"
