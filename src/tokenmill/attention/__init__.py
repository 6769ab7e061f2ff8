"""Paged attention over the flat batch.

    backend.py          the protocol a backend implements, and its metadata
    selection.py        which backend is used, and why the others were not
    forward_context.py  how attention layers find their metadata
    reference.py        plain torch, exact for any batching and chunking

Knows neither models nor the scheduler: only rows of queries, block tables and a cache.
"""
