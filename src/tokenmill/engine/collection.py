"""The garbage collector, while an engine is built."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_postponed() -> Iterator[None]:
    """For a block that makes many objects that are here to stay, such as torch's.

    The collector would look through them again and again, for a quarter of a second in all, and
    free nothing. Afterwards they count as old, as if they had been looked at. Nothing changes where
    the collector is off.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else somebody's frozen objects would thaw
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        gc.enable()
