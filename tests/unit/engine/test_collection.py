"""Objects of a building engine are not looked through, and count as old afterwards."""

from __future__ import annotations

import gc

import pytest

from tokenmill.engine.collection import collection_postponed


class Node:
    pass


@pytest.fixture(autouse=True)
def enabled():
    gc.enable()
    yield
    gc.enable()


def test_nothing_is_collected_in_the_block():
    passes = []
    gc.callbacks.append(lambda phase, info: passes.append(info["generation"]))
    try:
        with collection_postponed():
            kept = [Node() for _ in range(100_000)]
            assert not passes
    finally:
        gc.callbacks.pop()
    assert len(kept) == 100_000


def test_what_was_made_counts_as_old():
    with collection_postponed():
        node = Node()
    assert gc.isenabled()
    assert any(each is node for each in gc.get_objects(generation=2))


def test_the_collector_is_on_again_after_a_failure():
    with pytest.raises(ValueError), collection_postponed():
        raise ValueError
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    with collection_postponed():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_frozen_objects_stay_frozen():
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with collection_postponed():
            pass
        assert gc.get_freeze_count() >= count
    finally:
        gc.unfreeze()
