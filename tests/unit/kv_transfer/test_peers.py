"""Blocks from engine to engine, and what becomes of it when one of them fails."""

from __future__ import annotations

import dataclasses
import threading
import time

import msgspec
import pytest
import torch
import zmq

from tokenmill.config.kv_transfer import KVTransferConfig
from tokenmill.contracts.kv_transfer import BlockCopy, RemoteOrigin
from tokenmill.errors import ConfigError
from tokenmill.features.kv_transfer import taker as taker_module
from tokenmill.features.kv_transfer.giver import Giver
from tokenmill.features.kv_transfer.memory import MemoryStore
from tokenmill.features.kv_transfer.messages import (
    Fetch,
    Found,
    Refused,
    decode_answer,
    decode_question,
    encode,
    root_mark,
)
from tokenmill.features.kv_transfer.pool_blocks import LayerBlocks, PoolBlocks
from tokenmill.features.kv_transfer.taker import FetchError, Taker
from tokenmill.features.kv_transfer.transfer import BlockTransfer, Finished

ROOT = b"r" * 32
CONFIG = KVTransferConfig(connector="TCPConnector", engine_id="us", timeout_seconds=20.0)
SECRET = dataclasses.replace(CONFIG, secret=b"sixteen bytes or more")
BYTES = 64


def pool(fill=True):
    values = torch.arange(20 * BYTES).to(torch.uint8).view(20, BYTES)
    return PoolBlocks([[LayerBlocks(values.clone() if fill else torch.zeros_like(values), 0)]])


def copies(count=10):
    return [BlockCopy(bytes([number]) * 36, 0, number) for number in range(1, count + 1)]


@pytest.fixture
def giving():
    """Makes givers, and ends them."""
    made = []

    def give(config=CONFIG, root=ROOT, ended=lambda job: None):
        made.append(Giver(config, root, pool(), ended))
        return made[-1]

    yield give
    for each in made:
        each.shutdown()


@pytest.fixture
def taking():
    """Makes takers, and ends them."""
    made = []

    def take(config=CONFIG, root=ROOT):
        made.append(Taker(config, root))
        return made[-1]

    yield take
    for each in made:
        each.shutdown()


def origin_of(params, **changed):
    names = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
    return RemoteOrigin(**({name: params[name] for name in names} | changed))


def fetch(taker, origin, blocks):
    found = {}
    for batch, data in taker.fetch(origin, blocks, BYTES):
        found |= {each.block_id: bytes(row.tolist()) for each, row in zip(batch, data, strict=True)}
    return found


def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("config", [CONFIG, SECRET], ids=["open", "secret"])
@pytest.mark.parametrize("batch_bytes", [1, 3 * BYTES, 1 << 20])
def test_blocks_are_fetched_and_let_go(config, batch_bytes, giving, taking, monkeypatch):
    monkeypatch.setattr(taker_module, "_BATCH_BYTES", batch_bytes)
    ended = []
    giver, taker = giving(config, ended=ended.append), taking(config)
    origin = origin_of(giver.hold(7, "request", copies()))
    found = fetch(taker, origin, copies())
    wanted = pool().read(0, list(range(1, 11)))
    assert found == {n: bytes(wanted[n - 1].tolist()) for n in range(1, 11)}
    assert not ended
    taker.release(origin)
    until(lambda: ended)
    assert ended[0].job_id == 7
    with pytest.raises(FetchError, match="not held any more"):
        fetch(taker, origin, copies())


def test_only_what_is_held_is_given(giving, taking):
    giver, taker = giving(), taking()
    origin = origin_of(giver.hold(1, "request", copies(3)))
    with pytest.raises(FetchError, match="not all"):
        fetch(taker, origin, copies(4))
    with pytest.raises(FetchError, match="not held"):
        fetch(taker, msgspec.structs.replace(origin, remote_request_id="another"), copies(1))


def test_engines_that_differ_are_told_so(giving, taking):
    giver, taker = giving(), taking(root=b"x" * 32)
    origin = origin_of(giver.hold(1, "request", copies()))
    with pytest.raises(FetchError, match="differ in model"):
        fetch(taker, origin, copies())


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (CONFIG, SECRET),
        (SECRET, CONFIG),
        (dataclasses.replace(SECRET, secret=b"another secret, as long"), SECRET),
    ],
    ids=["taker without", "giver without", "another"],
)
def test_without_the_secret_nothing_is_given(ours, theirs, giving, taking):
    giver = giving(theirs)
    taker = taking(dataclasses.replace(ours, timeout_seconds=0.5))
    origin = origin_of(giver.hold(1, "request", copies()))
    with pytest.raises(FetchError, match=r"gone, or has another secret|silent"):
        fetch(taker, origin, copies())
    with_secret = taking(theirs)
    assert len(fetch(with_secret, origin, copies())) == 10, "nobody else is held up"


def test_a_lease_ends_unless_somebody_asks(giving, taking):
    ended = []
    giver = giving(dataclasses.replace(CONFIG, lease_seconds=0.4), ended=ended.append)
    taker = taking()
    origin = origin_of(giver.hold(3, "request", copies()))
    end = time.monotonic() + 0.8
    while time.monotonic() < end and not ended:
        fetch(taker, origin, copies(1))
    assert not ended, "asking goes on with the lease"
    until(lambda: ended)
    assert [each.job_id for each in ended] == [3]


def test_nobody_there_is_seen_at_once(taking):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
    origin = RemoteOrigin("them", "request", "127.0.0.1", port, 10)
    with pytest.raises(FetchError, match="gone"):
        fetch(taking(), origin, copies())


def test_hosts_that_are_not_allowed_are_not_asked(taking):
    origin = RemoteOrigin("them", "request", "10.0.0.1", 5000, 10)
    with pytest.raises(FetchError, match="none of the allowed hosts"):
        fetch(taking(), origin, copies())
    with pytest.raises(FetchError, match="none of the allowed hosts"):
        taking(dataclasses.replace(SECRET, allowed_hosts=("10.0.0.2",))).release(origin)


def test_nonsense_is_answered_and_harms_nobody(giving, taking):
    giver = giving()
    origin = origin_of(giver.hold(1, "request", copies()))
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(f"tcp://127.0.0.1:{giver.port}")
        for frames in ([b"\xff\xff"], [b""], [b"a", b"b"], [encode(Found([]))]):
            socket.send_multipart(frames)
            assert socket.poll(20_000)
            assert isinstance(decode_answer(socket.recv_multipart()[0]), Refused)
        many = Fetch("request", root_mark(ROOT), [b"k"] * 5000)
        socket.send(encode(many))
        assert "5000 blocks" in decode_answer(socket.recv_multipart()[0]).reason
    assert len(fetch(taking(), origin, copies())) == 10


def test_blocks_that_cannot_be_read_end_nothing_but_their_fetch(giving, taking):
    giver = giving()
    origin = origin_of(giver.hold(1, "request", [*copies(1), BlockCopy(b"x" * 36, 0, 10_000)]))
    with pytest.raises(FetchError, match="could not be read"):
        fetch(taking(), origin, [BlockCopy(b"x" * 36, 0, 10_000)])
    assert len(fetch(taking(), origin, copies(1))) == 1


def test_an_address_that_is_taken_is_refused(giving):
    with pytest.raises(ConfigError, match=r"cannot be listened at.*kv_port"):
        giving(dataclasses.replace(CONFIG, port=giving().port))


class FalseGiver(threading.Thread):
    """Answers `num_good` questions rightly, and the next as `bad` says; None goes away."""

    def __init__(self, num_good, bad):
        super().__init__(daemon=True)
        self.num_good, self.bad = num_good, bad
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.origin = RemoteOrigin("them", "request", "127.0.0.1", port, 10)
        self.start()

    def run(self):
        data = pool().read(0, list(range(20)))
        for number in range(100):
            sender, frame = self.socket.recv_multipart()
            question = decode_question(frame)
            if not isinstance(question, Fetch):
                break
            rows = [data[key[0]].numpy().tobytes() for key in question.keys]
            if number < self.num_good:
                self.socket.send_multipart([sender, encode(Found(question.keys)), *rows])
                continue
            if self.bad is None:
                break
            self.socket.send_multipart([sender, *self.bad(question.keys, rows)])
        self.socket.close()
        self.context.term()


@pytest.mark.parametrize(
    "bad",
    [
        None,
        lambda keys, rows: [b"nonsense"],
        lambda keys, rows: [encode(Found(keys)), *rows[:-1]],
        lambda keys, rows: [encode(Found(keys)), *rows[:-1], rows[-1][:-1]],
        lambda keys, rows: [encode(Found([b"other"] * len(keys))), *rows],
        lambda keys, rows: [encode(Refused("no more"))],
    ],
    ids=["dies", "nonsense", "too few", "too short", "others", "refuses"],
)
def test_what_came_before_a_failure_is_used_and_the_rest_is_missing(bad, taking, monkeypatch):
    monkeypatch.setattr(taker_module, "_BATCH_BYTES", 2 * BYTES)
    giver = FalseGiver(2, bad)
    blocks, finished = pool(fill=False), Finished()
    transfer = BlockTransfer(ROOT, blocks, [], finished, source=taking())
    transfer.load(5, copies(), giver.origin)
    until(transfer.has_finished)
    transfer.shutdown()
    giver.join(20)
    (done,) = transfer.take_finished()
    assert done.job_id == 5
    assert done.copied == {each.key for each in copies(4)}
    assert done.error is not None
    ids = list(range(1, 11))
    wanted = pool().read(0, ids).clone()
    wanted[4:] = 0
    assert torch.equal(blocks.read(0, ids), wanted)


def test_what_is_kept_here_is_not_fetched(giving, taking):
    store, finished = MemoryStore(1 << 20), Finished()
    for each in copies(6):
        store.write(each.key, pool().read(0, [each.block_id])[0])
    ended = []
    giver = giving(ended=ended.append)
    origin = origin_of(giver.hold(1, "request", copies()[6:]))
    blocks = pool(fill=False)
    transfer = BlockTransfer(ROOT, blocks, [store], finished, source=taking())
    transfer.load(5, copies(), origin)
    until(transfer.has_finished)
    (done,) = transfer.take_finished()
    assert (done.error, len(done.copied)) == (None, 10)
    assert torch.equal(blocks.read(0, list(range(1, 11))), pool().read(0, list(range(1, 11))))
    until(lambda: ended)
    transfer.shutdown()
