"""Blocks as bytes, in files and in memory."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from tokenmill.contracts.kv_transfer import BlockCopy, Transferred
from tokenmill.errors import ConfigError
from tokenmill.features.kv_transfer import disk
from tokenmill.features.kv_transfer.disk import DiskStore
from tokenmill.features.kv_transfer.memory import MemoryStore
from tokenmill.features.kv_transfer.pool_blocks import LayerBlocks, PoolBlocks
from tokenmill.features.kv_transfer.transfer import BlockTransfer, Finished

SIZE = 1000


def key_of(number):
    return number.to_bytes(36, "little")


def block_of(number, size=SIZE):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)


def store_in(path, max_bytes=1 << 20, root=b"root", **more):
    return DiskStore(path, root, max_bytes, **more)


def num_bytes_in(path):
    return sum(each.stat().st_size for each in path.rglob("*.kv"))


@pytest.fixture(params=["disk", "memory"])
def store(request, tmp_path):
    return store_in(tmp_path) if request.param == "disk" else MemoryStore(1 << 20)


def test_what_is_kept_comes_back(store):
    for number in range(5):
        assert not store.has(key_of(number))
        assert store.read(key_of(number), SIZE) is None
        store.write(key_of(number), block_of(number))
    for number in range(5):
        assert store.has(key_of(number))
        assert torch.equal(store.read(key_of(number), SIZE), block_of(number))


def test_a_block_of_another_size_is_none(store):
    store.write(key_of(1), block_of(1))
    assert store.read(key_of(1), SIZE - 1) is None


def test_what_is_larger_than_everything_is_not_kept(tmp_path):
    for each in (store_in(tmp_path, 500), MemoryStore(500)):
        each.write(key_of(1), block_of(1))
        assert not each.has(key_of(1))


def test_memory_keeps_what_was_used_last():
    store = MemoryStore(3 * SIZE)
    data = block_of(0)
    store.write(key_of(0), data)
    data.zero_()
    assert torch.equal(store.read(key_of(0), SIZE), block_of(0)), "a copy is kept"
    for number in range(1, 4):
        store.write(key_of(number), block_of(number))
        store.read(key_of(0), SIZE)
    assert [number for number in range(4) if store.has(key_of(number))] == [0, 2, 3]


def test_a_directory_keeps_what_was_used_last(tmp_path):
    store = store_in(tmp_path, max_bytes=10 * (SIZE + 48))
    for number in range(10):
        store.write(key_of(number), block_of(number))
        os.utime(store._path(key_of(number)), (number, number))
    store.read(key_of(0), SIZE)
    store.write(key_of(10), block_of(10))
    kept = [number for number in range(11) if store.has(key_of(number))]
    assert kept[0] == 0, "read a moment ago"
    assert kept[-1] == 10
    assert 1 not in kept
    assert num_bytes_in(tmp_path) <= 10 * (SIZE + 48)


def test_engines_that_share_a_directory_keep_its_size_together(tmp_path):
    limit = 40 * (SIZE + 48)
    stores = [store_in(tmp_path, limit, root) for root in (b"one", b"two", b"two")]
    largest = 0
    for number in range(100):
        stores[number % 3].write(key_of(number), block_of(number))
        largest = max(largest, num_bytes_in(tmp_path))
    # Each looks at what the others have written after a sixteenth of the limit of its own.
    assert limit / 2 < largest <= limit * (1 + 3 / 16)
    assert stores[1].has(key_of(98)) == stores[2].has(key_of(98))
    assert torch.equal(stores[1].read(key_of(98), SIZE), block_of(98))
    assert not stores[0].has(key_of(98)), "another root"


def test_the_secret_is_needed_to_write_a_block_and_to_read_it(tmp_path):
    store_in(tmp_path, secret=b"ours").write(key_of(1), block_of(1))
    assert store_in(tmp_path, secret=b"theirs").read(key_of(1), SIZE) is None
    assert not store_in(tmp_path, secret=b"ours").has(key_of(1)), "what is wrong is removed"


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    store = store_in(tmp_path)

    def fail(descriptor, data):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(disk.os, "write", fail)
    with pytest.raises(OSError, match="no space"):
        store.write(key_of(1), block_of(1))
    monkeypatch.undo()
    assert not [each for each in tmp_path.rglob("*") if each.is_file() and each.name != "lock"]
    store.write(key_of(1), block_of(1))
    assert store.has(key_of(1))


def test_what_a_dead_engine_has_left_is_removed(tmp_path):
    store = store_in(tmp_path)
    store.write(key_of(1), block_of(1))
    old, new = (Path(f"{store._path(key_of(1))}.{name}.1.tmp") for name in ("0" * 16, "f" * 16))
    for each in (old, new):
        each.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    store_in(tmp_path)
    assert not old.exists()
    assert new.exists(), "somebody may be writing it"


def test_files_of_others_in_the_directory_are_left_alone(tmp_path):
    ours = f"{'0' * 16}/00"
    others = [
        tmp_path / name
        for name in (
            "a.tmp",
            "a.kv",
            "00/11/22.kv",
            f"{'0' * 16}/pictures/22.kv",
            f"{ours}/a.tmp",
            f"{ours}/notes.kv",
            f"{ours}/22.kv.old",
            f"{ours}/22.kv.{'0' * 16}.1.tmp.old",
            f"{ours}/22.kv.mine.tmp",
        )
    ]
    for each in others:
        each.parent.mkdir(parents=True, exist_ok=True)
        each.write_bytes(bytes(100_000))
        os.utime(each, (1, 1))
    store = store_in(tmp_path, max_bytes=5 * (SIZE + 48))
    for number in range(20):
        store.write(key_of(number), block_of(number))
    assert all(each.exists() for each in others)
    assert store.has(key_of(19)), "nor do they count"
    assert num_bytes_in(store._blocks) <= 5 * (SIZE + 48)


def test_a_directory_that_somebody_has_emptied_is_filled_again(tmp_path):
    store = store_in(tmp_path / "kv", max_bytes=5 * (SIZE + 48))
    for round in range(2):
        for number in range(20):
            store.write(key_of(number), block_of(number))
        assert store.has(key_of(19)), round
        shutil.rmtree(tmp_path / "kv")


def test_an_engine_that_is_stopped_while_it_makes_room_holds_up_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_LOCK_SECONDS", 0.05)
    store = store_in(tmp_path, max_bytes=2 * (SIZE + 48))
    for number in range(2):
        store.write(key_of(number), block_of(number))
    with open(tmp_path / "lock", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            store.write(key_of(2), block_of(2))
    store.write(key_of(2), block_of(2))
    assert store.has(key_of(2))


def test_an_engine_waits_for_another_that_makes_room(tmp_path):
    store = store_in(tmp_path, max_bytes=2 * (SIZE + 48))
    for number in range(2):
        store.write(key_of(number), block_of(number))
    with open(tmp_path / "lock", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        timer = threading.Timer(0.1, fcntl.flock, (lock, fcntl.LOCK_UN))
        timer.start()
        store.write(key_of(2), block_of(2))
        timer.join()
    assert store.has(key_of(2))


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=r"kv_offload_dir.*cannot be written"):
        store_in(file / "kv")


def test_one_block_written_by_many_is_one_file(tmp_path):
    stores = [store_in(tmp_path) for _ in range(4)]

    def write(store):
        for number in range(20):
            store.write(key_of(number), block_of(number))

    threads = [threading.Thread(target=write, args=(each,)) for each in stores]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(list(tmp_path.rglob("*.kv"))) == 20
    assert all(torch.equal(stores[0].read(key_of(n), SIZE), block_of(n)) for n in range(20))


# ---- blocks of the pool -------------------------------------------------------------------------


def pool():
    """Two groups in one layout each: blocks in front, and behind keys and values."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(-128, 127, (9, 2, 3, 5), generator=generator, dtype=torch.int8)
    second = torch.randn(2, 9, 3, 4, generator=generator).bfloat16()
    third = torch.randint(0, 1 << 60, (9, 2), generator=generator)
    groups = [
        [LayerBlocks(first, 0), LayerBlocks(first.clone() + 1, 0)],
        [LayerBlocks(third, 0), LayerBlocks(second, 1)],
    ]
    return PoolBlocks(groups), groups


@pytest.mark.parametrize("group", [0, 1])
def test_blocks_go_out_and_come_in_bit_by_bit(group):
    blocks, groups = pool()
    before = [layer.tensor.clone() for layer in groups[group]]
    data = blocks.read(group, [7, 2, 4])
    assert data.shape == (3, blocks.block_bytes(group))
    for layer in groups[group]:
        layer.tensor.zero_()
    blocks.write(group, [7, 2, 4], data)
    for layer, old in zip(groups[group], before, strict=True):
        for index in range(9):
            found = layer.tensor.select(layer.dim, index)
            wanted = old.select(layer.dim, index) if index in (7, 2, 4) else torch.zeros(())
            assert torch.equal(found, wanted.to(found.dtype).expand_as(found)), index
    blocks.write(group, [1], data[1:2])
    for layer, old in zip(groups[group], before, strict=True):
        assert torch.equal(layer.tensor.select(layer.dim, 1), old.select(layer.dim, 2))


def wait_for(transfer, count):
    done = []
    end = time.monotonic() + 30
    while len(done) < count:
        assert time.monotonic() < end
        transfer.wait(0.01)
        done += transfer.take_finished()
    return done


def test_jobs_end_whatever_happens():
    class Broken(MemoryStore):
        def read(self, key, num_bytes):
            raise RuntimeError("it burns")

        def write(self, key, data):
            raise OSError(errno.ENOSPC, "no space")

    blocks, _ = pool()
    transfer = BlockTransfer(b"root", blocks, [Broken(1 << 20)], Finished())
    copies = [BlockCopy(key_of(number), 0, number) for number in range(1, 4)]
    transfer.save(1, copies)
    transfer.load(2, copies, None)
    done = {each.job_id: each for each in wait_for(transfer, 2)}
    assert done[1].copied == done[2].copied == frozenset()
    assert "no space" in done[1].error
    assert "it burns" in done[2].error
    transfer.shutdown()
    transfer.shutdown()


def test_the_end_waits_for_what_has_begun_alone():
    begun, may_go_on = threading.Event(), threading.Event()

    class Slow(MemoryStore):
        def write(self, key, data):
            begun.set()
            assert may_go_on.wait(20)
            super().write(key, data)

    blocks, _ = pool()
    store = Slow(1 << 20)
    transfer = BlockTransfer(b"root", blocks, [store], Finished())
    for number in range(1, 6):
        transfer.save(number, [BlockCopy(key_of(number), 0, number)])
    assert begun.wait(20)
    ending = threading.Thread(target=transfer.shutdown)
    ending.start()
    end = time.monotonic() + 20
    while transfer._saving._work_queue.qsize() > 1:  # the pool's own sign of its end is left
        assert time.monotonic() < end
        time.sleep(0.001)
    may_go_on.set()
    ending.join(20)
    assert [number for number in range(1, 6) if store.has(key_of(number))] == [1]


def test_places_are_asked_in_their_order(tmp_path):
    blocks, groups = pool()
    memory, files = MemoryStore(1 << 20), store_in(tmp_path)
    transfer = BlockTransfer(b"root", blocks, [memory, files], Finished())
    copies = [BlockCopy(key_of(number), number % 2, number) for number in range(1, 9)]
    transfer.save(1, copies)
    assert wait_for(transfer, 1) == [Transferred(1, frozenset(each.key for each in copies))]
    before = [[layer.tensor.clone() for layer in group] for group in groups]
    memory._blocks.pop(key_of(3))
    os.remove(files._path(key_of(4)))
    for group in groups:
        for layer in group:
            layer.tensor.zero_()
    transfer.load(2, copies, None)
    assert wait_for(transfer, 1)[0].copied == {each.key for each in copies}
    for copy in copies:
        for layer, old in zip(groups[copy.group], before[copy.group], strict=True):
            place = layer.dim, copy.block_id
            assert torch.equal(layer.tensor.select(*place), old.select(*place))
    transfer.shutdown()
