"""Which drafts hold."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.worker.drafts import NullDrafter, count_new_tokens


@given(st.lists(st.lists(st.booleans(), max_size=4) | st.none(), max_size=6))
def test_a_request_gains_its_leading_drafts_and_one_token(reqs):
    """Per request: whether each draft equals the sampled token; None samples nothing."""
    sampled, drafts, counts, want = [], [], [], []
    for holds in reqs:
        if holds is None:
            counts.append(0)
            want.append(0)
            continue
        counts.append(len(holds) + 1)
        want.append(1 + (holds.index(False) if False in holds else len(holds)))
        sampled += [7] * (len(holds) + 1)
        # What stands for the token after the last draft is arbitrary, here as if it held.
        drafts += [7 if hold else 8 for hold in holds] + [7]
    counts = np.array(counts, np.int64)
    got = count_new_tokens(
        np.array(sampled, np.int64), np.array(drafts, np.int32), np.cumsum(counts) - counts, counts
    )
    assert got.tolist() == want


def test_the_null_drafter_proposes_nothing():
    rows = np.array([0])
    assert NullDrafter().propose(["a"], rows, rows, np.zeros((1, 1), np.int32)) == {}
