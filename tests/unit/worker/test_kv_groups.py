"""Which layers share a block table, and which share memory."""

from __future__ import annotations

import pytest

from tokenmill.contracts.kv_cache import KVCacheConfig, KVCacheKind, KVCacheSpec
from tokenmill.contracts.kv_groups import group_layers


def specs(windows, head_sizes=None):
    head_sizes = head_sizes or [8] * len(windows)
    return {
        f"layer.{index}": KVCacheSpec(
            2,
            head_size,
            "bfloat16",
            KVCacheKind.SLIDING_WINDOW if window else KVCacheKind.FULL,
            window,
        )
        for index, (window, head_size) in enumerate(zip(windows, head_sizes, strict=True))
    }


@pytest.mark.parametrize(
    ("windows", "sizes"),
    [
        ([None] * 5, [5]),
        ([64] * 5, [5]),
        ([64, None] * 13, [13, 13]),
        (([512] * 5 + [None]) * 3, [3, 3, 3, 3, 3, 3]),
        ([512] * 22 + [None] * 4, [4, 4, 4, 4, 4, 2, 4]),
        ([512] * 27 + [None], [4, 4, 4, 4, 4, 4, 3, 1]),
        ([8, 16, None], [1, 1, 1]),
    ],
)
def test_groups_are_as_small_as_the_rarest_kind_but_few(windows, sizes):
    layers = specs(windows)
    groups = group_layers(layers)
    assert [len(group.layer_names) for group in groups] == sizes
    assert sorted(name for group in groups for name in group.layer_names) == sorted(layers)
    for group in groups:
        assert {layers[name] for name in group.layer_names} == {group.spec}
    cache = KVCacheConfig(10, 16, groups)
    assert cache.bytes_per_block == 16 * max(sizes) * 2 * 2 * 8 * 2


def test_layers_that_keep_another_number_of_bytes_have_slots_of_their_own():
    groups = group_layers(specs([64, None, 64, None], head_sizes=[8, 8, 8, 16]))
    assert [group.layer_names for group in groups] == [
        ("layer.0",),
        ("layer.2",),
        ("layer.1",),
        ("layer.3",),
    ]
    assert KVCacheConfig(10, 16, groups).bytes_per_block == 16 * (2 * 2 * 8 * 2 + 2 * 2 * 16 * 2)
