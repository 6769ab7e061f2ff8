"""Responses that are kept: what is found, by whom, for how long, and what goes first."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import stat

import msgspec
import pytest

from tokenmill.entrypoints.http.responses.store import (
    KeptResponse,
    ResponseStore,
    TooMuchKeptError,
)
from tokenmill.errors import ConfigError

ROOM = 10**6


class Clock:
    def __init__(self):
        self.now = 1_000.0

    def __call__(self):
        return self.now


def response(id, *, previous=None, text="", owner="", status="completed"):
    body = msgspec.json.encode({"id": id, "status": status, "text": text})
    return KeptResponse(
        id, owner, status, body, previous, [{"id": f"in_{id}"}], [{"id": f"out_{id}"}]
    )


class Store:
    """The store without its loop."""

    def __init__(self, path=None, *, max_bytes=10**6, ttl=100.0):
        self.clock = Clock()
        self._store = ResponseStore(
            None if path is None else str(path), max_bytes=max_bytes, ttl=ttl, clock=self.clock
        )

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def __getattr__(self, name):
        if name == "check":
            return self._store.check
        method = getattr(self._store, name)
        return lambda *arguments: asyncio.run(self._run(method, *arguments))

    @property
    def size(self):
        """As it is counted."""
        return self._store._size

    def run(self, statement):
        """One statement, in the store's own thread; its first row."""
        store = self._store
        return store._thread.submit(lambda: store._open().execute(statement).fetchone()).result()

    @staticmethod
    async def _run(method, *arguments):
        return await method(*arguments)

    def history_ids(self, id, owner=""):
        found = self.history(id, owner, ROOM)
        return None if found is None else [item["id"] for item in found[1]]


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path):
    with Store(None if request.param == "memory" else tmp_path / "kept.db") as store:
        yield store


def test_what_is_put_is_found(store):
    first = response("a", text="Ho")
    assert store.put(first)
    found = store.get("a", "")
    assert (found.body, found.status, found.previous) == (first.body, "completed", None)
    assert store.input_items("a") == [{"id": "in_a"}]
    assert store.items(["out_a"], "", ROOM)[0] == {"id": "out_a"}
    assert store.get("b", "") is None
    assert store.items(["b"], "", ROOM)[0] is None
    assert store.history("b", "", ROOM) is None


def test_one_with_the_same_id_takes_its_place(store):
    store.put(response("a", text="long " * 100))
    store.put(response("a", text="short", status="failed"))
    assert store.get("a", "").status == "failed"
    assert store.input_items("a") == [{"id": "in_a"}]


def test_a_history_is_that_of_the_whole_chain(store):
    store.put(response("a"))
    store.put(response("b", previous="a"))
    store.put(response("c", previous="b", status="incomplete"))
    assert store.history("c", "", ROOM)[0] == "incomplete"
    assert store.history_ids("c") == ["in_a", "out_a", "in_b", "out_b", "in_c", "out_c"]
    assert store.history_ids("a") == ["in_a", "out_a"]
    store.delete("a", "")
    assert store.history_ids("c") is None


def test_no_more_is_read_than_is_wanted(store):
    store.put(response("a"))
    store.put(response("b", previous="a"))
    item = len(msgspec.json.encode({"id": "out_a"}))
    assert len(store.items(["out_a", "x"] * 10, "", 10 * item)) == 20
    with pytest.raises(TooMuchKeptError):
        store.items(["out_a"] * 11, "", 10 * item)
    chain = 2 * (item + len(msgspec.json.encode({"id": "in_a"})))
    assert len(store.history("b", "", chain)[1]) == 4
    with pytest.raises(TooMuchKeptError):
        store.history("b", "", chain - 1)


def test_nobody_sees_what_is_another_key_s(store):
    store.put(response("a", owner="key"))
    store.put(response("b", owner="other", previous="a"))
    assert store.get("a", "") is store.get("a", "other") is None
    assert store.items(["in_a"], "other", ROOM)[0] is None
    assert store.history("a", "other", ROOM) is store.history("b", "other", ROOM) is None
    assert not store.delete("a", "other")
    assert store.get("a", "key") is not None
    assert store.delete("a", "key")
    assert not store.delete("a", "key")


def test_what_nobody_uses_is_forgotten(store):
    store.put(response("a"))
    store.put(response("b", previous="a"))
    store.put(response("c"))
    store.clock.now += 60
    store.history("b", "", ROOM)  # which is a use of both
    store.clock.now += 60
    assert store.get("c", "") is None
    assert store.items(["in_c"], "", ROOM)[0] is None
    assert store.history_ids("b") is not None
    store.clock.now += 101
    assert store.history("b", "", ROOM) is None


def test_what_was_used_longest_ago_makes_room():
    one = response("a", text="x" * 1_000)
    with Store(max_bytes=3 * len(one.body) + 200) as store:
        for id in "abc":
            store.put(response(id, text="x" * 1_000))
            store.clock.now += 1
        store.history("a", "", ROOM)
        store.clock.now += 1
        store.put(response("d", text="x" * 1_000))
        assert [id for id in "abcd" if store.get(id, "")] == ["a", "c", "d"]
        # One that is too large for all of them is not kept, and costs none of the others.
        assert not store.put(response("e", text="x" * 4_000))
        assert [id for id in "acde" if store.get(id, "")] == ["a", "c", "d"]


def test_nothing_is_kept_without_room():
    with Store(max_bytes=0) as store:
        assert not store.put(response("a"))
        assert store.get("a", "") is None


def test_a_file_is_read_again_by_the_next_server(tmp_path):
    path = tmp_path / "kept.db"
    with Store(path) as store:
        store.put(response("a", text="é" * 50, owner="key"))
        store.put(response("b", status="in_progress"))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with Store(path) as store:
        store.check()
        assert msgspec.json.decode(store.get("a", "key").body)["text"] == "é" * 50
        lost = store.get("b", "")
        assert lost.status == msgspec.json.decode(lost.body)["status"] == "failed"


def test_a_forgotten_text_is_not_in_the_file(tmp_path):
    path = tmp_path / "kept.db"
    with Store(path) as store:
        store.put(response("a", text="a secret " * 1_000))
        for number in range(20):
            store.put(response(str(number), text=f"number {number:03}"))
        for number in range(0, 20, 2):
            store.delete(str(number), "")
        store.delete("a", "")
    left = path.read_bytes()
    assert b"a secret" not in left
    assert [f"number {number:03}".encode() in left for number in range(20)] == [False, True] * 10
    assert len(left) < 100_000


def test_a_response_that_cannot_be_written_changes_nothing():
    with Store() as store:
        store.put(response("a", text="before"))
        store.run(
            "CREATE TRIGGER full BEFORE INSERT ON items WHEN NEW.id = 'bad'"
            " BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"
        )
        failing = response("a", text="behind")
        failing.output = [{"id": "bad"}]
        size = store.size
        with pytest.raises(sqlite3.Error):
            store.put(failing)
        assert store.size == size
        assert b"before" in store.get("a", "").body
        assert store.history_ids("a") == ["in_a", "out_a"]


def test_a_file_that_is_none_of_ours_is_refused(tmp_path):
    (tmp_path / "text").write_text("no database " * 100)
    newer = sqlite3.connect(tmp_path / "newer")
    newer.execute("PRAGMA user_version = 9")
    newer.close()
    taken = tmp_path / "taken"
    with Store(taken) as store:
        store.put(response("a"))
        for path in ("text", "newer", "taken", "missing/kept.db"):
            with (
                Store(tmp_path / path) as other,
                pytest.raises(ConfigError, match="response_store"),
            ):
                other.check()


def test_the_size_is_never_more_than_it_may_be():
    """Whatever happens in whatever order, the sizes add up, and the chains are whole or refused."""
    choose = random.Random(0)
    with Store(max_bytes=4_000, ttl=30) as store:
        ids = []
        for number in range(120):
            store.clock.now += choose.random()
            id = f"r{number}" if choose.random() < 0.9 or not ids else choose.choice(ids)
            previous = choose.choice([*ids[-5:], None])
            store.put(response(id, previous=previous, text="x" * choose.randrange(600)))
            ids.append(id)
            if choose.random() < 0.3:
                store.history(choose.choice(ids), "", ROOM)
            if choose.random() < 0.1:
                store.delete(choose.choice(ids), "")
            (total,) = store.run("SELECT SUM(size) FROM responses")
            assert store.size == (total or 0) <= 4_000
            for each in ids[-10:]:
                found = store.history_ids(each)
                assert found is None or found[-2:] == [f"in_{each}", f"out_{each}"]


def test_a_file_with_a_damaged_response_is_refused(tmp_path):
    path = tmp_path / "damaged"
    with Store(path) as store:
        store.put(response("a", status="in_progress"))
    damaged = sqlite3.connect(path)
    damaged.execute("UPDATE responses SET body = 'x'")
    damaged.commit()
    damaged.close()
    with Store(path) as store, pytest.raises(ConfigError, match="response_store"):
        store.check()
