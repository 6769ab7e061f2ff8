"""What has been sent where, against a model that keeps everything; and where requests go for it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenmill.engine.prefix_index import Choice, PrefixBalancer, PrefixIndex, prefix_keys

LETTERS = st.text("ab", max_size=12)


def keys_of(text: str) -> list[bytes]:
    return prefix_keys(text.encode(), 2)


class Everything:
    """Every text that an owner was sent, and when; what is held follows from that by counting."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._sent: list[str] = []

    def record(self, text: str) -> None:
        self._sent.append(text)

    def held(self) -> set[str]:
        """Prefixes of whole blocks: the `max_blocks` that were used last, shorter ones later."""
        found: list[str] = []
        for text in reversed(self._sent):
            count = min(len(text) // 2, self._max_blocks)
            for blocks in range(1, count + 1):
                if text[: 2 * blocks] not in found:
                    found.append(text[: 2 * blocks])
        return set(found[: self._max_blocks])

    def matched(self, text: str) -> int:
        held, count = self.held(), 0
        while count < len(text) // 2 and text[: 2 * count + 2] in held:
            count += 1
        return count


@given(
    st.integers(0, 8),
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["send", "ask", "forget"]), LETTERS)),
)
def test_the_index_is_what_counting_finds(max_blocks, steps):
    index = PrefixIndex(3, max_blocks)
    models = [Everything(max_blocks) for _ in range(3)]
    for owner, what, text in steps:
        if what == "send":
            index.record(owner, keys_of(text))
            models[owner].record(text)
        elif what == "forget":
            index.forget(owner)
            models[owner] = Everything(max_blocks)
        for each in range(3):
            assert index.matched(each, keys_of(text)) == models[each].matched(text)
            assert index.num_blocks(each) == len(models[each].held()) <= max_blocks


@given(st.binary(max_size=40), st.binary(max_size=40), st.integers(1, 7))
def test_keys_are_equal_as_long_as_blocks_are(first, second, size):
    one, two = prefix_keys(first, size), prefix_keys(second, size)
    assert len(one) == len(first) // size
    for count, (a, b) in enumerate(zip(one, two, strict=False), start=1):
        assert (a == b) == (first[: count * size] == second[: count * size])
    assert prefix_keys(first, size, most=2) == one[:2]


def test_what_belongs_to_a_block_changes_it_and_all_behind_it():
    plain = prefix_keys(b"aabbcc", 2)
    with_image = prefix_keys(b"aabbcc", 2, extras={1: b"image"})
    assert [a == b for a, b in zip(plain, with_image, strict=True)] == [True, False, False]
    assert not set(plain) & set(prefix_keys(b"aabbcc", 2, root=b"salt"))


def balancer(num_owners: int = 3, blocks_per_load: float = 2) -> PrefixBalancer:
    return PrefixBalancer(num_owners, max_blocks=100, blocks_per_load=blocks_per_load)


def test_the_least_loaded_and_in_turn_where_nothing_is_known():
    even = balancer()
    order = []
    for _ in range(6):
        owner = even.choose([], {0: 1.0, 1: 1.0, 2: 1.0}).owner
        even.record(owner, [])
        order.append(owner)
    assert order == [0, 1, 2, 0, 1, 2]
    assert even.choose([], {0: 2.0, 1: 1.0, 2: 3.0}) == Choice(1, 0)
    assert even.choose([], {2: 9.0}).owner == 2


def test_a_prefix_weighs_as_much_as_it_saves():
    known, long = balancer(), keys_of("aabbaabb")
    known.record(2, long[:3])
    assert known.choose(long, {0: 0.0, 1: 0.0, 2: 1.4}) == Choice(2, 3)
    assert known.choose(long, {0: 0.0, 1: 1.0, 2: 1.6}) == Choice(0, 0)
    assert known.choose(long, {0: 0.0, 1: 0.0}).num_matched == 0


@given(
    st.lists(st.tuples(LETTERS, st.lists(st.integers(0, 9), min_size=3, max_size=3))),
    st.integers(1, 5),
)
def test_nobody_would_have_been_cheaper(requests, blocks_per_load):
    shared = balancer(blocks_per_load=blocks_per_load)
    models = [Everything(100) for _ in range(3)]
    for text, loads in requests:
        keys = keys_of(text)
        choice = shared.choose(keys, dict(enumerate(map(float, loads))))
        assert choice.num_matched == models[choice.owner].matched(text)
        prices = [
            load + (len(keys) - model.matched(text)) / blocks_per_load
            for load, model in zip(loads, models, strict=True)
        ]
        assert prices[choice.owner] == min(prices)
        shared.record(choice.owner, keys)
        models[choice.owner].record(text)
