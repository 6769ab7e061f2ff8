"""Ranks that run a model that drafts make the passes that the first one has chosen."""

from __future__ import annotations

import pytest

from helpers.ranks import together
from tokenmill.kernels import native
from tokenmill.parallel.group import SOLO, SharedMemoryGroup
from tokenmill.worker.draft_model import first_rank_decides


def test_one_rank_has_its_own_way() -> None:
    assert first_rank_decides(SOLO)([3, 0]) == [3, 0]


@pytest.mark.skipif(not native.is_available(), reason="needs the native kernels")
def test_the_first_of_several_decides() -> None:
    def choose(group: SharedMemoryGroup) -> list[list[int]]:
        agree = first_rank_decides(group)
        return [agree([group.rank + 1, 5 * group.rank]), agree([]), agree([0, 7 - group.rank])]

    assert together(3, choose) == [[[1, 0], [], [0, 7]]] * 3
