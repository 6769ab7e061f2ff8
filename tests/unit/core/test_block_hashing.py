"""Keys of blocks: a cryptographic chain with a random root and typed extras."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from helpers.core import create_request, create_scheduler
from tokenmill.contracts.request import AdapterRef, MultiModalFeature
from tokenmill.core.kv import hashing
from tokenmill.core.kv.hashing import ChainedBlockHasher, NoBlockHasher, hash_block
from tokenmill.core.request import Request

TOKENS = list(range(10, 22))


def hashes_of(prompt=TOKENS, block_size=4, root=b"root", **kwargs):
    request = Request(create_request(prompt, **kwargs), max_total_tokens=100)
    ChainedBlockHasher(block_size, root).extend(request)
    return request.block_hashes


def feature(content="cat", offset=0, length=2):
    return MultiModalFeature(content, "image", offset, length)


def test_only_full_blocks_are_hashed_and_never_twice():
    request = Request(create_request(TOKENS[:7]), max_total_tokens=100)
    hasher = ChainedBlockHasher(4)
    hasher.extend(request)
    first = list(request.block_hashes)
    assert len(first) == 1
    request.all_token_ids.append(17)
    hasher.extend(request)
    assert request.block_hashes[:1] == first
    assert len(request.block_hashes) == 2


def test_extending_gives_the_same_as_hashing_at_once():
    grown = Request(create_request(TOKENS[:1]), max_total_tokens=100)
    hasher = ChainedBlockHasher(4, b"root")
    for token_id in TOKENS[1:]:
        grown.all_token_ids.append(token_id)
        hasher.extend(grown)
    assert grown.block_hashes == hashes_of()


def test_b136_digests_have_256_bits_and_depend_on_all_before():
    base = hashes_of()
    assert {len(digest) for digest in base} == {32}
    for position in range(len(TOKENS)):
        changed = list(TOKENS)
        changed[position] += 1
        block = position // 4
        other = hashes_of(changed)
        assert other[:block] == base[:block]
        assert all(a != b for a, b in zip(other[block:], base[block:], strict=True))


def test_b136_ids_and_lengths_cannot_be_confused():
    digests = [
        hash_block(b"p", [1]),
        hash_block(b"p", [1, 0]),
        hash_block(b"p", [0, 1]),
        hash_block(b"p", [256]),
        hash_block(b"p", []),
        hash_block(b"p", [1], b"x"),
        hash_block(b"q", [1]),
    ]
    assert len(set(digests)) == len(digests)


def test_b136_the_root_differs_between_processes():
    code = "from tokenmill.core.kv.hashing import PROCESS_ROOT; print(PROCESS_ROOT.hex())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(other.stdout.strip()) == 64
    assert other.stdout.strip() != hashing.PROCESS_ROOT.hex()


def test_b136_a_forced_collision_is_caught():
    """Other tokens under the same hash are a hit; comparing tokens notices."""
    kv = create_scheduler().kv
    first, second = (
        Request(create_request(prompt), max_total_tokens=100)
        for prompt in ([1, 2, 3, 4, 5], [6, 7, 8, 9, 5])
    )
    kv.allocate_slots(first, 5)
    kv.cache_blocks(first, 5)
    second.block_hashes = list(first.block_hashes)
    with pytest.raises(AssertionError, match=r"hash collision: block 1 holds \[1, 2, 3, 4\]"):
        kv.get_computed_blocks(second)


def test_b137_the_salt_is_in_the_first_block_and_so_in_all():
    plain, a, b = hashes_of(), hashes_of(cache_salt="a"), hashes_of(cache_salt="b")
    assert a == hashes_of(cache_salt="a")
    for one, other in itertools.combinations((plain, a, b), 2):
        assert all(x != y for x, y in zip(one, other, strict=True))


def test_extras_are_typed():
    values = [
        {},
        {"cache_salt": "x"},
        {"adapter": AdapterRef("any", "x")},
        {"cache_salt": "x", "adapter": AdapterRef("any", "x")},
        {"cache_salt": "xax"},
        {"cache_salt": "xa\1\0\0\0x"},
        {"mm_features": [feature("x")]},
        {"mm_features": [feature("x", 1)]},
        {"mm_features": [feature("x"), feature("y", 2)]},
        {"mm_features": [feature("xy")]},
    ]
    assert len({hashes_of(**value)[0] for value in values}) == len(values)


def test_an_adapter_counts_by_its_load_not_by_its_name():
    same = hashes_of(adapter=AdapterRef("a", "load-1"))
    assert same == hashes_of(adapter=AdapterRef("renamed", "load-1"))
    assert same != hashes_of(adapter=AdapterRef("a", "load-2"))


@pytest.mark.parametrize(
    ("offset", "length", "first_changed"), [(0, 1, 0), (3, 2, 0), (4, 4, 1), (7, 1, 1), (8, 2, 2)]
)
def test_features_change_the_blocks_from_where_they_begin(offset, length, first_changed):
    base = hashes_of()
    other = hashes_of(mm_features=[feature(offset=offset, length=length)])
    changed = [a != b for a, b in zip(base, other, strict=True)]
    assert changed == [block >= first_changed for block in range(3)]


def test_without_caching_there_are_no_hashes():
    request = Request(create_request(TOKENS), max_total_tokens=100)
    NoBlockHasher().extend(request)
    assert request.block_hashes == []
